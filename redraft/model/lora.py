"""LoRA adapters: low-rank additions to the matrices of a model, whose own weights stay as they are.

A pair of small matrices adds b(a(x)) to the output of one matrix. An Adapter holds the pairs of a model. Its two halves,
`encode` and `denoise`, share every weight of the model; an adapter may have the same pairs in both, pairs of their own, or
pairs in one of them. ActiveAdapters says which adapter holds for which tokens of a forward, so that requests with different
adapters share it. Files are read and written by `checkpoint/adapter_files.py`.
Shapes: B rows, S tokens, N tokens of all rows, D model size, E experts, R rank, I inputs, O outputs of a matrix.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.config import SLIDING, BackboneConfig, ConfigError, ModelConfig
from redraft.kernels import NO_ADAPTER, ExpertAdapter, LowRank
from redraft.model.moe import Routing

ENCODE, DENOISE = HALVES = ("encode", "denoise")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
SELF_CONDITIONING = tuple(f"self_conditioning.{part}_proj" for part in ("gate", "up", "down"))
MODULES = {"attention": ATTENTION, "dense": DENSE, "experts": EXPERTS}  # of a layer, by the target that names them


TARGETS = ("attention", "dense", "experts", "self_conditioning")
LARGEST_RANK = 4096
LARGEST_ALPHA = 1_000_000  # more would only overflow


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter: which matrices get a pair of small ones, and how small they are."""

    rank: int = 16
    alpha: float = 32.0  # the pairs' sum is scaled by alpha / rank
    dropout: float = 0.0  # of the inputs of pairs, in training; experts have none
    targets: tuple[str, ...] = ("attention", "dense")  # of TARGETS
    layers: tuple[int, ...] | None = None  # None: all
    halves: str = "both"  # "encode" or "denoise": only that half of the model
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank) instead (rsLoRA)

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= LARGEST_RANK:
            raise ConfigError(f"rank must be between 1 and {LARGEST_RANK}, got {self.rank!r}")
        if not 0 < self.alpha <= LARGEST_ALPHA:
            raise ConfigError(f"alpha must be above 0 and at most {LARGEST_ALPHA:,}, got {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is a share from 0 to below 1, got {self.dropout!r}")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            known = ", ".join(TARGETS)
            raise ConfigError(
                f"there is no target {unknown[0]!r}; known are {known}" if unknown else f"give targets: {known}"
            )
        if self.layers is not None and (not self.layers or min(self.layers) < 0):
            raise ConfigError(f"layers are numbers from 0 on, got {self.layers}")
        if self.halves not in ("both", "encode", "denoise"):
            raise ConfigError(f"halves is both, encode or denoise, got {self.halves!r}")

    @property
    def scale(self) -> float:
        """The factor of the pairs."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilized else self.rank)


class AdapterError(ValueError):
    """An adapter cannot be used. The message says why and, where there is one, the way out."""


class MatrixShape(NamedTuple):
    """The shape of a matrix, or of a stack of them, one for each expert."""

    outputs: int
    inputs: int
    experts: int | None = None


def adaptable_matrices(config: BackboneConfig) -> dict[str, MatrixShape]:
    """Every matrix that an adapter can reach, by its name in the model."""
    size = config.hidden_size
    inner = config.intermediate_size
    shapes: dict[str, MatrixShape] = {}
    for layer in range(config.num_hidden_layers):
        kv_heads, head_dim = config.layer_heads(layer)
        queries = config.num_attention_heads * head_dim
        keys = kv_heads * head_dim
        of_layer = dict(zip(ATTENTION, ((queries, size), (keys, size), (keys, size), (size, queries)), strict=True))
        if isinstance(config, ModelConfig) and config.layer_types[layer] != SLIDING:
            del of_layer["self_attn.v_proj"]  # full layers use their keys as values
        of_layer |= dict(zip(DENSE, ((inner, size), (inner, size), (size, inner)), strict=True))
        shapes |= {f"layers.{layer}.{name}": MatrixShape(*shape) for name, shape in of_layer.items()}
        if isinstance(config, ModelConfig):
            expert_size = config.moe_intermediate_size
            of_experts = ((2 * expert_size, size, config.num_experts), (size, expert_size, config.num_experts))
            shapes |= {f"layers.{layer}.{n}": MatrixShape(*shape) for n, shape in zip(EXPERTS, of_experts, strict=True)}
    if isinstance(config, ModelConfig) and not config.is_causal_only:
        of_conditioning = ((inner, size), (inner, size), (size, inner))
        shapes |= {name: MatrixShape(*shape) for name, shape in zip(SELF_CONDITIONING, of_conditioning, strict=True)}
    return shapes


def select_matrices(cfg: AdapterConfig, config: BackboneConfig) -> list[str]:
    """The matrices that a new adapter of this configuration gets pairs for."""
    layers = range(config.num_hidden_layers) if cfg.layers is None else cfg.layers
    missing = [layer for layer in layers if layer >= config.num_hidden_layers]
    if missing:
        raise AdapterError(f"there is no layer {missing[0]}: the model has layers 0 to {config.num_hidden_layers - 1}")
    parts = [module for target in cfg.targets if target in MODULES for module in MODULES[target]]
    wished = {f"layers.{layer}.{part}" for layer in layers for part in parts}
    if "self_conditioning" in cfg.targets:
        wished |= set(SELF_CONDITIONING)
    return [name for name in adaptable_matrices(config) if name in wished]


class LoraPair(nn.Module):
    """The addition to one matrix, [R, I] and [O, R], or to each expert's matrix, [E, R, I] and [E, O, R]."""

    def __init__(self, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)
        self.scale = scale
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """What is added to the matrix's product with x, in its precision. Dropout is active in training only."""
        if self.training and self.dropout:
            x = F.dropout(x, self.dropout)
        return F.linear(F.linear(x, self.a.to(x.dtype)) * self.scale, self.b.to(x.dtype))

    def low_rank(self, dtype: torch.dtype) -> LowRank:
        """The pair of a stack of experts, as the experts' kernel takes it."""
        return LowRank(self.a.to(dtype), (self.b * self.scale).to(dtype))

    def delta(self) -> Tensor:
        """The sum that merging adds to the weight, float32, [O, I] or [E, O, I]."""
        return (self.b.float() @ self.a.float()) * self.scale


