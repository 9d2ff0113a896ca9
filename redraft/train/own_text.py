"""Own text: samples of a model's causal half, in large batches, as training data for drafts.

    corpus -> beginnings (1 to 48 tokens, or only the start token) -> batches of rows -> sampled texts -> JSON lines {"ids"}

Every row of a batch runs to the batch's end, and all rows have the same length at every step: a step is one forward of
static shape, which a CUDA graph replays (one graph for every 64 positions). While a row's beginning lasts, its tokens
replace the sampled ones. Records hold tokens, not text: tokenizing a sampled text again could give other tokens than the
model wrote.
Shapes: B rows, T positions, G key-value heads, K head size, V vocabulary.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from redraft.config import BackboneConfig, replace_file
from redraft.kernels.backend import select_backend
from redraft.model.backbone import Backbone
from redraft.model.llama import Llama
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.documents import crop_text
from redraft.train.records import BadRecord, DataConfig, read_shuffled

BEGINNING_CHARACTERS = 400  # of a document that are tokenized: more than the longest beginning needs
WIDTH = 64  # a step attends to the first slots of the cache, a multiple of this many
CHECK_EVERY = 32  # steps between two looks at how many rows have ended, each of which makes the GPU wait


@dataclass(frozen=True, kw_only=True)
class OwnTextConfig:
    """How own text is sampled."""

    tokens: int = 20_000_000  # to write
    rows: int = 2048  # of a batch
    length: int = 512  # most tokens of a text, beginning and start token included
    temperatures: tuple[float, ...] = (0.5, 0.7, 1.0)  # drawn for each row
    bare_share: float = 0.25  # share of the rows that begin with only the start token
    longest_beginning: int = 48
    most_repeats: int = 6  # texts with a 4-gram that occurs more often are dropped
    ended_share: float = 0.97  # a batch ends when this share of its rows has ended; the others are cut
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.rows, self.most_repeats, self.longest_beginning) < 1:
            raise ValueError("tokens, rows, most_repeats and longest_beginning must be at least 1")
        if self.length <= self.longest_beginning + 1:
            raise ValueError(f"texts of {self.length} tokens have no room behind beginnings of {self.longest_beginning}")
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ValueError(f"temperatures must be above 0, got {self.temperatures!r}")


# 1. A cache of fixed shape


class FixedCache:
    """Keys and values of rows of equal length, at fixed addresses: its length is a tensor, so that a step can be captured.

    It has the methods of `kv_cache.ContextCache` that `encode` calls. Views hold the first `width` slots; positions tell
    which of them are empty.
    """

    has_equal_lengths = True
    adapters = ()

    def __init__(self, config: BackboneConfig, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = capacity
        self.slot_1T = torch.arange(capacity, device=device)[None]
        self.length_11 = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.layers = []
        for layer in range(config.num_hidden_layers):
            shape = (rows, capacity, *config.layer_heads(layer))
            self.layers.append(
                (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            )

    @property
    def lengths_B(self) -> Tensor:
        """Cached tokens, the same for all rows."""
        return self.length_11[0]

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens, [1, count]."""
        return self.length_11 + torch.arange(count, device=self.length_11.device)

    def key_positions(self, layer: int) -> Tensor:
        """Positions of the slots, [1, T]; -1 where a slot is empty."""
        slot_1T = self.slot_1T[:, : self.width]
        return torch.where(slot_1T < self.length_11, slot_1T, -1)

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first slots [B, T, G, K]."""
        keys_BTGK, values_BTGK = self.layers[layer]
        return keys_BTGK[:, : self.width], values_BTGK[:, : self.width]

    def append(self, layer: int, k_BSGK: Tensor, v_BSGK: Tensor, counts: Sequence[int]) -> None:
        """Writes one new token of each row."""
        for cached_BTGK, new_BSGK in zip(self.layers[layer], (k_BSGK, v_BSGK), strict=True):
            cached_BTGK.index_copy_(1, self.length_11[0], new_BSGK)

    def advance(self, counts: Sequence[int]) -> None:
        """Adds the token to the context."""
        self.length_11 += 1


class FusedEncoder:
    """Encodes one token of each row on the engine's kernels, which read and write the cache in place.

    `Backbone.encode` would copy the whole cache in each layer, to attend to the new token beside it.
    """

    def __init__(self, model: Llama, cache: FixedCache) -> None:
        from redraft.engine.cache_table import CacheTable  # Triton takes long to import
        from redraft.engine.fused_llama import FusedLlama

        self.fused = FusedLlama(model, canvases=False)
        self.cache = cache
        rows, capacity = cache.layers[0][0].shape[:2]
        self.table = CacheTable.empty(model, rows)
        self.table.sizes_LB.fill_(capacity)
        self.table.counts_B.fill_(1)
        base = self.table.base
        row_B = torch.arange(rows, device=model.device)
        for layer, tensors in enumerate(cache.layers):
            for offsets_LB, tensor in zip((self.table.keys_LB, self.table.values_LB), tensors, strict=True):
                first = (tensor.data_ptr() - base.data_ptr()) // base.element_size()
                offsets_LB[layer] = first + row_B * tensor.stride(0)

    def __call__(self, ids_B1: Tensor) -> Tensor:
        """Final hidden states [B, D]."""
        self.table.lengths_B.copy_(self.cache.lengths_B)
        hidden_BD, _ = self.fused.joint(ids_B1, self.table, None, self.table, self.cache.width)
        self.cache.advance([1])
        return hidden_BD


def make_encoder(model: Backbone, cache: FixedCache) -> Callable[[Tensor], Tensor]:
    """What encodes one token of each row, by the device and the architecture."""
    if isinstance(model, Llama) and select_backend(model.device).uses_triton:
        from redraft.engine.fused_llama import can_fuse  # Triton takes long to import

        if can_fuse(model):
            return FusedEncoder(model, cache)
    return lambda ids_B1: model.encode(ids_B1, cache)[:, 0]


# 2. Beginnings


def read_beginnings(data: DataConfig, tokenizer: Tokenizer, cfg: OwnTextConfig) -> Iterator[list[int]]:
    """Yields beginnings without end: the start token and 1 to `longest_beginning` tokens of a document, or none of them.

    Documents come from the sources by share, each starting at a random line as often as the source says.
    """
    rng = random.Random(f"own text {cfg.seed}")
    start_ids = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    texts_of = [_read_texts(data, number, rng) for number in range(len(data.sources))]
    shares = [source.share for source in data.sources]
    while True:
        count = 256
        chosen = rng.choices(range(len(texts_of)), shares, k=count)
        texts = [next(texts_of[number])[:BEGINNING_CHARACTERS] for number in chosen]
        for encoding in tokenizer.vocabulary.encode_batch(texts, add_special_tokens=False):
            if rng.random() < cfg.bare_share and start_ids:
                yield list(start_ids)
                continue
            ids = encoding.ids[:-1] or encoding.ids  # the last token may have been cut in the middle of a word
            yield start_ids + ids[: rng.randint(1, cfg.longest_beginning)]


def _read_texts(data: DataConfig, number: int, rng: random.Random) -> Iterator[str]:
    source = data.sources[number]
    epoch = 0
    while True:
        found = False
        for _, record in read_shuffled(data, source, epoch):
            record = crop_text(record, source, rng)
            if not isinstance(record, BadRecord) and isinstance(record.get("text"), str) and record["text"]:
                found = True
                yield record["text"]
        if not found:
            raise ValueError(f"there is no text in {', '.join(source.files)}")
        epoch += 1


# 3. Sampling


class OwnTextSampler:
    """Samples batches of texts. On a GPU captured steps are replayed, one graph for each width of the cache."""

    @torch.no_grad()
    def __init__(self, model: Backbone, cfg: OwnTextConfig, stops: Sequence[int] | None = None) -> None:
        """`stops` are the tokens that end a text; without them, those of the model's configuration."""
        self.model = model
        self.cfg = cfg
        self.device = model.device
        shape = (cfg.rows, cfg.length)
        self.cache = FixedCache(model.config, cfg.rows, cfg.length, model.dtype, self.device)
        self.encode = make_encoder(model, self.cache)
        self.ids_BT = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.given_BT = torch.zeros(shape, dtype=torch.bool, device=self.device)  # tokens of the beginnings
        self.ended_B = torch.zeros(cfg.rows, dtype=torch.bool, device=self.device)
        self.temperature_B1 = torch.ones(cfg.rows, 1, device=self.device)
        self.exponential_BV = torch.ones(cfg.rows, model.config.vocab_size, device=self.device)
        self.stop_ids = torch.tensor(model.config.eos_token_ids if stops is None else stops, device=self.device)
        self.graphs: dict[int, Callable[[], None]] = {}
        if self.device.type == "cuda" and model.dtype == torch.bfloat16:  # in float32, experts copy counts to the host
            self._capture_steps()

    def _step(self) -> None:
        """Encodes the tokens at the cache's length and writes the next ones, sampled or given."""
        now_1 = self.cache.length_11[0].clone()
        hidden_BD = self.encode(self.ids_BT.index_select(1, now_1))
        probs_BV = torch.softmax(self.model.head(hidden_BD) / self.temperature_B1, dim=-1)
        # The largest of probabilities over exponential numbers falls on a token with its probability.
        sampled_B = (probs_BV / self.exponential_BV.clamp(min=1e-20)).argmax(dim=-1)
        given_B = self.given_BT.index_select(1, now_1 + 1)[:, 0]
        next_B = torch.where(given_B, self.ids_BT.index_select(1, now_1 + 1)[:, 0], sampled_B)
        self.ids_BT.index_copy_(1, now_1 + 1, next_B[:, None])
        self.ended_B |= torch.isin(next_B, self.stop_ids) & ~given_B

    def _run_step(self, position: int) -> None:
        """Runs the step that reads the token at `position`, by its graph if there is one."""
        self.cache.width = min(self.cfg.length, -(-(position + 1) // WIDTH) * WIDTH)
        self.exponential_BV.exponential_()  # outside the graph: a capture that fails may break the random generator
        self.graphs.get(self.cache.width, self._step)()

    def _capture_steps(self) -> None:
        """Captures the step at each width as a CUDA graph. Where that fails, steps are launched kernel by kernel."""
        pool = torch.cuda.graph_pool_handle()
        try:
            for width in range(WIDTH, self.cfg.length + WIDTH, WIDTH):
                self.cache.width = min(width, self.cfg.length)
                self.cache.length_11.zero_()
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # libraries allocate their workspaces at a first call, before the capture
                    self._step()
                    self._step()
                torch.cuda.current_stream().wait_stream(stream)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self._step()
                self.graphs[self.cache.width] = graph.replay
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.graphs.clear()
            print(f"own text: no CUDA graph ({str(error).splitlines()[0]}); steps are launched one by one", flush=True)

    def sample(self, beginnings: Sequence[Sequence[int]], temperatures: Sequence[float]) -> list[list[int]]:
        """Returns a text for each beginning, without the start token. A stop token ends it; texts that loop are dropped."""
        start = self.model.config.bos_token_id
        rows = [ids for ids in self.sample_rows(beginnings, temperatures) if ids is not None]
        texts = [ids[1:] if ids[0] == start else ids for ids in rows]
        return [text for text in texts if len(text) > 1]

    @torch.no_grad()
    def sample_rows(self, beginnings: Sequence[Sequence[int]], temperatures: Sequence[float]) -> list[list[int] | None]:
        """Returns each beginning with what the model writes behind it, up to a stop token; None for a text that loops."""
        cfg = self.cfg
        lengths = [len(ids) for ids in beginnings]
        padded = [[*ids, *[0] * (cfg.length - len(ids))] for ids in beginnings]
        length_B1 = torch.tensor(lengths, device=self.device)[:, None]
        self.ids_BT.copy_(torch.tensor(padded, device=self.device))
        self.given_BT.copy_(torch.arange(cfg.length, device=self.device) < length_B1)
        self.temperature_B1.copy_(torch.tensor(temperatures, device=self.device)[:, None])
        self.ended_B.zero_()
        self.cache.length_11.zero_()
        written = 1
        while written < cfg.length:
            self._run_step(written - 1)
            written += 1
            if written % CHECK_EVERY == 0 and float(self.ended_B.float().mean()) >= cfg.ended_share:
                break
        return self._collect(length_B1, written)

    def _collect(self, length_B1: Tensor, written: int) -> list[list[int] | None]:
        """Cuts the rows at their stop tokens."""
        ids_BT = self.ids_BT[:, :written]
        index_T = torch.arange(written, device=self.device)
        is_stop_BT = torch.isin(ids_BT, self.stop_ids) & (index_T >= length_B1)
        end_B = torch.where(is_stop_BT, index_T + 1, written).amin(dim=1)
        loops_B = find_loops(ids_BT, end_B, self.cfg.most_repeats)
        rows = zip(ids_BT.tolist(), end_B.tolist(), loops_B.tolist(), strict=True)
        return [None if loops else ids[:end] for ids, end, loops in rows]


def find_loops(ids_BT: Tensor, end_B: Tensor, most_repeats: int) -> Tensor:
    """Whether a 4-gram occurs more than `most_repeats` times among the first `end` tokens of a row."""
    grams = ids_BT.shape[1] - 3
    if grams <= most_repeats:
        return torch.zeros_like(end_B, dtype=torch.bool)
    code_BN = torch.zeros_like(ids_BT[:, :grams])
    for offset in range(4):
        code_BN = code_BN * 1_000_003 + ids_BT[:, offset : offset + grams]  # a hash: whole numbers wrap around
    index_N = torch.arange(grams, device=ids_BT.device)
    code_BN = torch.where(index_N + 4 <= end_B[:, None], code_BN.abs(), -1 - index_N)  # behind the end all are different
    sorted_BN = code_BN.sort(dim=1).values
    return (sorted_BN[:, most_repeats:] == sorted_BN[:, : grams - most_repeats]).any(dim=1)


# 4. Files


def write_own_text(
    model: Backbone, tokenizer: Tokenizer, data: DataConfig, path: Path, cfg: OwnTextConfig, max_seconds: float = 1e9
) -> dict[str, float]:
    """Samples texts until `cfg.tokens` tokens are written, or until the time is over. Returns counts and the speed.

    `data` gives the corpus whose documents begin the texts. The file appears as a whole.
    """
    torch.manual_seed(cfg.seed)
    rng = random.Random(f"own text temperatures {cfg.seed}")
    beginnings = read_beginnings(data, tokenizer, cfg)
    sampler = OwnTextSampler(model, cfg)
    start_time = time.perf_counter()
    tokens = 0
    texts = 0
    sampled = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        while tokens < cfg.tokens and (not texts or time.perf_counter() - start_time < max_seconds):
            temperatures = [rng.choice(cfg.temperatures) for _ in range(cfg.rows)]
            batch = sampler.sample([next(beginnings) for _ in range(cfg.rows)], temperatures)
            sampled += cfg.rows
            if not batch and not texts:
                raise ValueError("every text of the first batch loops: this model has nothing to learn from its own text")
            for ids in batch:
                file.write(json.dumps({"ids": ids}, separators=(",", ":")) + "\n")
                tokens += len(ids)
                texts += 1
    seconds = time.perf_counter() - start_time
    return {"tokens": tokens, "texts": texts, "dropped": sampled - texts, "tokens_per_second": tokens / seconds}
