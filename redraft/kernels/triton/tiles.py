"""Tile sizes that fit a card: the shared memory of a tile by formula, and the choice between tables of tiles.

A kernel with products has two tables at the top of its file: large tiles for cards with at least 200 KiB of shared memory
per block (H100, H200, B200), and small tiles that fit 99 KiB (RTX 3090, 4090, 5090). An A100 has 163 KiB; most large tiles
would fit, but their registers spill there, so it takes the small ones. The large tables are tuned on an H200. The small ones
are chosen by the formulas of this file and compiled without spills. Experts in 4 bits have one table: its tiles were the
fastest on an H200 and fit 99 KiB. This file does not import Triton.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from redraft.kernels.backend import KIB, Card

LARGE_LIMIT = 200 * KIB  # what the largest tile of the large tables needs
NO_LIMIT = 2**30  # the last key of a table

Table = TypeVar("Table")


class TileError(RuntimeError):
    """A tile needs more shared memory than the card has: a fault of a table, not of the user."""


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and launch options of a product: of a weight with tokens, or of attention.

    In attention the tokens are rows of queries, the features are the head size, and the summed axis are the keys.
    """

    tokens: int
    features: int  # rows of the weight
    inner: int  # the summed axis
    stages: int
    warps: int
    # Programs that share an expert's tokens: they run together and find its weights in the L2 cache. In attention: the most
    # programs that share the keys of a row.
    concurrent: int = 1
    # Experts: more tokens that a program takes along, as a second result, so that few tokens beyond a tile do not cost
    # another pass over the weight.
    rest: int = 0
    # Experts: the programs of one expert start together, so that they find its tokens in the L2 cache. Else programs of all
    # experts do.
    by_expert: bool = False

    def shared_memory(self, card: Card, weight_bytes: float, token_bytes: int) -> int:
        """Returns the bytes of shared memory of a product with a weight, for elements of these sizes.

        Buffers of weights and tokens, and later, in their place, the float32 result. Weights of fewer bytes than tokens are
        converted in registers: the stage in use is there, not in shared memory. On sm_100 the converted weights may pass
        through shared memory on their way to tensor memory.
        """
        is_converted = weight_bytes < token_bytes
        token_buffers = count_buffers(card, self.stages)
        weight_buffers = max(1, self.stages - 1) if is_converted else token_buffers
        weights = int(self.features * self.inner * weight_bytes) * weight_buffers
        tokens = (self.tokens + self.rest) * self.inner * token_bytes * token_buffers
        converted = self.features * self.inner * token_bytes if is_converted and card.has_tensor_memory else 0
        return max(weights + tokens + converted, self.tokens * self.features * 4)

    def fit(self, card: Card, weight_bytes: float, token_bytes: int) -> "Tiles":
        """Returns these tiles with as many stages as fit the card. Raises TileError where not even two do."""
        tiles = self
        while tiles.stages > 2 and tiles.shared_memory(card, weight_bytes, token_bytes) > card.shared_memory:
            tiles = replace(tiles, stages=tiles.stages - 1)
        check_fits(str(tiles), tiles.shared_memory(card, weight_bytes, token_bytes), card)
        return tiles


def count_buffers(card: Card, stages: int) -> int:
    """Returns how many stages of a pipelined product are in shared memory. With `mma.sync` one of them is in registers."""
    return stages if card.has_shared_products else max(1, stages - 1)


def check_fits(name: str, needed: int, card: Card) -> None:
    """Raises TileError instead of a launch that the card would refuse."""
    if needed > card.shared_memory:
        raise TileError(f"{name} needs {needed:,} bytes of shared memory per block, the card has {card.shared_memory:,}")


def select_table(card: Card, large: Table, small: Table) -> Table:
    """Returns the table that fits the card."""
    return large if card.shared_memory >= LARGE_LIMIT else small


def select_by_size(table: Mapping[int, Table], size: float) -> Table:
    """Returns the entry with the smallest key that is not below the size. Keys are in ascending order."""
    return next(entry for limit, entry in table.items() if size <= limit)


def describe_tiles(card: Card) -> str:
    """Says which tables are in use and why, for `redraft info`."""
    name = select_table(card, "large", "small")
    relation = "at least" if name == "large" else "less than"
    size = f"{card.shared_memory // KIB} KiB of shared memory per block"
    return f"{name}: sm_{card.architecture} with {size}, {relation} {LARGE_LIMIT // KIB}"
