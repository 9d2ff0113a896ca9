"""The runner for GPUs: a whole step of some canvases is one CUDA graph, from their tokens to their tokens.

    ids, beliefs -> layers -> head -> [chance, vocabulary, acceptance] -> ids, and probabilities -> beliefs

Canvases in work live in buffers that stay where they are; what the graph needs to know of a request (its seed, its step, its
settings, where its cache lies) lies there too. The host looks once a step whether a page has settled, and starts the next
step before it does anything else. Requests with constraints, with settings of their own, or that somebody watches go through the
same layers, in graphs too where their pages have the usual length, but their sampler is the plain one.

Shapes: B requests, C canvas positions, D model size, V vocabulary, N = B * C.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion import sampler
from redraft.diffusion.sampler import Canvas
from redraft.engine.fused_layers import FusedLayers, Table
from redraft.engine.request import Request
from redraft.engine.runner import Runner, by_length
from redraft.kernels.triton.sampler_step import CanvasBatch, draw_step_inputs, step_canvases_
from redraft.kernels.triton.vocabulary import argmax_entropy_sample, compute_probs_
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache

SHORT = 2048  # the shortest context a graph is made for; each longer one is eight times that
PATIENCE = 5e-5  # seconds between two looks
STEPS = 64  # that temperatures are kept for
LONG = 256  # tokens of a page that one program can compare with one another
MOST_STAGES = 12  # kept with their graphs; the one that was not used for longest goes


def plain(request: Request) -> bool:
    """Whether its sampler is the released one, which the kernels know: an entropy bound, and no constraints on this page.

    And a page that is not too long for them, nor its steps too many to be worth graphs of their own; nobody wants to see
    probabilities or to change the constraints halfway.
    """
    cfg = request.cfg
    special = cfg.quota or cfg.accept_at_end or cfg.spread or cfg.stops_last
    seen = request.candidates > 0 or len(request.replay.interventions) > 0  # between two steps
    return request.fixed is None and not special and not seen and cfg.canvas_length <= LONG and cfg.max_steps <= STEPS


class CudaGraphRunner(Runner):
    """Runs one model with the kernels of `kernels/triton`."""

    def __init__(self, model: DiffusionGemma, chunk: int) -> None:
        super().__init__(model, chunk)
        self.fused = FusedLayers(model)
        self.pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self.stages: dict[tuple[int, ...], Stage] = {}
        self.layers: dict[tuple[int, ...], Layers] = {}
        self.unread: dict[Request, Tensor] = {}  # pages that count as context but are not in the cache yet
        self.ahead: dict[Stage, list[Canvas]] = {}  # where a step was started, and the canvases it started from

    @torch.inference_mode()
    def warm_up(self, max_running: int) -> int:
        """Runs a full step and a chunk of a prompt once; returns the bytes that they took beyond what stays taken.

        Kernels are built on the way; they are found on disk the next time.
        """
        model, on_gpu = self.model, self.model.device.type == "cuda"
        stage = self._stage_of(power(max_running), model.config.canvas_length, SHORT)
        stage.make((0, 0))
        stage.make((1, power(self.chunk)))  # nothing that runs takes more
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        cache, table = model.new_cache(1, self.chunk, rewind=0), Table.empty(model, 1)
        table.fill([cache])
        self.fused.read(torch.zeros(1, self.chunk, dtype=torch.int64, device=model.device), table, 0)
        return torch.cuda.max_memory_allocated() - before if on_gpu else 0

    def read(self, request: Request) -> int:
        """The next chunk of a prompt into its cache; the last is read with the first step of its first page."""
        part = request.prompt[request.read : request.read + self.chunk]
        ids_1S = torch.tensor([part], device=self.model.device)
        request.cache.check_room([len(part)])
        request.cache.advance([len(part)])
        request.read += len(part)
        request.context += part
        if request.reading:
            self._read(ids_1S, request)
        else:
            self.unread[request] = ids_1S
        return len(part)

    def read_pages(self, requests: Sequence[Request]) -> None:
        """Committed pages belong to the context from now on; they are read with the first step of the pages behind them."""
        self.unread = {request: ids_1S for request, ids_1S in self.unread.items() if not request.over}
        for request in requests:
            if request in self.unread:  # no step was made behind what it has read last
                self._read(self.unread.pop(request), request)
            request.cache.check_room([request.cfg.canvas_length])
            request.cache.advance([request.cfg.canvas_length])
            request.context += request.page.ids_BC[0].tolist()
            ids_1C, request.page = request.page.ids_BC, None
            request.block += 1
            if request.retold:  # no step follows in this round
                self._read(ids_1C, request)
            else:
                self.unread[request] = ids_1C

    def redraft(self, requests: Sequence[Request]) -> None:
        """One step of each request's page."""
        others = [request for request in requests if not plain(request)]
        for request in others:
            if request in self.unread:
                self._read(self.unread.pop(request), request)
        if others:
            super().redraft(others)
        for some in by_length([request for request in requests if plain(request)]):
            stage = self._stage(some)
            if not self._has_begun(stage, some):
                stage.load(some)
                fresh = [(request, self.unread.pop(request)) for request in some if request in self.unread]
                stage.step(self._together(fresh))
            self.ahead.pop(stage, None)
            found, softs, settled = stage.look(some)
            for request, state, soft_1CD, done in zip(some, found, softs, settled, strict=True):
                request.state, request.soft_1CD = state, soft_1CD
                request.done = done or state.step >= request.cfg.max_steps
            if not any(request.done for request in some):
                stage.step()  # what it needs is there already
                self.ahead[stage] = found

    def _read(self, ids_1S: Tensor, request: Request) -> None:
        """The last tokens of a request's context into its cache."""
        table = Table.empty(self.model, 1)
        table.fill([request.cache], [ids_1S.shape[1]])
        self.fused.read(ids_1S, table, len(request.context))

    def _together(self, fresh: "list[Unread]") -> "list[Unread]":
        """What is read together with a step: as much as a chunk, longer ones filled up. The longest are read here, alone."""
        fresh = sorted(fresh, key=lambda one: one[1].shape[1])
        sizes = [power(max(ids_1S.shape[1], request.cfg.canvas_length)) for request, ids_1S in fresh]
        while fresh and power(len(fresh)) * sizes[len(fresh) - 1] > max(self.chunk, sizes[0]):
            request, ids_1S = fresh.pop()
            self._read(ids_1S, request)
        return fresh

    def _has_begun(self, stage: "Stage", requests: Sequence[Request]) -> bool:
        """Whether the step of just these canvases was started when the last one ended."""
        before = self.ahead.get(stage, [])
        if len(before) != len(requests):
            return False
        return all(state is request.state for state, request in zip(before, requests, strict=True))

    def denoise(self, requests: Sequence[Request]) -> dict[Request, Tensor]:
        """Logits [1, C, V] of each request's page. Those of the usual length go through graphs."""
        found = {}
        for some in by_length(requests):
            ids_BC, soft_BCD = torch.cat([request.state.ids_BC for request in some]), self._beliefs(some)
            caches = [request.cache for request in some]
            if ids_BC.shape[1] == self.model.config.canvas_length:
                hidden_ND = self._layers_of(*size_of(some)).run(ids_BC, soft_BCD, caches)
            else:
                table = Table.empty(self.model, len(some))
                table.fill(caches)
                hidden_ND = self.fused.denoise(ids_BC, soft_BCD, table, max(len(r.context) for r in some))
            logits_BCV = self.model.head(hidden_ND).unflatten(0, ids_BC.shape)
            found |= dict(zip(some, logits_BCV.split(1), strict=True))
        return found

    def _layers_of(self, *key: int) -> "Layers":
        layers = self.layers.pop(key, None) or Layers(self.fused, *key, self.pool)
        self.layers[key] = layers  # the latest last
        if len(self.layers) > MOST_STAGES:
            self.layers.pop(next(iter(self.layers)))
        return layers

    def _stage(self, requests: Sequence[Request]) -> "Stage":
        return self._stage_of(*size_of(requests))

    def _stage_of(self, *key: int) -> "Stage":
        stage = self.stages.pop(key, None) or Stage(self.fused, *key, self.pool)
        self.stages[key] = stage  # the latest last
        if len(self.stages) > MOST_STAGES:
            self.ahead.pop(self.stages.pop(next(iter(self.stages))), None)
        return stage


