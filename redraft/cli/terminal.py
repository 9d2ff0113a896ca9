"""Events drawn on a terminal: the canvas settles in place, inside the scrollback, and committed text stays behind.

A translator of the event stream; decides nothing. Grey is noise, green changed at this step, violet is draft (accepted
before), underlined is pinned, plain text is committed. Redraws at most 20 times a second. When there is no terminal,
nothing here runs.
"""

import signal
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from types import FrameType

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from redraft.diffusion.generate import Draft, Finished, Stats
from redraft.tasks.text_events import TextCommitted, TextEvent
from redraft.tokenizer.tokenizer import Tokenizer

FRAME_SECONDS = 1 / 20
NOISE, CHANGED, DRAFT, QUIET, PINNED = "bright_black", "green", "medium_purple1", "bright_black", "underline"


def harmless(text: str) -> str:
    """Text without control characters: a model's output must not steer the terminal. Joiners stay; scripts need them."""
    kept = "\n\t\u200c\u200d"
    return "".join(c for c in text if c in kept or unicodedata.category(c) not in ("Cc", "Cf"))


@contextmanager
def undivided() -> Iterator[None]:
    """Around a drawing: Ctrl-C arrives after it, not in the middle, where it would leave half a page behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[tuple[int, FrameType | None]] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: pressed.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if pressed and callable(usual):
        usual(*pressed[0])


class Painter:
    """Drafts as coloured text. Remembers the last one, to know what changed."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[int]) -> None:
        self.tokenizer, self.stops = tokenizer, frozenset(stops)
        self.before: tuple[list[int], list[bool]] | None = None  # tokens and acceptance one step ago
        self.pinned: frozenset[int] = frozenset()  # positions of the page

    def draft(self, event: Draft) -> Text:
        """The first row's canvas after a step."""
        tokens, accepted = event.canvas_BC[0].tolist(), event.accepted_BC[0].tolist()
        page = self.page(tokens, accepted)
        self.before = (tokens, accepted)
        return page

    def page(self, tokens: list[int], accepted: list[bool]) -> Text:
        """The canvas as coloured text, cut at an accepted stop token."""
        end = next((i for i, t in enumerate(tokens) if accepted[i] and t in self.stops), len(tokens))
        styles = [self._style(i, tokens[i], accepted[i]) for i in range(end)]
        page = Text()
        for style, run in groupby(range(end), key=styles.__getitem__):
            text = harmless(self.tokenizer.decode_fragment([tokens[i] for i in run]))
            page.append(text.replace("\n", " ") if style == NOISE else text, style)
        return page

    def _style(self, at: int, token: int, accepted: bool) -> str:
        if at in self.pinned:
            return PINNED
        if not accepted:
            return NOISE
        if self.before is None or not self.before[1][at] or self.before[0][at] != token:
            return CHANGED
        return DRAFT


class CanvasView:
    """Draws one answer. Use as a context manager around the stream; leaving it in any way clears the unfinished page."""

    def __init__(self, console: Console, tokenizer: Tokenizer, stops: Iterable[int]) -> None:
        self.console, self.painter = console, Painter(tokenizer, stops)
        self._live: Live | None = None
        self._drawn = 0.0
        self._column = 0  # where the committed text ends on its last line
        self._reasoned = False  # the last thing written was reasoning; the answer starts a line of its own

    def __enter__(self) -> "CanvasView":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
        self._end_line()

    def show(self, events: Iterator[TextEvent]) -> Iterator[TextEvent]:
        """Draws events as they pass by."""
        for event in events:
            with undivided():
                self._show(event)
            yield event

    def watch(self, event: Draft) -> None:
        """Draws a step of a page that nothing is committed of: a hole and what follows it."""
        if event.step == 1:
            self.painter.before = None
        pinned_BC = event.pinned_BC
        self.painter.pinned = frozenset() if pinned_BC is None else frozenset(pinned_BC[0].nonzero()[:, 0].tolist())
        with undivided():
            self._draft(event)

    def _show(self, event: TextEvent) -> None:
        match event:
            case Draft():
                self._draft(event)
            case TextCommitted():
                self._clear()
                self.painter.before = None
                if event.reasoning:
                    self._write(event.reasoning, QUIET)
                    self._reasoned = True
                if event.text and self._reasoned:
                    self._end_line()
                    self._reasoned = False
                self._write(event.text)
            case Finished():
                self._end_line()

    def _draft(self, event: Draft) -> None:
        page = self.painter.draft(event)
        now = time.monotonic()
        if now - self._drawn < FRAME_SECONDS:
            return
        self._drawn = now
        if self._live is None:
            if self._column:
                self.console.out("")  # the page is drawn below; `_clear` comes back to the end of the text
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        lines = page.wrap(self.console, self.console.width)
        room = max(1, self.console.height - 3)
        self._live.update(Group(Text("\n").join(lines[-room:]), meter(event)), refresh=True)

    def _clear(self) -> None:
        """Takes the page away and puts the cursor back behind the committed text."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._column:
            self.console.file.write(f"\x1b[1A\x1b[{self._column}C")
            self.console.file.flush()

    def _end_line(self) -> None:
        if self._column:
            self.console.out("")
            self._column = 0

    def _write(self, text: str, style: str | None = None) -> None:
        text = harmless(text)
        self.console.out(text, style=style, end="", highlight=False)
        self._column = column_after(text, self._column, self.console.width)


def column_after(text: str, column: int, width: int) -> int:
    """Where the cursor stands after a text: 0 also when the last line is exactly full, as what follows starts the next."""
    for character in text:
        cells = 8 - column % 8 if character == "\t" else cell_len(character)
        if character == "\n":
            column = 0
        elif column + cells > width:  # a wide character that does not fit leaves its last cell empty
            column = cells
        else:
            column += cells
    return column % width


def meter(event: Draft) -> Text:
    """Step, how much of the page is accepted, and how unsure the model still is."""
    accepted, total = int(event.accepted_BC[0].sum()), event.accepted_BC.shape[1]
    filled = round(20 * accepted / total)
    entropy = float(event.entropy_BC[0].mean())
    text = Text(f"page {event.block + 1} · step {event.step}/{event.max_steps} ", QUIET)
    text.append("█" * filled, CHANGED).append("░" * (20 - filled), QUIET)
    return text.append(f" {accepted}/{total} accepted · entropy {entropy:.3f} nats", QUIET)


def summary(stats: Stats) -> str:
    """One line of what an answer cost."""
    unsettled = stats.canvases - stats.settled
    doubt = f" · {unsettled} of {stats.canvases} pages did not settle" if unsettled else ""
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f}/s) · {stats.forwards} forwards, "
        f"{stats.tokens_per_forward:.1f} tokens each · seed {stats.seed}{doubt}"
    )