class Adapter(nn.Module):
    """The pairs of one adapter. `pair` finds the one of a matrix in a half."""

    def __init__(self, pairs: Mapping[tuple[str, str], LoraPair], cfg: AdapterConfig, name: str = "adapter") -> None:
        """`pairs` are by half and matrix. A pair that stands for both halves is the same object twice."""
        super().__init__()
        self.cfg = cfg
        self.name = name
        self.metadata: dict[str, Any] = {}  # of its file: base, data, scores
        self._pairs = dict(pairs)
        self._trees: dict[str, dict[str, Any]] = {half: {} for half in HALVES}
        for (half, matrix), pair in self._pairs.items():
            *modules, last = matrix.split(".")
            branch = self._trees[half]
            for module in modules:
                branch = branch.setdefault(module, {})
            branch[last] = pair
        unique = {id(pair): (half, matrix, pair) for (half, matrix), pair in reversed(self._pairs.items())}
        # Module names have no dots.
        self.modules_by_name = nn.ModuleDict({f"{h}/{m}".replace(".", "/"): p for h, m, p in reversed(unique.values())})

    def pair(self, half: str, matrix: str) -> LoraPair | None:
        """The pair of a matrix, or None: nothing is added there."""
        return self._pairs.get((half, matrix))

    def tree(self, half: str) -> Mapping[str, Any]:
        """The pairs of a half by the modules of the model, nested: tree["layers"]["0"]["self_attn"]["q_proj"]."""
        return self._trees[half]

    def pairs(self) -> Iterator[tuple[str, str, LoraPair]]:
        """All pairs as (half, matrix, pair). A pair that stands for both halves comes twice."""
        for (half, matrix), pair in self._pairs.items():
            yield half, matrix, pair

    @property
    def is_tied(self) -> bool:
        """Whether both halves have the same pairs, so that the adapter can be merged into the weights they share."""
        return all(
            matrix in SELF_CONDITIONING or self._pairs.get((ENCODE, matrix)) is self._pairs.get((DENOISE, matrix))
            for _, matrix in self._pairs
        )

    @property
    def parameter_count(self) -> int:
        """Trainable numbers; a pair of both halves counts once."""
        return sum(p.numel() for p in self.parameters())


def new_adapter(cfg: AdapterConfig, config: BackboneConfig, seed: int = 0) -> Adapter:
    """An untrained adapter for a diffusion model, or for the causal half of any model."""
    if config.is_causal_only and cfg.halves != ENCODE:
        raise AdapterError("a causal-only model has no denoiser to adapt: train with a diffusion model")
    return untrained_adapter(cfg, config, seed)


