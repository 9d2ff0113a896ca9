"""Runner: the forward passes of the model for batches of requests. This is the reference; faster runners must equal it.

    prefill:         a chunk of a prompt into its KV cache
    encode_canvases: committed canvases into their KV caches
    step:            one denoising step of every request's canvas, sampler included
    verify:          one round of every request in checked or exact mode

Requests with the same canvas length share one forward. A failure in a shared forward ends the requests of that batch; a
failure in one request's sampler ends only that request. Shapes: B requests, C canvas positions, V vocabulary, D model size.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion import verified
from redraft.diffusion.draft_policy import TOKEN_COST, DraftSpeed
from redraft.diffusion.verified import Round, Verification
from redraft.engine.batched_cache import BatchedCache
from redraft.engine.request import Request, contain_failure
from redraft.kernels.vocabulary import CHUNK_LOGITS
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

MAX_ROWS = 4  # in one forward of the reference: more save no time on a CPU, and their logits take memory


class Runner:
    """Runs one model."""

    max_rows = MAX_ROWS  # of a round
    measures_drafts = True  # whether a drafter's drafts pay is measured; if not, they are taken to pay

    def __init__(self, model: Backbone, prefill_chunk: int) -> None:
        self.model = model
        self.prefill_chunk = prefill_chunk
        has_choice = model.drafter is not None and self.token_cost > 0
        # In bf16 logits depend on how wide a forward is, so a clock that chooses the width would change the text.
        self.may_draft = not has_choice or model.dtype == torch.float32
        self.draft_speed = DraftSpeed() if has_choice and self.may_draft and self.measures_drafts else None

    def spare_slots(self, cfg: SamplerConfig) -> int:
        """Slots of a KV cache that a request in checked or exact mode needs beyond its tokens."""
        return 0

    @property
    def token_cost(self) -> float:
        """What a token adds to the cost of a forward, for the choice of drafts; 0: nothing worth a choice."""
        return TOKEN_COST.get(self.model.device.type, 0.0)

    def warm_up(self, max_running: int) -> int:
        """Bytes of activations that a full step and a prefill chunk take, measured. This runner does not measure: 0."""
        return 0

    def prefill(self, request: Request, *, is_alone: bool = False) -> int:
        """Encodes the next chunk of a prompt. Returns its number of tokens. Alone, the request may have longer chunks."""
        chunk, images = request.next_chunk(self.prefill_chunk)
        encode_chunk(self.model, chunk, images, cache_of(request))
        request.add_prefilled(len(chunk))
        return len(chunk)

    def encode_canvases(self, requests: Sequence[Request]) -> None:
        """Encodes committed canvases. In checked mode the last verified token stands for the canvas."""
        for batch in group_by_length(requests, MAX_ROWS, lambda request: committed_ids(request).shape[1]):
            with contain_failure(*batch):
                ids_BC = torch.cat([committed_ids(request) for request in batch])
                self.model.encode(ids_BC, BatchedCache([cache_of(request) for request in batch]))
                for request in batch:
                    request.take_committed()

    def step(self, requests: Sequence[Request]) -> None:
        """One denoising step of each request's canvas."""
        for batch in group_by_length(requests, MAX_ROWS):
            with contain_failure(*batch):
                logits_BCV = self.denoise(batch)
                for request, logits_1CV in zip(batch, logits_BCV.split(1), strict=True):
                    with contain_failure(request):
                        shaped_1CV = request.apply_logits(logits_1CV)
                        request.soft_1CD = None if request.is_canvas_done else self._soft_embed(shaped_1CV)

    def _soft_embed(self, shaped_1CV: Tensor) -> Tensor:
        """Soft embeddings [1, C, D]. On a GPU some positions at a time: all at once take five times the logits' memory."""
        count = CHUNK_LOGITS["cuda"] // shaped_1CV.shape[2] if shaped_1CV.is_cuda else shaped_1CV.shape[1]
        return torch.cat([self.model.soft_embed(part) for part in shaped_1CV.split(max(1, count), dim=1)], dim=1)

    def denoise(self, batch: Sequence[Request]) -> Tensor:
        """Logits [B, C, V] of canvases of one length."""
        ids_BC = torch.cat([canvas_ids(request) for request in batch])
        return self.model.denoise(ids_BC, self._soft_embeddings(batch), BatchedCache([cache_of(r) for r in batch]))

    def verify(self, requests: Sequence[Request]) -> dict[Request, int]:
        """One round of each request. Returns how many tokens of each went through the model."""
        tokens: dict[Request, int] = {}
        for request in requests:
            if request.other_verifier is not None:
                with contain_failure(request):
                    tokens[request] = request.run_other_round()
        works: dict[Request, Round] = {}
        for request in requests:
            if request.other_verifier is None:
                with contain_failure(request):
                    works[request] = verification_of(request).next_round()
        timed = []
        for batch in group_by_length(list(works), self.max_rows, lambda request: works[request].canvas_length):
            began = perf_counter()
            with contain_failure(*batch):
                tokens |= self._verify(batch)
                has_drafts = any(works[request].after or works[request].drafts for request in batch)
                timed.append((batch, has_drafts, perf_counter() - began))
        for batch, has_drafts, seconds in timed:  # now: it changes the canvases that the next rounds have
            self._measure_drafts(batch, has_drafts, seconds)
        return tokens

    def _measure_drafts(self, batch: Sequence[Request], has_drafts: bool, seconds: float) -> None:
        """Counts a round of requests that may draft."""
        states = [verification_of(request) for request in batch]
        if self.draft_speed is not None and any(state.policy is not None for state in states):
            tokens = sum(len(state.tokens) - state.round_begin for state in states)
            self.draft_speed.record(has_drafts, tokens, seconds, len(states))

    def _verify(self, batch: Sequence[Request]) -> dict[Request, int]:
        """One round of requests whose canvases have the same length, in one forward."""
        works = [request.begin_round() for request in batch]
        hidden_BSD, hidden_BJCD = self.joint(batch, works)
        for row, (request, work) in enumerate(zip(batch, works, strict=True)):
            with contain_failure(request):
                state = verification_of(request)
                verdict = verified.verify(state, work, self.model.head(hidden_BSD[row, : len(work.clean)]))
                fresh = []
                if hidden_BJCD is not None and verdict.token is not None and work.after:
                    canvas_CD = hidden_BJCD[row, verdict.accepted, 1:]  # its first position is the token's own
                    fresh = verified.draft_tokens(self.model, state, work, verdict, canvas_CD)
                request.end_round(work, verdict, fresh)
        return dict(zip(batch, map(count_tokens, works), strict=True))

    def joint(self, batch: Sequence[Request], works: Sequence[Round]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, D] of the clean tokens and, with drafts, [B, S, C, D] of a canvas behind each of them."""
        cache = BatchedCache([cache_of(request) for request in batch])
        counts = [len(work.clean) for work in works]
        clean_BS, canvas_BSC = self.round_inputs(batch, works)
        if canvas_BSC is None:
            return self.model.encode(clean_BS, cache, counts), None
        return self.model.joint(clean_BS, canvas_BSC, range(max(counts)), cache, counts)

    def round_inputs(self, batch: Sequence[Request], works: Sequence[Round]) -> tuple[Tensor, Tensor | None]:
        """Clean tokens ids_BS and, with drafts, canvases ids_BSC. Shorter rows are padded on the right.

        The caller does not use what comes of the padding.
        """
        device = self.model.device
        longest = max(len(work.clean) for work in works)
        clean_BS = torch.tensor([[*work.clean, *[0] * (longest - len(work.clean))] for work in works], device=device)
        if not any(work.after for work in works):
            return clean_BS, None
        canvas_BSC = torch.zeros(*clean_BS.shape, works[0].canvas_length, dtype=torch.long, device=device)
        for row, (request, work) in enumerate(zip(batch, works, strict=True)):
            ids_JC = verification_of(request).canvas_ids(work, self.model.config.vocab_size, device)
            canvas_BSC[row, : len(ids_JC)] = ids_JC
        return clean_BS, canvas_BSC

    def _soft_embeddings(self, batch: Sequence[Request]) -> Tensor | None:
        """Self-conditioning inputs [B, C, D]: zeros for a canvas before its first step; None when all are."""
        softs = [request.soft_1CD for request in batch]
        if all(soft is None for soft in softs):
            return None
        shape = (1, batch[0].cfg.canvas_length, self.model.config.hidden_size)
        zeros_1CD = torch.zeros(shape, dtype=self.model.dtype, device=self.model.device)
        return torch.cat([soft if soft is not None else zeros_1CD for soft in softs])


def group_by_length(
    requests: Sequence[Request],
    max_rows: int | None = None,
    length_of: Callable[[Request], int] = lambda request: request.cfg.canvas_length,
) -> list[list[Request]]:
    """Batches of at most `max_rows` requests whose canvases have the same length, shortest first."""
    ordered = sorted(requests, key=length_of)
    max_rows = max_rows or max(1, len(ordered))
    batches = []
    for _, group in groupby(ordered, key=length_of):
        rows = list(group)
        batches += [rows[start : start + max_rows] for start in range(0, len(rows), max_rows)]
    return batches


def encode_chunk(model: Backbone, chunk: Sequence[int], images: Sequence["ImageSpan"], cache: KVCache) -> None:
    """Encodes a chunk of a prompt and its images."""
    ids_1S = torch.tensor([chunk], device=model.device)
    if images:
        model.encode(ids_1S, cache, images=[images])
    else:
        model.encode(ids_1S, cache)


def cache_of(request: Request) -> KVCache:
    """The KV cache of a request that runs."""
    assert request.cache is not None
    return request.cache


def canvas_ids(request: Request) -> Tensor:
    """The tokens of the canvas in work, ids_1C."""
    assert request.canvas is not None
    return request.canvas.ids_BC


def committed_ids(request: Request) -> Tensor:
    """The tokens of the committed canvas, ids_1C."""
    assert request.committed is not None
    return request.committed.ids_BC


def verification_of(request: Request) -> Verification:
    """The state of a request in checked or exact mode."""
    assert request.verification is not None
    return request.verification


def count_tokens(work: Round) -> int:
    """Tokens that a round runs through the model."""
    return len(work.clean) + len(work.after) * work.canvas_length
