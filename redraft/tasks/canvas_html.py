"""Results as HTML, for notebooks: text in the colours of the terminal, Sudoku boards as tables.

Styles are inline. Colours have contrast on a light and on a dark page; plain text keeps the page's own colour.
"""

from collections.abc import Container, Iterable, Sequence
from html import escape
from itertools import groupby

STYLES = {  # kind of text -> its style
    "final": "",
    "draft": "color:#8b5cf6",
    "noise": "color:#8a8a8a",
    "pinned": "text-decoration:underline",
    "filled": "background:#22c55e44",
    "removed": "background:#ef444444;text-decoration:line-through",
    "quiet": "color:#8a8a8a;font-size:85%",
    "warning": "color:#d97706;font-size:85%",
}
BOX = "white-space:pre-wrap;font-family:monospace;line-height:1.5"
LINE = "1px solid #8a8a8a"
THICK_LINE = "2px solid currentColor"


def render_text(parts: Iterable[tuple[str, str]]) -> str:
    """Pieces of text, each with its kind: a key of STYLES. Neighbours of the same kind become one element."""
    html = []
    for kind, group in groupby((part for part in parts if part[0]), key=lambda part: part[1]):
        text = escape("".join(piece for piece, _ in group))
        html.append(f'<span style="{STYLES[kind]}">{text}</span>' if STYLES[kind] else text)
    return "".join(html)


def render_marked(text: str, spans: Sequence[tuple[int, int]], kind: str) -> list[tuple[str, str]]:
    """A text of which some spans of characters have another kind than "final"."""
    parts = []
    position = 0
    for start, end in spans:
        parts += [(text[position:start], "final"), (text[start:end], kind)]
        position = end
    return [*parts, (text[position:], "final")]


def render_result(parts: Iterable[tuple[str, str]], notes: Sequence[str], warning: str = "") -> str:
    """A result: its text, and one small line below it."""
    line = render_text([(" · ".join(notes), "quiet")])
    if warning:
        line += " " + render_text([(warning, "warning")])
    return f'<div style="{BOX}">{render_text(parts)}</div><div>{line}</div>'


def render_board(board: Sequence[int], puzzle: Sequence[int], conflicts: Container[int], notes: Sequence[str]) -> str:
    """A Sudoku board: clues are bold, digits of the model violet, digits against the rules red."""
    rows = []
    for row in range(9):
        cells = []
        for column in range(9):
            cell = 9 * row + column
            right = THICK_LINE if column in (2, 5) else LINE
            below = THICK_LINE if row in (2, 5) else LINE
            colour = "color:#ef4444" if cell in conflicts else "font-weight:bold" if puzzle[cell] else STYLES["draft"]
            style = f"width:1.6em;text-align:center;border-right:{right};border-bottom:{below};{colour}"
            cells.append(f'<td style="{style}">{board[cell] or "&nbsp;"}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<table style="border-collapse:collapse;border:{THICK_LINE}">{"".join(rows)}</table>'
    return f"{table}<div>{render_text([(' · '.join(notes), 'quiet')])}</div>"


def shorten_text(text: str, most: int = 60) -> str:
    """A text as a short repr shows it: one line of at most so many characters."""
    return repr(text if len(text) <= most else f"{text[: most - 1]}…")