def size_of(requests: Sequence[Request]) -> tuple[int, int, int]:
    """For how many canvases, of which length, behind contexts of about which length, buffers and graphs are needed."""
    longest, context = SHORT, max(len(request.context) for request in requests)
    while longest < context:
        longest *= 8
    return power(len(requests)), requests[0].cfg.canvas_length, longest


class Layers:
    """The layers over some canvases as a graph, without a sampler: for requests whose sampler is the plain one."""

    def __init__(self, fused: FusedLayers, count: int, length: int, longest: int, pool: object) -> None:
        model = fused.model
        self.fused, self.longest, self.table = fused, longest, Table.empty(model, count)
        self.ids_BC = torch.zeros(count, length, dtype=torch.int64, device=model.device)
        self.soft_BCD = torch.zeros(count, length, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.hidden_ND: Tensor | None = None
        self._graph = recorded(self._body, model.device, pool)

    def _body(self) -> None:
        self.hidden_ND = self.fused.denoise(self.ids_BC, self.soft_BCD, self.table, self.longest)

    def run(self, ids_BC: Tensor, soft_BCD: Tensor | None, caches: Sequence[KVCache]) -> Tensor:
        """Final hidden states [N, D], which the next run overwrites."""
        rows, length = ids_BC.shape
        self.table.fill(caches)
        self.ids_BC[:rows] = ids_BC
        self.soft_BCD[:rows] = soft_BCD if soft_BCD is not None else 0.0
        self._graph()
        return self.hidden_ND[: rows * length]


class Stage:
    """Some canvases in work, and the graphs that move them."""

    def __init__(self, fused: FusedLayers, count: int, length: int, longest: int, pool: object) -> None:
        self.fused, self.longest, model = fused, longest, fused.model
        self.rows = CanvasBatch.empty(count, length, STEPS, model.device)
        self.table = Table.empty(model, count)
        self.soft_BCD = torch.zeros(count, length, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.pages: dict[tuple[int, int], tuple[Tensor, Table]] = {}  # what is read with a step, by how many and how long
        self.held: list[Canvas | None] = [None] * count  # whose canvases the rows are
        self.told, self.begun = SettledFlags(count, model.device), 0
        self._graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self._pool = pool

    def step(self, unread: "Sequence[Unread]" = ()) -> None:
        """One step of all canvases; what some of the requests have not read goes into their caches on the way."""
        shape = (0, 0)
        if unread:
            longest = max(self.rows.ids_BC.shape[1], *(ids_1S.shape[1] for _, ids_1S in unread))
            shape = (power(len(unread)), power(longest))
        self.make(shape)
        if unread:
            ids_PS, table = self.pages[shape]
            table.fill([request.cache for request, _ in unread], [ids_1S.shape[1] for _, ids_1S in unread])
            for row, (_, ids_1S) in enumerate(unread):
                ids_PS[row, : ids_1S.shape[1]] = ids_1S[0]  # what stands behind them is not kept
        self._graphs[shape]()
        self.begun, self.held = self.begun + 1, [None] * len(self.held)

    def make(self, shape: tuple[int, int]) -> None:
        """The step with so many parts of contexts, of at most so many tokens, as a graph, if it is not there yet.

        Making it runs it: what it writes is put back.
        """
        if shape in self._graphs:
            return
        model = self.fused.model
        if any(shape):
            self.pages[shape] = (torch.zeros(shape, dtype=torch.int64, device=model.device), Table.empty(model, shape[0]))
        written = [*(getattr(self.rows, field.name) for field in fields(CanvasBatch)), self.soft_BCD, self.told.step_1]
        kept = [tensor.clone() for tensor in written]
        try:
            self._graphs[shape] = recorded(lambda: self._body(self.pages.get(shape)), model.device, self._pool)
        finally:
            for tensor, before in zip(written, kept, strict=True):
                tensor.copy_(before)
            self.told.forget()

    def _body(self, pages: tuple[Tensor, Table] | None) -> None:
        """One step, and pages read on the way."""
        canvas = (self.rows.ids_BC, self.soft_BCD, self.table, self.longest)
        self._settle(self.fused.denoise(*canvas, pages))

    def _settle(self, hidden_ND: Tensor) -> None:
        """From final hidden states to the next canvases and what they believe."""
        model, rows, cap = self.fused.model, self.rows, self.fused.model.config.final_logit_softcapping
        raw_NV = F.linear(hidden_ND, model.embed_tokens.weight)
        uniform_BC, noise_BC, temperature_BC = draw_step_inputs(rows, model.config.vocab_size)
        read = argmax_entropy_sample(raw_NV, cap, temperature_BC.flatten(), uniform_BC.flatten())
        step_canvases_(rows, read.best_N, read.entropy_N, read.sampled_N, noise_BC)
        with self.fused.beside:
            self.told.tell(rows.settled_B)
        probs_NV = compute_probs_(raw_NV, cap, temperature_BC.flatten(), read)
        self.soft_BCD.copy_((probs_NV @ model.embed_tokens.weight).view_as(self.soft_BCD) * model.embed_scale)
        self.fused.beside.wait()

    def load(self, requests: Sequence[Request]) -> None:
        """Brings the requests' canvases here, those that are not here yet."""
        self.table.fill([request.cache for request in requests])
        self.rows.settled_B[len(requests) :].fill_(True)
        for row, request in enumerate(requests):
            state, cfg = request.state, request.cfg
            if state is self.held[row]:
                continue
            self.rows.temperatures_BS[row, : cfg.max_steps].copy_(temperatures(cfg))
            values = {name: getattr(state, name)[0] for name in KEPT} | {
                "seeds_B": request.draws.seeds_B[0],
                "blocks_B": request.block,
                "limit_B": cfg.max_steps,
                "bound_B": cfg.entropy_bound,
                "confidence_B": cfg.confidence_threshold,
                "stability_B": cfg.stability_threshold,
            }
            for name, value in values.items():
                getattr(self.rows, name)[row] = value
            self.soft_BCD[row] = request.soft_1CD[0] if request.soft_1CD is not None else 0.0

    def look(self, requests: Sequence[Request]) -> tuple[list[Canvas], list[Tensor], list[bool]]:
        """The canvases after the step, copied out, with what they believe; and which have settled, which is waited for.

        That is known before what they believe is computed: the host can begin the next step while the GPU still works.
        """
        copies = {name: getattr(self.rows, name).clone() for name in KEPT}
        softs, never_B = self.soft_BCD.clone().split(1), torch.zeros(1, dtype=torch.bool, device=self.soft_BCD.device)
        for name in ("unchanged_B", "steps_B"):
            copies[name] = copies[name].long()
        settled = self.told.wait(self.begun)
        found = []
        for row, request in enumerate(requests):
            own = {name: tensor[row : row + 1] for name, tensor in copies.items()}
            found.append(Canvas(**own, skipped_B=never_B, step=request.state.step + 1))
        self.held[: len(found)] = found
        return found, list(softs[: len(requests)]), settled[: len(requests)]


class SettledFlags:
    """Which canvases have settled, and after which step, in memory that the host sees without asking the GPU.

    Every number holds both, twice the step and one if settled: whatever order they arrive in, none is mistaken.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.step_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.here_B = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")

    def tell(self, settled_B: Tensor) -> None:
        """Part of a step."""
        self.step_1.add_(1)
        self.here_B.copy_(2 * self.step_1 + settled_B, non_blocking=True)

    def forget(self) -> None:
        """What was told when a step was only tried."""
        if self.step_1.is_cuda:
            torch.cuda.synchronize()
        self.here_B.fill_(-1)

    def wait(self, step: int) -> list[bool]:
        """What the step of this number found, as soon as it has."""
        while not bool((self.here_B // 2 == step).all()):
            if torch.cuda.current_stream().query():  # all is done; or a fault is raised here
                torch.cuda.synchronize()
                break
            time.sleep(PATIENCE)
        return [number % 2 == 1 for number in self.here_B.tolist()]


@lru_cache(maxsize=64)  # clients choose the settings: an unbounded cache would grow with every new temperature
def temperatures(cfg: SamplerConfig) -> Tensor:
    """Returns the temperature of every step."""
    return torch.stack([sampler.temperature(step, cfg) for step in range(cfg.max_steps)])


def power(number: int) -> int:
    """The least power of two that is as much."""
    return 1 << (number - 1).bit_length()


Unread = tuple[Request, Tensor]  # the last tokens of its context, [1, S]
KEPT = tuple(field.name for field in fields(Canvas) if field.name not in ("skipped_B", "step"))


def recorded(body: Callable[[], None], device: torch.device, pool: object) -> Callable[[], None]:
    """The body as a CUDA graph; elsewhere the body itself."""
    if device.type != "cuda":
        return body
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        body()  # kernels are built, libraries find their memory
    torch.cuda.current_stream().wait_stream(beside)
    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # memory of a GPU that is given back meanwhile would spoil the recording
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # others may use the GPU meanwhile
            body()
    finally:
        if collects:
            gc.enable()
    return graph.replay
