"""StepBucket: a denoising step of a batch of canvases as a CUDA graph, sampler included.

    ids, soft embeddings -> layers -> head -> [random draws, vocabulary, acceptance] -> ids
                                                          probabilities -> soft embeddings

A bucket has static buffers for so many canvases of one length. Its graphs differ by the tokens that they encode in the same
forward, and by how many candidates they find for watched requests.

Shapes: B requests, C canvas positions, D model size, V vocabulary, N = B * C, P encoded rows of S tokens, K candidates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion import sampler
from redraft.diffusion.sampler import Canvas
from redraft.engine.cache_table import CacheTable
from redraft.engine.fused_layers import FusedLayers
from redraft.engine.graph_capture import next_power_of_two
from redraft.engine.request import Request
from redraft.engine.runner import cache_of
from redraft.kernels.triton.linear_fp8 import sum_rows
from redraft.kernels.triton.sampler_step import MAX_STOPS, NO_TOKEN, CanvasBatch, draw_step_inputs, step_canvases_
from redraft.kernels.triton.vocabulary import argmax_entropy_sample, compute_probs_, find_top_probs
from redraft.kernels.vocabulary import TopProbs
from redraft.model.embedding import PackedEmbedding

POLL_SECONDS = 5e-5  # between two looks at the settled flags
MAX_FUSED_STEPS = 64  # steps whose temperatures the static buffers hold
MAX_FUSED_CANVAS = 256  # positions that one program of the acceptance kernel can compare with one another
MAX_FUSED_CANDIDATES = 32  # whose probabilities a step may show

BucketKey = tuple[int, int, int]  # number of canvases, canvas length, context length
EncodeShape = tuple[int, int]  # rows and tokens that are encoded in the same graph as a step; (0, 0): none
PendingEncode = tuple[Request, Tensor]  # ids_1S: the last tokens of the request's context
NO_ENCODE: EncodeShape = (0, 0)
HOST_FIELDS = ("skipped_B", "same_BC", "final_B", "step")  # of a canvas: the fused sampler changes none but the step
CANVAS_FIELDS = tuple(field.name for field in fields(Canvas) if field.name not in HOST_FIELDS)


def uses_fused_sampler(request: Request) -> bool:
    """Whether the sampler kernels implement this request's sampler: no constraints on this canvas, no settled prefix.

    The canvas must fit one program of the acceptance kernel, and the steps, the candidates and the stop tokens that
    `stops_last` looks for must fit the static buffers. Interventions need the host between two steps.
    """
    cfg = request.cfg
    fits = cfg.canvas_length <= MAX_FUSED_CANVAS and cfg.max_steps <= MAX_FUSED_STEPS
    fits = fits and request.candidates <= MAX_FUSED_CANDIDATES
    fits = fits and (not cfg.stops_last or len(cfg.eos_token_ids) <= MAX_STOPS)
    needs_host = request.plan.has_interventions or cfg.settle_prefix
    return fits and request.canvas_constraints is None and not needs_host


def count_candidates(batch: Sequence[Request]) -> int:
    """The number of candidates that a step of these requests returns, a power of two; 0 if no request asks for them."""
    most = max(request.candidates for request in batch)
    return next_power_of_two(most) if most else 0


class StepBucket:
    """Static buffers for a batch of canvases in work, and the captured graphs that make a step of them."""

    def __init__(self, fused: FusedLayers, key: BucketKey, graph_pool: object) -> None:
        count, length, self.context = key
        model = fused.model
        self.fused = fused
        self.rows = CanvasBatch.empty(count, length, MAX_FUSED_STEPS, model.device)
        self.table = CacheTable.empty(model, count)
        self.soft_BCD = torch.zeros(count, length, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.encode_buffers: dict[EncodeShape, tuple[Tensor, CacheTable]] = {}  # tokens encoded in the graph of a step
        self.loaded: list[Canvas | None] = [None] * count  # the canvas that each row holds
        self.settled_flags = SettledFlags(count, model.device)
        self.steps_launched = 0
        self.top_probs: TopProbs | None = None  # of the last step, for watched requests
        # By what the graph encodes and how many candidates it finds: its replay, and the buffers of the candidates.
        self._replays: dict[tuple[EncodeShape, int], tuple[Callable[[], None], TopProbs | None]] = {}
        self._graph_pool = graph_pool

    def launch_step(self, pending: Sequence[PendingEncode] = (), candidates: int = 0) -> None:
        """Launches one step of all canvases. The graph also encodes the pending tokens into their KV caches.

        With `candidates`, the step finds that many of the most probable tokens at each position.
        """
        shape = NO_ENCODE
        if pending:
            longest = max(self.rows.ids_BC.shape[1], *(ids_1S.shape[1] for _, ids_1S in pending))
            shape = (next_power_of_two(len(pending)), next_power_of_two(longest))
        self.capture(shape, candidates)
        if pending:
            ids_PS, table = self.encode_buffers[shape]
            table.fill([cache_of(request) for request, _ in pending], [ids_1S.shape[1] for _, ids_1S in pending])
            for row, (_, ids_1S) in enumerate(pending):
                ids_PS[row, : ids_1S.shape[1]] = ids_1S[0]  # the padding after them is not written to the cache
        replay, self.top_probs = self._replays[shape, candidates]
        replay()
        self.steps_launched += 1
        self.loaded = [None] * len(self.loaded)

    def capture(self, shape: EncodeShape, candidates: int = 0) -> None:
        """Captures the graph of a step that also encodes tokens of this shape, unless it exists.

        Capturing runs the step, so the buffers are restored afterwards.
        """
        if (shape, candidates) in self._replays:
            return
        model = self.fused.model
        if any(shape) and shape not in self.encode_buffers:
            ids_PS = torch.zeros(shape, dtype=torch.int64, device=model.device)
            self.encode_buffers[shape] = (ids_PS, CacheTable.empty(model, shape[0]))
        buffers = [
            *(getattr(self.rows, field.name) for field in fields(CanvasBatch)),
            self.soft_BCD,
            self.settled_flags.step_1,
        ]
        saved = [buffer.clone() for buffer in buffers]
        try:
            encode_buffers = self.encode_buffers.get(shape)
            top_probs = self._empty_top_probs(candidates) if candidates else None
            replay = self.fused.capture(lambda: self._body(encode_buffers, top_probs), self._graph_pool)
            self._replays[shape, candidates] = (replay, top_probs)
        finally:
            for buffer, before in zip(buffers, saved, strict=True):
                buffer.copy_(before)
            self.settled_flags.reset()

    def _empty_top_probs(self, candidates: int) -> TopProbs:
        """Buffers for the probabilities at every position, kept as long as the graph that writes them."""
        positions = self.rows.ids_BC.shape
        device = self.soft_BCD.device
        shown = min(candidates, self.fused.model.config.vocab_size)
        own_BC, draft_BC = (torch.zeros(positions, dtype=torch.float32, device=device) for _ in range(2))
        ids_BCK = torch.zeros(*positions, shown, dtype=torch.int64, device=device)
        return TopProbs(own_BC, draft_BC, ids_BCK, torch.zeros(ids_BCK.shape, dtype=torch.float32, device=device))

    def _body(self, encode_buffers: tuple[Tensor, CacheTable] | None, top_probs: TopProbs | None) -> None:
        """The step that is captured."""
        hidden_ND = self.fused.denoise(self.rows.ids_BC, self.soft_BCD, self.table, self.context, encode_buffers)
        self._sample(hidden_ND, top_probs)

    def _sample(self, hidden_ND: Tensor, top_probs: TopProbs | None = None) -> None:
        """The sampler step: from final hidden states to the next canvases and soft embeddings."""
        model = self.fused.model
        rows = self.rows
        softcap = model.config.final_logit_softcapping
        raw_NV = model.embed_tokens.project(hidden_ND)
        uniform_BC, noise_BC, temperature_BC = draw_step_inputs(rows, model.config.vocab_size)
        temperature_N = temperature_BC.flatten()
        prediction = argmax_entropy_sample(raw_NV, softcap, temperature_N, uniform_BC.flatten())
        step_canvases_(rows, prediction.best_N, prediction.entropy_N, prediction.sampled_N, noise_BC)
        if top_probs is not None:
            ids_N = rows.ids_BC.flatten()
            found = find_top_probs(raw_NV, softcap, temperature_N, prediction, ids_N, top_probs.ids_BCK.shape[2])
            for buffer, values in zip(top_probs, found, strict=True):
                buffer.copy_(values.view_as(buffer))
        with self.fused.side_stream:
            self.settled_flags.publish(rows.settled_B)
        embedding = model.embed_tokens
        if isinstance(embedding, PackedEmbedding):
            factors_NV = compute_probs_(raw_NV, softcap, temperature_N, prediction, embedding.weight_scale)
            soft_ND = sum_rows(factors_NV, embedding.table_VD, raw_NV.dtype)
        else:
            soft_ND = compute_probs_(raw_NV, softcap, temperature_N, prediction) @ embedding.weight
        self.soft_BCD.copy_(soft_ND.view_as(self.soft_BCD) * model.embed_scale)
        self.fused.side_stream.wait()

    def load_canvases(self, batch: Sequence[Request]) -> None:
        """Copies the requests' canvases and settings into the static buffers, except rows that hold them already."""
        self.table.fill([cache_of(request) for request in batch])
        self.rows.settled_B[len(batch) :].fill_(True)
        for row, request in enumerate(batch):
            cfg = request.cfg
            canvas = request.canvas
            assert canvas is not None
            assert request.draws is not None
            if canvas is self.loaded[row]:
                continue
            self.rows.temperatures_BS[row, : cfg.max_steps].copy_(temperatures(cfg))
            values = {name: getattr(canvas, name)[0] for name in CANVAS_FIELDS} | {
                "seeds_B": request.draws.seeds_B[0],
                "blocks_B": request.block,
                "limit_B": cfg.max_steps,
                "bound_B": cfg.entropy_bound,
                "confidence_B": cfg.confidence_threshold,
                "stability_B": cfg.stability_threshold,
                "quota_B": cfg.quota,
                "at_end_B": cfg.accept_at_end,
                "spread_B": cfg.spread,
                "last_B": cfg.stops_last,
            }
            if cfg.stops_last:
                values["stops_BE"] = stop_tokens(cfg)
            for name, value in values.items():
                getattr(self.rows, name)[row] = value
            self.soft_BCD[row] = request.soft_1CD[0] if request.soft_1CD is not None else 0.0

    def copy_top_probs(self, batch: Sequence[Request]) -> list[TopProbs | None]:
        """Copies of the probabilities that the last step found, for each request that asked for them."""
        if self.top_probs is None:
            return [None] * len(batch)
        own_BC, draft_BC, ids_BCK, probs_BCK = (tensor.clone() for tensor in self.top_probs)
        shown: list[TopProbs | None] = []
        for row, request in enumerate(batch):
            count = request.candidates
            one = slice(row, row + 1)
            top_probs = TopProbs(own_BC[one], draft_BC[one], ids_BCK[one, :, :count], probs_BCK[one, :, :count])
            shown.append(top_probs if count else None)
        return shown

    def read_results(self, batch: Sequence[Request]) -> tuple[list[Canvas], list[Tensor], list[bool]]:
        """Copies of the canvases after the step, their soft embeddings, and which have settled. Waits for the flags only.

        The GPU sets the flags before it computes the soft embeddings, so the host can launch the next step meanwhile.
        """
        copies = {name: getattr(self.rows, name).clone() for name in CANVAS_FIELDS}
        softs = self.soft_BCD.clone().split(1)
        skipped_1 = torch.zeros(1, dtype=torch.bool, device=self.soft_BCD.device)
        for name in ("unchanged_B", "steps_B"):
            copies[name] = copies[name].long()
        settled = self.settled_flags.wait_for_step(self.steps_launched)
        canvases = []
        for row, request in enumerate(batch):
            assert request.canvas is not None
            values = {name: tensor[row : row + 1] for name, tensor in copies.items()}
            canvases.append(replace(request.canvas, **values, skipped_B=skipped_1, step=request.canvas.step + 1))
        self.loaded[: len(canvases)] = canvases
        return canvases, list(softs[: len(batch)]), settled[: len(batch)]


