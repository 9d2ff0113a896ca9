"""Draws events on a terminal: the canvas is redrawn in place, below the committed text, inside the scrollback.

While a canvas is denoised: grey tokens are noise, green ones changed at this step, violet ones were accepted before,
underlined ones are pinned. While it is checked: plain text is final, a token that was just corrected is yellow, and the grey
text ahead of the cursor is draft. Committed text is plain and wraps by words; the prompt before it is dimmed. Redraws at
most 20 times a second.
"""

import signal
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from redraft.diffusion.events import Draft, Finished, Stats
from redraft.tasks.text_events import TextCommitted, TextEvent
from redraft.tokenizer.tokenizer import Tokenizer

FRAME_SECONDS = 1 / 20
NOISE = "bright_black"
CHANGED = "green"
DRAFT = "medium_purple1"
QUIET = "bright_black"
PINNED = "underline"
AHEAD = "grey58"  # checked mode: draft ahead of the cursor
CORRECTED = "bold yellow"
FINAL = ""
PROMPT = "dim"
MAX_PROMPT_LINES = 8
TAB_SIZE = 8
FLASH_ROUNDS = 3  # a corrected token stays visible for so many rounds: a single one may fall between two frames


def strip_control_characters(text: str) -> str:
    """Removes control characters, so that model output cannot send escape codes. Joiners stay: some scripts need them."""
    kept = "\n\t\u200c\u200d"
    return "".join(c for c in text if c in kept or unicodedata.category(c) not in ("Cc", "Cf"))


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Delivers Ctrl-C after the block: in the middle of a drawing it would leave half a canvas on the screen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if interrupts and callable(handler):
        handler(*interrupts[0])


class Painter:
    """Renders drafts as coloured text. Remembers the last draft, to colour the changes."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.stops = frozenset(stops)
        self.pinned: frozenset[int] = frozenset()  # positions on the canvas
        self.start_canvas()

    def start_canvas(self, block: int = -1) -> None:
        """Forgets the canvas before this one."""
        self.block = block
        self.before: tuple[list[int], list[bool]] | None = None  # tokens and acceptance one step ago
        self.draft: list[int] = []  # the draft one step ago
        self.verified = 0  # positions that were final one round ago
        self.round = 0
        self.corrected_at: dict[int, int] = {}  # position -> the round that corrected it

    def render_draft(self, event: Draft) -> Text:
        """The first row's canvas after a step or a round."""
        if event.block != self.block:
            self.start_canvas(event.block)
        if event.verified is not None:
            return self.render_verified(event.ids_BC[0].tolist(), event.verified)
        tokens, accepted = event.canvas_BC[0].tolist(), event.accepted_BC[0].tolist()
        text = self.render_canvas(tokens, accepted)
        self.before = (tokens, accepted)
        self.draft = event.ids_BC[0].tolist()
        return text

    def render_verified(self, tokens: list[int], verified: int) -> Text:
        """A canvas of which the first `verified` positions are final, cut at a stop token."""
        self.round += 1
        for position in range(self.verified, verified):
            if position < len(self.draft) and self.draft[position] != tokens[position]:
                self.corrected_at[position] = self.round
        flashing = {at for at, number in self.corrected_at.items() if self.round - number < FLASH_ROUNDS}
        self.verified = verified
        self.draft = tokens
        end = next((i for i, token in enumerate(tokens) if token in self.stops), len(tokens))
        styles = [CORRECTED if i in flashing else FINAL if i < verified else AHEAD for i in range(end)]
        return self._join(tokens, styles)

    def render_canvas(self, tokens: list[int], accepted: list[bool]) -> Text:
        """A canvas as coloured text, cut at an accepted stop token."""
        end = next((i for i, t in enumerate(tokens) if accepted[i] and t in self.stops), len(tokens))
        return self._join(tokens, [self._style(i, tokens[i], accepted[i]) for i in range(end)])

    def _join(self, tokens: list[int], styles: list[str]) -> Text:
        """The text of as many tokens as there are styles."""
        rendered = Text()
        for style, run in groupby(range(len(styles)), key=styles.__getitem__):
            text = strip_control_characters(self.tokenizer.decode_fragment([tokens[i] for i in run]))
            rendered.append(text.replace("\n", " ") if style == NOISE else text, style)
        return rendered

    def _style(self, at: int, token: int, accepted: bool) -> str:
        if at in self.pinned:
            return PINNED
        if not accepted:
            return NOISE
        if self.before is None or not self.before[1][at] or self.before[0][at] != token:
            return CHANGED
        return DRAFT


