"""CacheTable: where the KV caches of a batch are in memory; and TokenGroup: new tokens of a batch.

The kernels read KV caches by address, so the caches of a batch are not copied together, and a CUDA graph reads other caches
when its table is filled again.
Shapes: B requests, S new tokens of each, N = B * S, L layers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.diffusion.draft_tree import DraftTree
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.kernels.triton import attention
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache

UNLIMITED = 2**30  # tokens: more than any request has


@dataclass(frozen=True)
class CacheTable:
    """Addresses and lengths of the KV caches of a batch, for the kernels. Filled in place, so a CUDA graph can read it."""

    keys_LB: Tensor  # as in `attention.KVLocations`: element offsets from `base`
    values_LB: Tensor
    sizes_LB: Tensor  # slots
    lengths_B: Tensor  # tokens
    counts_B: Tensor  # how many of the new tokens are real and are stored
    base: Tensor  # one slot of memory; rows without a request point to it

    @classmethod
    def empty(cls, model: Backbone, rows: int, base: Tensor | None = None) -> "CacheTable":
        """A table for so many requests. Tables with the same `base` may copy addresses from one another."""
        config = model.config
        layers = config.num_hidden_layers
        device = model.device
        base_dtype = torch.uint8 if model.cache_dtype == FP8_DTYPE else model.cache_dtype
        slot_size = max(math.prod(config.layer_heads(layer)) for layer in range(layers))
        return cls(
            keys_LB=torch.zeros(layers, rows, dtype=torch.int64, device=device),
            values_LB=torch.zeros(layers, rows, dtype=torch.int64, device=device),
            sizes_LB=torch.ones(layers, rows, dtype=torch.int32, device=device),
            lengths_B=torch.zeros(rows, dtype=torch.int32, device=device),
            counts_B=torch.zeros(rows, dtype=torch.int32, device=device),
            base=torch.zeros(slot_size, dtype=base_dtype, device=device) if base is None else base,
        )

    def fill(self, caches: Sequence[KVCache], counts: Sequence[int] | None = None) -> None:
        """Writes the addresses of caches of one row each. The remaining rows have an empty context.

        `counts` are the numbers of tokens that each cache counts already but does not hold yet: the new tokens are these.
        Without `counts`, the new tokens come after everything that the caches count.
        """
        layers = len(self.keys_LB)
        base_address = self.base.data_ptr()
        item_size = self.base.element_size()
        places = [cache.slot_addresses for cache in caches]
        unused = ([base_address] * layers, [base_address] * layers, [1] * layers)
        places += [unused] * (self.lengths_B.numel() - len(caches))
        keys, values, sizes = (torch.tensor(column).t() for column in zip(*places, strict=True))
        self.keys_LB.copy_((keys - base_address) // item_size)
        self.values_LB.copy_((values - base_address) // item_size)
        self.sizes_LB.copy_(sizes)
        missing = counts if counts is not None else [0] * len(caches)
        lengths = [cache.lengths[0] - count for cache, count in zip(caches, missing, strict=True)]
        stored = counts if counts is not None else [UNLIMITED] * len(caches)
        padding = [0] * (self.lengths_B.numel() - len(caches))
        self.lengths_B.copy_(torch.tensor([*lengths, *padding], dtype=torch.int32))
        self.counts_B.copy_(torch.tensor([*stored, *padding], dtype=torch.int32))

    def behind_each_(self, clean: "CacheTable") -> None:
        """Becomes the table of canvases behind S clean tokens of each row: canvas j has j + 1 clean tokens before it.

        It has fewer where the row has fewer: kernels must not read slots that are not there.
        """
        assert self.base is clean.base, "addresses are relative to the base"
        rows = clean.lengths_B.numel()
        count = self.lengths_B.numel() // rows
        for name in ("keys_LB", "values_LB", "sizes_LB"):
            getattr(self, name).view(-1, rows, count).copy_(getattr(clean, name)[:, :, None])
        offsets_S = torch.arange(1, count + 1, dtype=torch.int32, device=self.lengths_B.device)
        before_BS = torch.minimum(offsets_S, clean.counts_B[:, None])
        self.lengths_B.view(rows, count).copy_(clean.lengths_B[:, None] + before_BS)

    def behind_tree_(self, clean: "CacheTable") -> None:
        """Becomes the table of canvases behind the nodes of a tree: all nodes are before them, and they see their path."""
        self.behind_each_(clean)
        rows = clean.lengths_B.numel()
        self.lengths_B.view(rows, -1).copy_((clean.lengths_B + clean.counts_B)[:, None])

    def past(self, layer: int) -> attention.KVLocations:
        """The rows of one layer, as its attention kernel takes them."""
        return attention.KVLocations(
            self.base, self.keys_LB[layer], self.values_LB[layer], self.sizes_LB[layer], self.lengths_B, self.counts_B
        )


@dataclass(frozen=True)
class TreeTensors:
    """The shape of a tree of drafts on the device. N nodes, D depth."""

    visible_N: Tensor  # int64: bit m of entry n says that node n attends to node m
    depths_N: Tensor
    parents_N: Tensor  # 0 for the root
    paths_ND: Tensor  # the nodes of each path behind the root, padded with d + 1 in column d: that slot stays where it is

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device) -> "TreeTensors":
        """The tensors of a tree."""
        steps = range(1, tree.depth + 1)
        paths = [[path[step] if step < len(path) else step for step in steps] for path in tree.paths]
        columns = (tree.visible, tree.depths, [max(0, parent) for parent in tree.parents], paths)
        return cls(*(torch.tensor(column, device=device) for column in columns))

    def positions(self, group: "TokenGroup") -> Tensor:
        """The position of each token: a node's is its depth behind the cached tokens, its canvas begins one later."""
        lengths_B1 = group.table.lengths_B[:, None]
        if group.is_causal:
            return (lengths_B1 + self.depths_N).flatten()
        nodes = len(self.depths_N)
        depth_BN1 = self.depths_N.repeat(len(lengths_B1) // nodes)[:, None] + 1 - nodes
        return (lengths_B1 + depth_BN1 + torch.arange(group.x_BSD.shape[1], device=lengths_B1.device)).flatten()


@dataclass(frozen=True)
class TokenGroup:
    """New tokens of a batch on their way through the layers."""

    x_BSD: Tensor
    table: CacheTable  # their contexts
    is_causal: bool

    @property
    def count(self) -> int:
        """The number of tokens."""
        return self.x_BSD.shape[0] * self.x_BSD.shape[1]

    @property
    def positions_N(self) -> Tensor:
        """The position of each token in its request."""
        return (self.table.lengths_B[:, None] + torch.arange(self.x_BSD.shape[1], device=self.x_BSD.device)).flatten()
