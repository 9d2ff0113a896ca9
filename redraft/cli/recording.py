"""Records a run as an animated picture: one SVG file with a frame for each denoising step, which any browser plays.

In checked mode a frame for each round follows: the cursor sweeps over the canvas. In exact mode every round adds text.
The colours are those of the terminal. The file holds text and style only: no script, no external resource.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from redraft.cli.terminal import (
    AHEAD,
    CHANGED,
    CORRECTED,
    DRAFT,
    NOISE,
    Painter,
    meter,
    strip_control_characters,
    summary,
)
from redraft.config import write_text
from redraft.diffusion.events import Draft, Finished
from redraft.tasks.text_events import TextCommitted, TextEvent
from redraft.tokenizer.tokenizer import Tokenizer

COLUMNS = 92
TAB_SIZE = 4
LINE, CHARACTER = 19, 8.4  # pixels
COLOURS = {
    NOISE: "#6b7280",
    CHANGED: "#3fb950",
    DRAFT: "#b392f0",
    AHEAD: "#8b949e",
    CORRECTED: "#e3b341",
    "": "#e6edf3",
    "prompt": "#79c0ff",
}
STEP_SECONDS, ROUND_SECONDS, HOLD_SECONDS = 0.16, 0.08, 4.0  # a round gives a few tokens: there are more of them

Line = list[tuple[str, str]]  # pieces of text, each with its style


class Recording:
    """Records a frame for every step of one answer."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, stops: Iterable[int]) -> None:
        self.prompt = strip_control_characters(prompt)
        self.painter = Painter(tokenizer, stops)
        self.committed = ""
        self.frames: list[list[Line]] = []
        self.seconds: list[float] = []  # of each frame
        self._tokens = 0  # committed
        self._has_draft = False  # of the canvas that is committed next; exact mode has no drafts
        self._console = Console(width=COLUMNS, file=None, highlight=False)

    def watch(self, events: Iterator[TextEvent]) -> Iterator[TextEvent]:
        """Passes events on and records them."""
        for event in events:
            if isinstance(event, Draft):
                seconds = STEP_SECONDS if event.verified is None else ROUND_SECONDS
                self._add_frame(self.painter.render_draft(event), meter(event), seconds)
                self._has_draft = True
            elif isinstance(event, TextCommitted):
                self.painter.start_canvas()
                self.committed += strip_control_characters(event.reasoning + event.text)
                self._tokens += event.shown
                if not self._has_draft:
                    self._add_frame(Text(), Text(f"{self._tokens} tokens", NOISE), ROUND_SECONDS)
                self._has_draft = False
            elif isinstance(event, Finished):
                self._add_frame(Text(), Text(summary(event.stats[0]), NOISE))
            yield event

    def _add_frame(self, canvas: Text, status: Text, seconds: float = STEP_SECONDS) -> None:
        text = Text().append(self.prompt, "prompt").append(self.committed).append_text(canvas)
        text.expand_tabs(TAB_SIZE)  # moves the style spans along; expanding tabs in the plain string would not
        lines = [*text.wrap(self._console, COLUMNS), Text(), status]
        self.frames.append([_pieces(line) for line in lines])
        self.seconds.append(seconds)

    def save(self, path: str | Path) -> None:
        """Writes the SVG file."""
        if not self.frames:
            raise ValueError("nothing was recorded: the run has no events")
        write_text(path, svg(self.frames, self.seconds))


def check_recording(path: str | None) -> None:
    """Refuses a file that `Recording.save` could not write, or that no program would play, before the run."""
    if path is None:
        return
    if Path(path).suffix.lower() != ".svg":
        raise ValueError(f"--record writes an animated SVG picture: name a file that ends in .svg, got {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--record: there is no folder {str(Path(path).parent)!r} to write {path!r} into")
    if Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK | os.X_OK):
        raise ValueError(f"--record: {path!r} cannot be written")


def _pieces(line: Text) -> Line:
    """Splits a line where its style changes."""
    plain = line.plain
    pieces: Line = []
    styles = [""] * len(plain)
    for span in line.spans:
        for position in range(span.start, min(span.end, len(plain))):
            styles[position] = str(span.style)
    for character, style in zip(plain, styles, strict=True):
        if pieces and pieces[-1][1] == style:
            pieces[-1] = (pieces[-1][0] + character, style)
        else:
            pieces.append((character, style))
    return pieces


def svg(frames: list[list[Line]], seconds: Sequence[float] = ()) -> str:
    """The SVG of an endless animation that holds the last frame. Readers who prefer reduced motion see that frame only.

    `seconds` says how long each frame is shown; by default STEP_SECONDS.
    """
    width = round(COLUMNS * CHARACTER) + 32
    height = max(map(len, frames)) * LINE + 32
    durations = [*(seconds or [STEP_SECONDS] * len(frames))[:-1], HOLD_SECONDS]
    total = sum(durations)
    kinds = {duration: f"d{number}" for number, duration in enumerate(sorted(set(durations)))}
    style = (
        f"text{{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre;fill:{COLOURS['']}}}"
        f".f{{visibility:hidden;animation:0s step-end infinite;animation-duration:{total:.2f}s}}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none!important}.l{visibility:visible}}"
    )
    for duration, kind in kinds.items():
        share = 100 * duration / total  # percent of the animation
        style += f".{kind}{{animation-name:{kind}}}"
        style += f"@keyframes {kind}{{0%{{visibility:visible}}{share:.4f}%{{visibility:hidden}}}}"
    names = {name: f"c{number}" for number, name in enumerate(COLOURS) if name}
    style += "".join(f".{short}{{fill:{COLOURS[name]}}}" for name, short in names.items())
    drawn = []
    delay = 0.0
    for number, (lines, duration) in enumerate(zip(frames, durations, strict=True)):
        last = " l" if number == len(frames) - 1 else ""
        rows = "".join(_row(line, 16 + row * LINE, names) for row, line in enumerate(lines, 1))
        drawn.append(f'<g class="f {kinds[duration]}{last}" style="animation-delay:{delay:.2f}s">{rows}</g>')
        delay += duration
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><style>{style}</style><rect width="100%" height="100%" rx="8" fill="#0d1117"/>'
        + "\n".join(drawn)
        + "</svg>\n"
    )


def _row(line: Line, y: int, names: dict[str, str]) -> str:
    spans = []
    for text, style in line:
        readable = "".join(c if c.isprintable() else "\ufffd" for c in text)
        css_class = f' class="{names[style]}"' if style in names else ""
        spans.append(f"<tspan{css_class}>{escape(readable, quote=False)}</tspan>")
    return f'<text x="16" y="{y}" xml:space="preserve">{"".join(spans)}</text>' if spans else ""