class CanvasView:
    """Draws one answer. Use it as a context manager around the stream: leaving it clears the unfinished canvas.

    Committed text wraps by words. Its last line may still grow, so it is drawn with the canvas until it is full. `prompt` is
    written first, dimmed; of a long one only the end.
    """

    def __init__(
        self, console: Console, tokenizer: Tokenizer, stops: Iterable[int], label: str = "", prompt: str = ""
    ) -> None:
        self.console = console
        self.label = label  # precedes the line below the canvas
        self.painter = Painter(tokenizer, stops)
        self._live: Live | None = None
        self._drawn = 0.0
        self._line = Text()  # the last line of the committed text, not written yet
        self._wrote_reasoning = False  # reasoning was written last: the answer starts a new line
        self._write(shorten_prompt(prompt, console), PROMPT)

    def __enter__(self) -> "CanvasView":
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()
        self._end_line()

    def show(self, events: Iterator[TextEvent]) -> Iterator[TextEvent]:
        """Draws events and passes them on."""
        for event in events:
            with defer_interrupt():
                self._show(event)
            yield event

    def watch(self, event: Draft) -> None:
        """Draws a draft of which nothing is committed: a gap and the text after it."""
        if event.step == 1:
            self.painter.start_canvas()
        pinned_BC = event.pinned_BC
        self.painter.pinned = frozenset() if pinned_BC is None else frozenset(pinned_BC[0].nonzero()[:, 0].tolist())
        with defer_interrupt():
            self._draft(event)

    def _show(self, event: TextEvent) -> None:
        match event:
            case Draft():
                self._draft(event)
            case TextCommitted():
                self.painter.start_canvas()
                if event.reasoning:
                    self._write(event.reasoning, QUIET)
                    self._wrote_reasoning = True
                if event.text and self._wrote_reasoning:
                    self._end_line()
                    self._wrote_reasoning = False
                self._write(event.text)
                self._draw(Text(), Text())
            case Finished():
                self._clear()
                self._end_line()

    def _draft(self, event: Draft) -> None:
        canvas = self.painter.render_draft(event)
        self._draw(canvas, meter(event, self.label))

    def _draw(self, canvas: Text, status: Text) -> None:
        """Draws the unfinished line of the committed text, the canvas after it, and a status line."""
        now = time.monotonic()
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        elif now - self._drawn < FRAME_SECONDS:
            return
        self._drawn = now
        lines = Text.assemble(self._line, canvas).wrap(self.console, self.console.width)
        max_lines = max(1, self.console.height - 3)
        self._live.update(Group(Text("\n").join(lines[-max_lines:]), status), refresh=True)

    def _clear(self) -> None:
        """Removes the canvas and the unfinished line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _end_line(self) -> None:
        if self._line:
            self._line.rstrip()
            self._print(self._line)
            self._line = Text()

    def _write(self, text: str, style: str = FINAL) -> None:
        """Adds to the committed text and prints the lines that are full."""
        text_so_far = Text.assemble(self._line, (strip_control_characters(text), style))
        text_so_far.expand_tabs(TAB_SIZE)
        *full_lines, last = text_so_far.wrap(self.console, self.console.width)
        for line in full_lines:
            self._print(line)
        # Wrapping cuts the blanks at the end of the last line, but they separate it from the next word: they are kept.
        words = text_so_far.plain.rstrip(" ")
        self._line = text_so_far.divide([len(words) - len(last.plain.rstrip(" "))])[-1]

    def _print(self, line: Text) -> None:
        self._clear()
        self.console.print(line, soft_wrap=True)


def shorten_prompt(prompt: str, console: Console) -> str:
    """A prompt as it is shown before its answer: the last lines of a long one, after an ellipsis."""
    lines = Text(strip_control_characters(prompt)).wrap(console, console.width)
    if len(lines) <= MAX_PROMPT_LINES:
        return prompt
    return "…" + "\n".join(line.plain for line in lines[-MAX_PROMPT_LINES:])


def meter(event: Draft, label: str = "") -> Text:
    """One line: canvas, step, accepted positions, mean entropy; in the rounds of checked mode, how far the cursor is."""
    is_checking = event.verified is not None
    accepted = int(event.accepted_BC[0].sum())
    total = event.accepted_BC.shape[1]
    filled = round(20 * accepted / total)
    progress = "checking" if is_checking else f"step {event.step}/{event.max_steps}"
    text = Text(f"{label} · " if label else "", QUIET).append(f"canvas {event.block + 1} · {progress} ", QUIET)
    text.append("█" * filled, CHANGED).append("░" * (20 - filled), QUIET)
    if is_checking:
        return text.append(f" {accepted}/{total} checked", QUIET)
    return text.append(f" {accepted}/{total} accepted · entropy {float(event.entropy_BC[0].mean()):.3f} nats", QUIET)


def summary(stats: Stats) -> str:
    """One line of statistics of an answer."""
    unsettled = stats.canvases - stats.settled
    warning = f" · {unsettled} of {stats.canvases} canvases did not settle" if unsettled else ""
    mode = f"check {stats.check}"
    if stats.check != "off":
        mode += f": {stats.drafted} drafted, {stats.accepted} accepted, {stats.corrected} corrected"
    return (
        f"{stats.new_tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f}/s) · {mode} · "
        f"{stats.forwards} forwards, {stats.tokens_per_forward:.1f} tokens each · seed {stats.seed}{warning}"
    )
