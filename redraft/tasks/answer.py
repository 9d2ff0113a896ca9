"""Answer: the result of `Writer.write` and `Writer.chat`."""

from dataclasses import dataclass

from redraft.diffusion.generate import Stats
from redraft.tasks.canvas_html import render_result, shorten_text
from redraft.tokenizer.chat_parser import ToolCall


@dataclass(frozen=True, repr=False)
class Answer:
    """A generated answer. `str(answer)` is its text."""

    text: str
    reason: str  # why it ended: "stop" (a stop token), "length" (max_tokens) or "deadline" (`seconds` have passed)
    settled: bool  # False when a canvas used all its steps without settling: its text is less reliable
    ids: tuple[int, ...]  # without the stop token
    stats: Stats
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def seed(self) -> int:
        """The seed that reproduces this answer."""
        return self.stats.seed

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        settled = "" if self.settled else ", settled=False"
        return f"Answer({shorten_text(self.text)}, {len(self.ids)} tokens, {self.reason!r}{settled}, seed={self.seed})"

    def _repr_html_(self) -> str:
        """The answer in a notebook: reasoning grey, text plain, tool calls violet, and what it cost."""
        parts = [(f"{self.reasoning}\n\n", "noise")] if self.reasoning else []
        parts.append((self.text, "final"))
        parts += [(f"\n{call.name}({call.arguments})", "draft") for call in self.tool_calls]
        notes = [
            f"{self.stats.new_tokens} tokens in {self.stats.forwards} forwards",
            f"check {self.stats.check}",
            f"ended by {self.reason}",
            f"seed {self.seed}",
        ]
        return render_result(parts, notes, "" if self.settled else "a canvas did not settle")
