"""A run as a moving picture: one SVG file, a frame for each denoising step, that any browser plays.

Same colours as the terminal. Nothing but text and style in the file: no script, nothing to load.
"""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

from redraft.cli.terminal import CHANGED, DRAFT, NOISE, Painter, harmless, meter, summary
from redraft.diffusion.generate import Draft, Finished
from redraft.tasks.text_events import TextCommitted, TextEvent
from redraft.tokenizer.tokenizer import Tokenizer

COLUMNS = 92
LINE, CHARACTER = 19, 8.4  # pixels
COLOURS = {NOISE: "#6b7280", CHANGED: "#3fb950", DRAFT: "#b392f0", "": "#e6edf3", "prompt": "#79c0ff"}
STEP_SECONDS, HOLD_SECONDS = 0.16, 4.0

Line = list[tuple[str, str]]  # pieces of text, each with its style


class Recording:
    """Watches one answer go by and keeps a frame of every step."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, stops: Iterable[int]) -> None:
        self.prompt, self.painter = harmless(prompt), Painter(tokenizer, stops)
        self.said = ""
        self.frames: list[list[Line]] = []
        self._console = Console(width=COLUMNS, file=None, highlight=False)

    def watch(self, events: Iterator[TextEvent]) -> Iterator[TextEvent]:
        """The same events, looked at in passing."""
        for event in events:
            if isinstance(event, Draft):
                self._frame(self.painter.draft(event), meter(event))
            elif isinstance(event, TextCommitted):
                self.painter.before = None
                self.said += harmless(event.reasoning + event.text)
            elif isinstance(event, Finished):
                self._frame(Text(), Text(summary(event.stats[0]), NOISE))
            yield event

    def _frame(self, page: Text, below: Text) -> None:
        text = Text(self.prompt, "prompt").append(self.said, "").append_text(page)
        lines = [*text.wrap(self._console, COLUMNS), Text(), below]
        self.frames.append([_pieces(line) for line in lines])

    def save(self, path: str | Path) -> None:
        """Writes the picture."""
        if not self.frames:
            raise ValueError("nothing was recorded")
        Path(path).write_text(svg(self.frames), encoding="utf-8")


def _pieces(line: Text) -> Line:
    """A line cut where its style changes."""
    plain, found = line.plain.expandtabs(4), []
    styles = [""] * len(plain)
    for span in line.spans:
        for at in range(span.start, min(span.end, len(plain))):
            styles[at] = str(span.style)
    for character, style in zip(plain, styles, strict=True):
        if found and found[-1][1] == style:
            found[-1] = (found[-1][0] + character, style)
        else:
            found.append((character, style))
    return found


def svg(frames: list[list[Line]]) -> str:
    """Frames one after another, the last one held, then from the beginning. Where nothing may move, the last one alone."""
    width, height = round(COLUMNS * CHARACTER) + 32, max(map(len, frames)) * LINE + 32
    total = STEP_SECONDS * (len(frames) - 1) + HOLD_SECONDS
    step, hold = 100 * STEP_SECONDS / total, 100 * HOLD_SECONDS / total
    style = (
        f"text{{font:14px ui-monospace,Menlo,Consolas,monospace;white-space:pre;fill:{COLOURS['']}}}"
        f".f{{visibility:hidden;animation:step {total:.2f}s step-end infinite}}"
        f".l{{animation-name:hold}}"
        f"@keyframes step{{0%{{visibility:visible}}{step:.4f}%{{visibility:hidden}}}}"
        f"@keyframes hold{{0%{{visibility:visible}}{hold:.4f}%{{visibility:hidden}}}}"
        "@media(prefers-reduced-motion:reduce){.f{animation:none}.l{visibility:visible}}"
    )
    names = {name: f"c{number}" for number, name in enumerate(COLOURS) if name}
    style += "".join(f".{short}{{fill:{COLOURS[name]}}}" for name, short in names.items())
    drawn = []
    for number, lines in enumerate(frames):
        last = " l" if number == len(frames) - 1 else ""
        rows = "".join(_row(line, 16 + (at + 1) * LINE, names) for at, line in enumerate(lines))
        drawn.append(f'<g class="f{last}" style="animation-delay:{number * STEP_SECONDS:.2f}s">{rows}</g>')
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
        known = f' class="{names[style]}"' if style in names else ""
        spans.append(f"<tspan{known}>{escape(readable, quote=False)}</tspan>")
    return f'<text x="16" y="{y}" xml:space="preserve">{"".join(spans)}</text>' if spans else ""
