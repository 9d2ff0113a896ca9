"""Answer: the result of `Writer.write` and `Writer.chat`."""

from dataclasses import dataclass

from redraft.config import SamplerConfig
from redraft.diffusion.generate import Finished, Stats
from redraft.tasks.canvas_html import render_result, shorten_text
from redraft.tasks.generation import cut_at_stop
from redraft.tasks.text_events import EncodedPrompt, TextAssembler
from redraft.tokenizer.chat_parser import ToolCall
from redraft.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, repr=False)
class Answer:
    """A generated answer. `str(answer)` is its text."""

    text: str
    reason: str  # why it ended: "stop" (complete: a stop token, or a match), "length" (max_tokens) or "deadline" (`seconds`)
    settled: bool  # False when a canvas used all its steps without settling: its text is less reliable
    ids: tuple[int, ...]  # without the stop token
    stats: Stats
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def from_finished(
        cls, end: Finished, row: int, tokenizer: Tokenizer, prompt: EncodedPrompt, cfg: SamplerConfig
    ) -> "Answer":
        """The answer to a prompt, in a row of the batch that has ended."""
        ids, _ = cut_at_stop(end.ids_BT[row].tolist(), cfg, cfg.max_new_tokens)
        parsed = TextAssembler(tokenizer, prompt).add(ids, final=True)
        stats = end.stats[row]
        return cls(
            text=parsed.text,
            reason=end.reasons[row],
            settled=stats.settled == stats.canvases,
            ids=tuple(ids),
            stats=stats,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
        )

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
