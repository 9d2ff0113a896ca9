"""CudaGraphRunner: the runner for GPUs. A whole step of a batch of canvases, sampler included, is one CUDA graph.

Batches are padded to buckets (number of canvases, canvas length, context length), each with static buffers and captured
graphs. The graph reads all it needs of a request (seed, step, settings, addresses of its KV cache) from these buffers. The
host waits once a step for the flags that say which canvases have settled, and launches the next step before other work.

A request whose sampler the kernels do not implement (constraints, settle_prefix, interventions) goes through the same
layers, as a graph when its canvas has the model's length, and then through the reference sampler.

Shapes: B requests, C canvas positions, D model size, V vocabulary, N = B * C, P encoded rows of S tokens, K candidates.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.diffusion.draft_tree import DraftTree, choose_tree
from redraft.diffusion.sampler import Canvas
from redraft.diffusion.verified import Round
from redraft.engine.cache_table import CacheTable
from redraft.engine.fused_layers import FusedLayers
from redraft.engine.fused_llama import FusedLlama
from redraft.engine.graph_capture import MIN_CONTEXT, NEXT_CONTEXT, bucket_contexts, next_power_of_two
from redraft.engine.memory import count_token_bytes, has_memory_limit, weight_bytes
from redraft.engine.request import Request, RequestStatus, contain_failure
from redraft.engine.round_graph import RoundBucket, RoundKey, uses_round_graph
from redraft.engine.runner import (
    Runner,
    cache_of,
    canvas_ids,
    committed_ids,
    count_tokens,
    group_by_length,
    verification_of,
)
from redraft.engine.step_graph import (
    NO_ENCODE,
    BucketKey,
    PendingEncode,
    StepBucket,
    count_candidates,
    uses_fused_sampler,
)
from redraft.engine.tree_graph import TreeBucket
from redraft.model.backbone import Backbone
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache
from redraft.model.llama import Llama

CHUNK_SHARE = 16  # the share of the memory beside the weights that activations of a longer chunk may take
MAX_CHUNK_CONTEXT = NEXT_CONTEXT * MIN_CONTEXT  # tokens
MIN_CHUNK = 16  # tokens of the shortest graph for the end of a prompt
TREE_ROWS = 2  # most requests whose drafts are trees: with more, the GPU has enough to do
MAX_BUCKETS = 12  # kept with their graphs; the least recently used one is dropped


class CudaGraphRunner(Runner):
    """Runs one model with the kernels of `kernels/triton`."""

    max_rows = 64  # of a round: on a GPU more rows take hardly longer

    def __init__(self, model: Backbone, prefill_chunk: int, prefill_chunk_alone: int | None = None) -> None:
        super().__init__(model, prefill_chunk)
        self.prefill_chunk_alone = prefill_chunk_alone or choose_chunk_alone(model, prefill_chunk)
        self.fused = fuse(model)
        self.graph_pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None
        self.step_buckets: dict[BucketKey, StepBucket] = {}  # the most recently used last
        self.layer_buckets: dict[BucketKey, LayerBucket] = {}
        self.chunk_buckets: dict[tuple[int, int], ChunkBucket] = {}  # by length and context
        self.has_chunk_graphs = not has_memory_limit(model.device)  # a plan for a limit does not count them
        # Tokens that count as context but are not in the KV cache yet: they are encoded together with the next step.
        self.pending_encodes: dict[Request, Tensor] = {}
        self.launched_ahead: dict[StepBucket, list[Canvas]] = {}  # steps already launched, and the canvases they read
        self.round_buckets: dict[RoundKey, tuple[RoundBucket, Callable[[], None]]] = {}  # with the replay of their graphs
        self.tree = choose_tree(model)
        self.tree_buckets: dict[tuple[int, int], tuple[TreeBucket, Callable[[], None]]] = {}  # by rows and context

    def spare_slots(self, cfg: SamplerConfig) -> int:
        """A tree is written behind the context before its path is known."""
        return len(self.tree) if self.tree is not None and self._uses_tree(cfg) else 0

    @property
    def token_cost(self) -> float:
        """Nothing: graphs have a fixed number of drafts."""
        return 0.0

    @torch.inference_mode()
    def warm_up(self, max_running: int) -> int:
        """Runs a full step and a prefill chunk once. Returns the bytes that they took beyond what stays allocated.

        This compiles the kernels; the next process finds them on disk.
        """
        model = self.model
        on_gpu = model.device.type == "cuda"
        if not model.config.is_causal_only:
            bucket = self._step_bucket((next_power_of_two(max_running), model.config.canvas_length, MIN_CONTEXT))
            bucket.capture(NO_ENCODE)
            bucket.capture((1, next_power_of_two(self.prefill_chunk)))  # nothing that runs takes more
        else:
            length = model.drafter.cfg.canvas_length - 1 if model.drafter is not None else 0
            self._round_bucket((next_power_of_two(max_running), length, MIN_CONTEXT))
            if self.tree is not None:
                self._tree_bucket(self.tree, (min(next_power_of_two(max_running), TREE_ROWS), MIN_CONTEXT))
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        cache = model.new_cache(1, self.prefill_chunk_alone, rewind=0)
        table = CacheTable.empty(model, 1)
        table.fill([cache])
        self.fused.encode(torch.zeros(1, self.prefill_chunk_alone, dtype=torch.int64, device=model.device), table, 0)
        return torch.cuda.max_memory_allocated() - before if on_gpu else 0

    def prefill(self, request: Request, *, is_alone: bool = False) -> int:
        """Encodes the next chunk of a prompt; the last chunk is encoded with the first step of the first canvas.

        That graph is for at most `prefill_chunk` tokens, so longer chunks leave as many for the last one. The kernels have
        no attention in both directions: a chunk with images goes through the reference, at once.
        """
        if request.images and request.next_chunk(self.prefill_chunk)[1]:
            return super().prefill(request)
        length = self.prefill_chunk
        if is_alone:
            tokens_left = request.next_image - request.prefilled
            length = max(length, min(self.prefill_chunk_alone, tokens_left - self.prefill_chunk))
        chunk, _ = request.next_chunk(length)
        ids_1S = torch.tensor([chunk], device=self.model.device)
        self._extend_cache(request, len(chunk))
        request.add_prefilled(len(chunk))
        if request.status in (RequestStatus.PREFILLING, RequestStatus.VERIFYING):
            self._encode(ids_1S, request)
        else:
            self.pending_encodes[request] = ids_1S
        return len(chunk)

    def encode_canvases(self, requests: Sequence[Request]) -> None:
        """Committed canvases count as context from now on; they are encoded with the first step of the next canvas."""
        self.pending_encodes = {request: ids for request, ids in self.pending_encodes.items() if not request.is_over}
        for request in requests:
            with contain_failure(request):
                if request in self.pending_encodes:  # no step was made after these tokens
                    self._encode(self.pending_encodes.pop(request), request)
                self._extend_cache(request, committed_ids(request).shape[1])
                ids_1C = request.take_committed()
                if request.status is RequestStatus.REPLAYING:  # no denoising step follows now
                    self._encode(ids_1C, request)
                else:
                    self.pending_encodes[request] = ids_1C

    def step(self, requests: Sequence[Request]) -> None:
        """One denoising step of each request's canvas."""
        fused = [request for request in requests if uses_fused_sampler(request)]
        others = [request for request in requests if not uses_fused_sampler(request)]
        for request in others:
            if request in self.pending_encodes:
                with contain_failure(request):
                    self._encode(self.pending_encodes.pop(request), request)
        others = [request for request in others if not request.is_over]
        if others:
            super().step(others)
        for batch in group_by_length(fused):
            with contain_failure(*batch):
                self._step_fused(batch)

    def _step_fused(self, batch: Sequence[Request]) -> None:
        """One step of canvases of one length whose sampler is in the graph."""
        key = bucket_of(batch)
        bucket = self._step_bucket(key)
        try:
            if not self._is_launched(bucket, batch):
                bucket.load_canvases(batch)
                pending = [
                    (request, self.pending_encodes.pop(request)) for request in batch if request in self.pending_encodes
                ]
                bucket.launch_step(self._select_joint_encodes(pending), count_candidates(batch))
            self.launched_ahead.pop(bucket, None)
            top_probs = bucket.copy_top_probs(batch)
            canvases, softs, settled = bucket.read_results(batch)
            results = zip(batch, canvases, softs, settled, top_probs, strict=True)
            for request, canvas, soft_1CD, is_settled, shown in results:
                request.canvas = canvas
                request.soft_1CD = soft_1CD
                request.top_probs = shown
                request.is_canvas_done = is_settled or canvas.step >= request.cfg.max_steps
            if not any(request.is_canvas_done for request in batch):
                bucket.launch_step(candidates=count_candidates(batch))  # its inputs are in the static buffers already
                self.launched_ahead[bucket] = canvases
        except BaseException:  # the static buffers may be half written
            self._drop_step_bucket(key)
            raise

    def _extend_cache(self, request: Request, count: int) -> None:
        """Makes `count` tokens part of the cache's context before they are written."""
        cache = cache_of(request)
        cache.check_room([count])
        cache.advance([count])

    def _encode(self, ids_1S: Tensor, request: Request) -> None:
        """Writes the last tokens of a request's context into its cache. A prefill chunk goes through a graph.

        So do the shorter ones of a Llama, which is often small: they are padded. Longer chunks need no graph: the GPU takes
        longer than the host. Behind a very long context, a graph for the longest one would split attention worse.
        """
        context = bucket_contexts(len(request.context))[-1]
        length = ids_1S.shape[1]
        is_padded = isinstance(self.fused, FusedLlama) and length < self.prefill_chunk
        has_graph = self.has_chunk_graphs and (is_padded or length == self.prefill_chunk)
        if has_graph and context <= MAX_CHUNK_CONTEXT:
            padded = min(next_power_of_two(max(length, MIN_CHUNK)), self.prefill_chunk)
            bucket = self.chunk_buckets.get((padded, context))
            if bucket is None:
                bucket = ChunkBucket(self.fused, padded, context, self.graph_pool)
                self.chunk_buckets[padded, context] = bucket
            bucket.run(ids_1S, cache_of(request))
            return
        table = CacheTable.empty(self.model, 1)
        table.fill([cache_of(request)], [length])
        self.fused.encode(ids_1S, table, len(request.context) - length)

    def _select_joint_encodes(self, pending: list[PendingEncode]) -> list[PendingEncode]:
        """The tokens to encode in the same graph as a step: after padding at most a prefill chunk.

        The longest ones beyond that are encoded here, alone.
        """
        pending = sorted(pending, key=lambda item: item[1].shape[1])
        sizes = [next_power_of_two(max(ids_1S.shape[1], request.cfg.canvas_length)) for request, ids_1S in pending]
        while pending and next_power_of_two(len(pending)) * sizes[len(pending) - 1] > max(self.prefill_chunk, sizes[0]):
            request, ids_1S = pending.pop()
            self._encode(ids_1S, request)
        return pending

    def _is_launched(self, bucket: StepBucket, batch: Sequence[Request]) -> bool:
        """Whether the step of exactly these canvases was launched when the previous step ended."""
        canvases = self.launched_ahead.get(bucket, [])
        if len(canvases) != len(batch):
            return False
        return all(canvas is request.canvas for canvas, request in zip(canvases, batch, strict=True))

    def denoise(self, batch: Sequence[Request]) -> Tensor:
        """Logits [B, C, V] of canvases of one length. The model's own canvas length goes through a graph."""
        ids_BC = torch.cat([canvas_ids(request) for request in batch])
        soft_BCD = self._soft_embeddings(batch)
        caches = [cache_of(request) for request in batch]
        if ids_BC.shape[1] == self.model.config.canvas_length:
            hidden_ND = self._layer_bucket(bucket_of(batch)).run(ids_BC, soft_BCD, caches)
        else:
            table = CacheTable.empty(self.model, len(batch))
            table.fill(caches)
            assert isinstance(self.fused, FusedLayers)
            hidden_ND = self.fused.denoise(ids_BC, soft_BCD, table, max(len(request.context) for request in batch))
        return self.model.head(hidden_ND).unflatten(0, ids_BC.shape)

    def _verify(self, batch: Sequence[Request]) -> dict[Request, int]:
        """One round of requests with the same draft length: as a graph where it implements their picks."""
        in_graph = [request for request in batch if uses_round_graph(verification_of(request))]
        others = [request for request in batch if not uses_round_graph(verification_of(request))]
        tokens = super()._verify(others) if others else {}
        return tokens | self._verify_in_graph(in_graph) if in_graph else tokens

    def _verify_in_graph(self, batch: Sequence[Request]) -> dict[Request, int]:
        """One round in one graph, picks and drafts included."""
        states = [verification_of(request) for request in batch]
        if self.tree is not None and len(batch) <= TREE_ROWS and all(self._uses_tree(state.cfg) for state in states):
            return self._verify_trees(batch, self.tree)
        works = [request.begin_round() for request in batch]
        for request, work in zip(batch, works, strict=True):
            self._extend_cache(request, len(work.clean))
        key = (next_power_of_two(len(batch)), batch[0].cfg.draft_length, bucket_of(batch)[2])
        bucket, replay = self._round_bucket(key)
        bucket.load(states, works, [cache_of(request) for request in batch])
        replay()
        for request, work, (verdict, fresh) in zip(batch, works, bucket.read(states, works), strict=True):
            request.end_round(work, verdict, fresh)
        return dict(zip(batch, map(count_tokens, works), strict=True))

    def _uses_tree(self, cfg: SamplerConfig) -> bool:
        """Whether a request's drafts may be a tree: those of exact mode, with the drafter's own draft length."""
        assert self.model.drafter is not None
        return cfg.check == "exact" and cfg.draft_length == self.model.drafter.cfg.canvas_length - 1

    def _verify_trees(self, batch: Sequence[Request], tree: DraftTree) -> dict[Request, int]:
        """One round of few requests, each with a tree of drafts."""
        states = [verification_of(request) for request in batch]
        for request in batch:
            request.begin_round()
            self._extend_cache(request, len(tree))
        rows, _, context = bucket_of(batch)
        bucket, replay = self._tree_bucket(tree, (rows, context))
        bucket.load(states, [cache_of(request) for request in batch])
        replay()
        for request, state, (work, verdict, ids) in zip(batch, states, bucket.read(states), strict=True):
            request.end_round(work, verdict, bucket.likeliest(ids))
            state.tree = ids
        return dict.fromkeys(batch, len(tree) * (bucket.canvas_length + 1))

    def _tree_bucket(self, tree: DraftTree, key: tuple[int, int]) -> tuple[TreeBucket, Callable[[], None]]:
        """The bucket of this many rows and this context, captured when it is first used."""
        if key not in self.tree_buckets:
            assert isinstance(self.fused, FusedLlama)
            bucket = TreeBucket(self.fused, tree, *key)
            self.tree_buckets[key] = (bucket, self.fused.capture(bucket.body, self.graph_pool))
        return self.tree_buckets[key]

    def _round_bucket(self, key: RoundKey) -> tuple[RoundBucket, Callable[[], None]]:
        """The bucket of this key, captured when it is first used. Capturing runs a round on memory of the bucket's own."""
        entry = self.round_buckets.pop(key, None)
        if entry is None:
            bucket = RoundBucket(self.fused, key)
            entry = (bucket, self.fused.capture(bucket.body, self.graph_pool))
        self.round_buckets[key] = entry
        if len(self.round_buckets) > MAX_BUCKETS:
            self.round_buckets.pop(next(iter(self.round_buckets)))
        return entry

    def joint(self, batch: Sequence[Request], works: Sequence[Round]) -> tuple[Tensor, Tensor | None]:
        """As the reference's, with the kernels."""
        for request, work in zip(batch, works, strict=True):
            self._extend_cache(request, len(work.clean))
        counts = [len(work.clean) for work in works]
        clean_BS, canvas_BSC = self.round_inputs(batch, works)
        table = CacheTable.empty(self.model, len(batch))
        table.fill([cache_of(request) for request in batch], counts)
        canvas_table = CacheTable.empty(self.model, clean_BS.numel(), table.base)
        canvas_table.behind_each_(table)
        context = max(len(request.context) for request in batch)
        hidden_ND, canvas_ND = self.fused.joint(clean_BS, table, canvas_BSC, canvas_table, context)
        hidden_BSD = hidden_ND.unflatten(0, clean_BS.shape)
        if canvas_ND is None or canvas_BSC is None:
            return hidden_BSD, None
        return hidden_BSD, canvas_ND.unflatten(0, canvas_BSC.shape)

    def _layer_bucket(self, key: BucketKey) -> "LayerBucket":
        assert isinstance(self.fused, FusedLayers)
        bucket = self.layer_buckets.pop(key, None) or LayerBucket(self.fused, key, self.graph_pool)
        self.layer_buckets[key] = bucket
        if len(self.layer_buckets) > MAX_BUCKETS:
            self.layer_buckets.pop(next(iter(self.layer_buckets)))
        return bucket

    def _step_bucket(self, key: BucketKey) -> StepBucket:
        assert isinstance(self.fused, FusedLayers)
        bucket = self.step_buckets.pop(key, None) or StepBucket(self.fused, key, self.graph_pool)
        self.step_buckets[key] = bucket
        if len(self.step_buckets) > MAX_BUCKETS:
            self._drop_step_bucket(next(iter(self.step_buckets)))
        return bucket

    def _drop_step_bucket(self, key: BucketKey) -> None:
        self.launched_ahead.pop(self.step_buckets.pop(key), None)