def untrained_adapter(cfg: AdapterConfig, config: BackboneConfig, seed: int = 0) -> Adapter:
    """Pairs of which a is random and b is zero, so that they change nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    shapes = adaptable_matrices(config)
    pairs: dict[tuple[str, str], LoraPair] = {}
    for matrix in select_matrices(cfg, config):
        outputs, inputs, experts = shapes[matrix]
        stack = () if experts is None else (experts,)
        # As peft: uniform with the standard deviation of Kaiming's initialization with a = sqrt(5).
        a = (2 * torch.rand(*stack, cfg.rank, inputs, generator=generator) - 1) / math.sqrt(inputs)
        dropout = cfg.dropout if experts is None else 0.0  # a stack's pairs have none, as in peft
        pair = LoraPair(a, torch.zeros(*stack, outputs, cfg.rank), cfg.scale, dropout)
        halves = (DENOISE,) if matrix in SELF_CONDITIONING else HALVES if cfg.halves == "both" else (cfg.halves,)
        pairs |= {(half, matrix): pair for half in halves}
    if not pairs:
        raise AdapterError(f"targets {', '.join(cfg.targets)} name no matrix of this model")
    return Adapter(pairs, cfg)


class Span(NamedTuple):
    """Tokens of a forward, and the pairs that hold for them, by module as in `Adapter.tree`."""

    pairs: Mapping[str, Any]
    rows: slice | list[int]
    tokens: slice


EVERYTHING = slice(None)


@dataclass(frozen=True)
class ActiveAdapters:
    """The adapters of a forward, seen from one module. All layers of a kind see the same, so one graph serves them."""

    spans: tuple[Span, ...]

    def at(self, module: str) -> "ActiveAdapters":
        """The same adapters, seen from a module inside this one."""
        return ActiveAdapters(tuple(span._replace(pairs=span.pairs.get(module, {})) for span in self.spans))

    def add(self, module: str, x_BSI: Tensor, y_BSO: Tensor) -> Tensor:
        """Returns y, the output of a linear module for x, with what the adapters add to it. May change y in place."""
        for span in self.spans:
            pair = span.pairs.get(module)
            if pair is None:
                continue
            if span.rows == EVERYTHING and span.tokens == EVERYTHING:
                y_BSO = y_BSO + pair(x_BSI)
            else:
                where = (span.rows, span.tokens)
                y_BSO[where] = y_BSO[where] + pair(x_BSI[where])
        return y_BSO

    def run_experts(self, experts: nn.Module, x_ND: Tensor, routing: Routing, shape: torch.Size) -> Tensor:
        """Runs a layer's experts, each span's tokens with its pairs. `shape` is [B, S, ...] of the tokens."""
        with_pairs = [span for span in self.spans if span.pairs]
        if not with_pairs:
            return experts(x_ND, routing.experts_NK, routing.weights_NK)
        if with_pairs[0].rows == EVERYTHING and with_pairs[0].tokens == EVERYTHING:
            return experts(x_ND, routing.experts_NK, routing.weights_NK, _expert_adapter(with_pairs[0], x_ND.dtype))
        numbers_BS = torch.arange(len(x_ND), device=x_ND.device).view(shape[:2])
        plain_N = torch.ones(len(x_ND), dtype=torch.bool, device=x_ND.device)
        parts = []
        for span in with_pairs:
            where_M = numbers_BS[span.rows, span.tokens].flatten()
            plain_N[where_M] = False
            parts.append((where_M, _expert_adapter(span, x_ND.dtype)))
        y_ND = torch.zeros_like(x_ND)
        for where_M, of_experts in [(plain_N.nonzero().squeeze(1), NO_ADAPTER), *parts]:
            if len(where_M):
                mixed_MD = experts(x_ND[where_M], routing.experts_NK[where_M], routing.weights_NK[where_M], of_experts)
                y_ND = y_ND.index_copy(0, where_M, mixed_MD)
        return y_ND


def _expert_adapter(span: Span, dtype: torch.dtype) -> ExpertAdapter:
    """The pairs of a layer's two stacks of experts, as the experts' kernel takes them."""
    pairs = (span.pairs.get(name) for name in ("gate_up_proj", "down_proj"))
    return ExpertAdapter(*(None if pair is None else pair.low_rank(dtype) for pair in pairs))


def adapters_of_rows(adapters: Sequence[Adapter | None], halves: Iterable[tuple[str, slice]] = ()) -> ActiveAdapters | None:
    """The adapters of a forward in which each row has its own; None if no row has one.

    `halves` are the tokens that run through each half of the model.
    """
    distinct = {id(adapter): adapter for adapter in adapters if adapter is not None}
    if not distinct:
        return None
    spans = []
    for adapter in distinct.values():
        rows = [row for row, each in enumerate(adapters) if each is adapter]
        has_all_rows = len(rows) == len(adapters)
        spans += [Span(adapter.tree(half), EVERYTHING if has_all_rows else rows, tokens) for half, tokens in halves]
    return ActiveAdapters(tuple(spans))
