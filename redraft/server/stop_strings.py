"""Stop strings: a completion is cut at the first one, and ends as soon as the text before it is final or has settled.

TextDelta -> [StopStringFilter] -> the text before a stop string
drafts of check off -> [SettledStop] -> the text of an unfinished canvas, once it has a stop string
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion.sampler import count_settled
from redraft.tasks.generation import cut_at_stop
from redraft.tasks.text_events import EncodedPrompt, TextAssembler, TextCommitted, TextDraft
from redraft.tokenizer.chat_parser import Parsed
from redraft.tokenizer.tokenizer import Tokenizer


class StopStringFilter:
    """Cuts a growing text at the first stop string. The beginning of a possible stop string is held back."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.stop_strings = [stop for stop in stop_strings if stop]
        self.found: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """Returns the part of the text so far that cannot belong to a stop string and was not returned before."""
        if self.found is not None:
            return ""
        if not self.stop_strings:
            return text
        text = self._held + text
        matches = [(text.find(stop), stop) for stop in self.stop_strings if stop in text]
        if matches:
            position, self.found = min(matches)
            return text[:position]
        sizes = [(stop, min(len(stop), len(text) + 1)) for stop in self.stop_strings]
        held = max((size for stop, most in sizes for size in range(1, most) if text.endswith(stop[:size])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the completion."""
        held = self._held
        self._held = ""
        return held


class SettledStop:
    """Finds a stop string in the text that has settled, from the left, on a canvas in work.

    What follows a stop string is dropped, so the canvas need not settle as a whole.
    """

    def __init__(self, stop_strings: Sequence[str], tokenizer: Tokenizer, cfg: SamplerConfig, prompt: EncodedPrompt) -> None:
        self.stop_strings = [stop for stop in stop_strings if stop]
        self.cfg = cfg
        self._tokens_left = cfg.max_new_tokens  # behind the committed canvases
        self._assembler = TextAssembler(tokenizer, prompt)  # has the committed canvases
        self._end = ""  # of their text: a stop string may begin in it
        self._before_1C: Tensor | None = None  # the draft one step ago
        self._same_1C = torch.zeros(1, 0, dtype=torch.long)  # steps in which each of its tokens has not changed

    def add(self, event: TextDraft | TextCommitted) -> Parsed | None:
        """What the canvas in work adds to the completion, if a stop string has settled on it."""
        if isinstance(event, TextCommitted):
            self._tokens_left -= event.shown
            parsed = self._assembler.add(event.ids_BC[0, : event.shown].tolist(), final=False)
            longest = max(map(len, self.stop_strings))
            self._end = (self._end + parsed.text)[-longest:]
            self._before_1C = None
            return None
        ids, _ = cut_at_stop(self._settled_ids(event), self.cfg, self._tokens_left)
        parsed = self._assembler.fork().add(ids, final=True)
        has_stop = any(stop in self._end + parsed.text for stop in self.stop_strings)
        return Parsed(parsed.text, parsed.reasoning) if has_stop else None

    def _settled_ids(self, event: TextDraft) -> list[int]:
        """The tokens of a draft that have settled by the sampler's own rule."""
        if self._before_1C is None:
            self._same_1C = torch.zeros_like(event.ids_BC)
        else:
            self._same_1C = torch.where(event.ids_BC == self._before_1C, self._same_1C + 1, 0)
        self._before_1C = event.ids_BC
        count = int(count_settled(self._same_1C, event.entropy_BC, self.cfg)[0])
        return event.ids_BC[0, :count].tolist()