def fuse(model: Backbone) -> FusedLayers | FusedLlama:
    """The layers of a model on the kernels."""
    if isinstance(model, Llama):
        return FusedLlama(model)
    assert isinstance(model, DiffusionGemma), "make_runner gives other models to the reference Runner"
    return FusedLayers(model)


def choose_chunk_alone(model: Backbone, prefill_chunk: int) -> int:
    """How many tokens of a prompt are encoded together while no other request runs.

    Depends on the model and the kind of GPU alone, not on what is free: another length rounds differently in bf16.
    """
    if model.device.type != "cuda":
        return prefill_chunk
    total = torch.cuda.get_device_properties(model.device).total_memory
    room = (total - weight_bytes(model)) // CHUNK_SHARE // count_token_bytes(model.config, model.dtype.itemsize)
    return max(chunk for chunk in (prefill_chunk, 2 * prefill_chunk, 4 * prefill_chunk) if chunk <= max(room, prefill_chunk))


def bucket_of(batch: Sequence[Request]) -> BucketKey:
    """The smallest bucket for these canvases and their contexts."""
    context = bucket_contexts(max(len(request.context) for request in batch))[-1]
    return next_power_of_two(len(batch)), batch[0].cfg.canvas_length, context


class ChunkBucket:
    """A chunk of one request's prompt, encoded as one graph: the host launches kernels slower than the GPU runs them.

    A shorter chunk is padded at its end. No token attends to the padding, and it is not stored.
    """

    def __init__(self, fused: FusedLayers | FusedLlama, length: int, context: int, graph_pool: object) -> None:
        self.table = CacheTable.empty(fused.model, 1)  # nothing is stored while it is captured
        self.ids_1S = torch.zeros(1, length, dtype=torch.int64, device=fused.model.device)
        self._replay = fused.capture(lambda: fused.encode(self.ids_1S, self.table, context), graph_pool)

    def run(self, ids_1S: Tensor, cache: KVCache) -> None:
        """Writes the tokens, which the cache counts already, into the cache."""
        count = ids_1S.shape[1]
        self.table.fill([cache], [count])
        self.ids_1S[:, :count] = ids_1S
        self._replay()


class LayerBucket:
    """The layers without the sampler as one graph, for requests that need the reference sampler."""

    def __init__(self, fused: FusedLayers, key: BucketKey, graph_pool: object) -> None:
        count, length, self.context = key
        model = fused.model
        self.fused = fused
        self.table = CacheTable.empty(model, count)
        self.ids_BC = torch.zeros(count, length, dtype=torch.int64, device=model.device)
        self.soft_BCD = torch.zeros(count, length, model.config.hidden_size, dtype=model.dtype, device=model.device)
        self.hidden_ND: Tensor | None = None
        self._replay = fused.capture(self._body, graph_pool)

    def _body(self) -> None:
        self.hidden_ND = self.fused.denoise(self.ids_BC, self.soft_BCD, self.table, self.context)

    def run(self, ids_BC: Tensor, soft_BCD: Tensor | None, caches: Sequence[KVCache]) -> Tensor:
        """Final hidden states [N, D]. The next run overwrites them."""
        rows, length = ids_BC.shape
        self.table.fill(caches)
        self.ids_BC[:rows] = ids_BC
        self.soft_BCD[:rows] = soft_BCD if soft_BCD is not None else 0.0
        self._replay()
        assert self.hidden_ND is not None
        return self.hidden_ND[: rows * length]