class SettledFlags:
    """Which canvases have settled after which step, in pinned memory that the host reads without synchronizing the GPU.

    Each number holds both: twice the step, plus one if settled. The numbers may arrive in any order without confusion.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.step_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.host_B = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")

    def publish(self, settled_B: Tensor) -> None:
        """Copies the flags to the host. Part of the captured step."""
        self.step_1.add_(1)
        self.host_B.copy_(2 * self.step_1 + settled_B, non_blocking=True)

    def reset(self) -> None:
        """Discards the flags of a step that only served capturing."""
        if self.step_1.is_cuda:
            torch.cuda.synchronize()
        self.host_B.fill_(-1)

    def wait_for_step(self, step: int) -> list[bool]:
        """The flags of the step with this number, as soon as they are there."""
        while not bool((self.host_B // 2 == step).all()):
            if torch.cuda.current_stream().query():  # the GPU has finished, or raises its fault here
                torch.cuda.synchronize()
                break
            time.sleep(POLL_SECONDS)
        return [number % 2 == 1 for number in self.host_B.tolist()]


@lru_cache(maxsize=64)  # bounded: clients choose the settings
def temperatures(cfg: SamplerConfig) -> Tensor:
    """The temperature of every step."""
    return torch.stack([sampler.temperature(step, cfg) for step in range(cfg.max_steps)])


@lru_cache(maxsize=64)
def stop_tokens(cfg: SamplerConfig) -> Tensor:
    """The stop tokens, in a buffer of fixed length."""
    stops = cfg.eos_token_ids
    return torch.tensor([*stops, *[NO_TOKEN] * (MAX_STOPS - len(stops))])
