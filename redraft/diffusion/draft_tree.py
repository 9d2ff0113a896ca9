"""DraftTree: several drafts for a position, so that one of them is more often what the causal half picks.

Node 0 is the root, the token before the cursor. Every other node is a draft for the position behind its parent. Of the
drafts there, rank 0 has the highest logit plus Gumbel noise, rank 1 the second highest. A path from the root is a draft of
several tokens. The shape of a tree is fixed, its tokens are not.

    x ---- a0 ---- b0 ---- c0        x: root; a0, a1, a2: ranks 0 to 2 behind it
      \\        \\-- b1
       \\-- a1 ---- b0'              verified: x, then the one path whose tokens are all picked
        \\-- a2
"""

import heapq
from dataclasses import dataclass
from functools import cached_property

from redraft.model.backbone import Backbone

NODES = 32  # of the tree that the engine verifies, root included: with canvases of 6 behind them, 32 * 7 positions
DEPTH = 5  # of that tree, at most: every level is one more run of the draft head and the model's head
# How often the draft of each rank is right, about: the drafter of SmolLM2 at temperatures 0.7 and 1, on its own answers.
CHANCES = (0.62, 0.13, 0.07, 0.045, 0.03, 0.02, 0.015, 0.012)


@dataclass(frozen=True)
class DraftTree:
    """The shape of a tree. Parents come before their children."""

    parents: tuple[int, ...]  # of each node; the root has none, -1
    ranks: tuple[int, ...]  # of each node among its parent's drafts; 0 for the root

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Steps from the root to each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The nodes from the root to each node, both included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents[1:], 1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def visible(self) -> tuple[int, ...]:
        """For each node, as bits, the nodes that it attends to: those of its path."""
        return tuple(sum(1 << node for node in path) for path in self.paths)

    @cached_property
    def lines(self) -> tuple[tuple[int, ...], ...]:
        """The path of each node, and behind it the likeliest drafts: the nodes of rank 0."""
        likeliest = {parent: node for node, parent in enumerate(self.parents) if node and not self.ranks[node]}
        lines = []
        for path in self.paths:
            line = list(path)
            while line[-1] in likeliest:
                line.append(likeliest[line[-1]])
            lines.append(tuple(line))
        return tuple(lines)

    @property
    def depth(self) -> int:
        """The most drafts of a path."""
        return max(self.depths)

    def __len__(self) -> int:
        return len(self.parents)

    def level(self, depth: int) -> list[int]:
        """The nodes at a depth."""
        return [node for node, at in enumerate(self.depths) if at == depth]


def choose_tree(model: Backbone) -> DraftTree | None:
    """The tree that a model's drafts are verified in, if it has a drafter. Windows would have to be cut along the path."""
    has_windows = any(model.config.layer_window(layer) is not None for layer in range(model.config.num_hidden_layers))
    if model.drafter is None or has_windows:
        return None
    return engine_tree(model.drafter.cfg.canvas_length)


def engine_tree(canvas_length: int) -> DraftTree:
    """The tree that the engine verifies, where a drafter was trained on canvases of this length.

    The first position of a canvas is no draft, so a tree is at most one less deep.
    """
    return grow_tree(NODES, min(DEPTH, canvas_length - 1))


def grow_tree(nodes: int, depth: int) -> DraftTree:
    """The tree of so many nodes and at most this depth whose drafts are accepted most often, by CHANCES."""
    parents, ranks = [-1], [0]
    waiting: list[tuple[float, int, int, int]] = []  # chance (negative), parent, rank, depth

    def offer(parent: int, rank: int, chance: float, at: int) -> None:
        if rank < len(CHANCES) and at <= depth:
            heapq.heappush(waiting, (-chance * CHANCES[rank], parent, rank, at))

    offer(0, 0, 1.0, 1)
    chances = [1.0]
    while len(parents) < nodes and waiting:
        chance, parent, rank, at = heapq.heappop(waiting)
        parents.append(parent)
        ranks.append(rank)
        chances.append(-chance)
        offer(parent, rank + 1, chances[parent], at)
        offer(len(parents) - 1, 0, -chance, at + 1)
    return DraftTree(tuple(parents), tuple(ranks))
