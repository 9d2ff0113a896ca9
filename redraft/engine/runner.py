"""What the model computes for requests: prompts read, committed pages read, canvases denoised, many in one pass.

Everything here may be done faster; this is the plain way, and the one that others are tested against.
Shapes: B requests, C canvas positions, S tokens, V vocabulary, D model size.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from redraft.constraints.regex_dfa import PatternError
from redraft.engine.batched_cache import BatchedCache
from redraft.engine.request import ReplayError, Request
from redraft.model.diffusion_gemma import DiffusionGemma


class Runner:
    """Runs one model."""

    def __init__(self, model: DiffusionGemma, chunk: int) -> None:
        self.model, self.chunk = model, chunk

    def warm_up(self, max_running: int) -> int:
        """Bytes that a full step and a chunk of a prompt take, measured; not known here."""
        return 0

    def read(self, request: Request) -> int:
        """The next chunk of a prompt into its cache; how many tokens that was."""
        part = request.prompt[request.read : request.read + self.chunk]
        self.model.encode(torch.tensor([part], device=self.model.device), request.cache)
        request.read += len(part)
        request.context += part
        return len(part)

    def read_pages(self, requests: Sequence[Request]) -> None:
        """Committed pages into their caches, those of one length in one pass."""
        for some in by_length(requests):
            ids_BC = torch.cat([request.page.ids_BC for request in some])
            self.model.encode(ids_BC, BatchedCache([request.cache for request in some]))
            for request, ids in zip(some, ids_BC.tolist(), strict=True):
                request.context += ids
                request.page = None
                request.block += 1

    def redraft(self, requests: Sequence[Request]) -> None:
        """One step of each request's page."""
        for request, logits_1CV in self.denoise(requests).items():
            try:
                shaped_1CV = request.settle(logits_1CV)
            except (PatternError, ReplayError) as error:  # this request's own fault, and nobody else's
                request.error, request.over = error, True
                continue
            request.soft_1CD = None if request.done else self.model.soft_embed(shaped_1CV)

    def denoise(self, requests: Sequence[Request]) -> dict[Request, Tensor]:
        """Logits [1, C, V] of each request's page, those of one length in one pass."""
        found = {}
        for some in by_length(requests):
            ids_BC = torch.cat([request.state.ids_BC for request in some])
            cache = BatchedCache([request.cache for request in some])
            logits_BCV = self.model.denoise(ids_BC, self._beliefs(some), cache)
            found |= dict(zip(some, logits_BCV.split(1), strict=True))
        return found

    def _beliefs(self, requests: Sequence[Request]) -> Tensor | None:
        """What each was told by its last step; a page before its first has zeros, which say nothing."""
        told = [request.soft_1CD for request in requests]
        if all(soft is None for soft in told):
            return None
        shape = (1, requests[0].cfg.canvas_length, self.model.config.hidden_size)
        nothing = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        return torch.cat([soft if soft is not None else nothing for soft in told])


def by_length(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests with canvases of one length together."""
    ordered = sorted(requests, key=lambda request: request.cfg.canvas_length)
    return [list(some) for _, some in groupby(ordered, key=lambda request: request.cfg.canvas_length)]
