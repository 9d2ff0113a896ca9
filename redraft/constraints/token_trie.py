"""TokenTrie: the bytes of a vocabulary's tokens as a trie, and the walk of a DFA over it.

Tokens with a common start share its nodes, and the walk ends where no state is left, so it takes about as long as the
transitions that it finds. Shapes: M nodes (node 0 is the root), N tokens, Q states of the DFA.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from redraft.constraints.budget import Budget
from redraft.constraints.graph import expand_segments

CHUNK = 2**18  # nodes that are walked at once: bounds the memory
NODES_PER_UNIT = 10  # nodes that are removed, per unit of the budget
MERGE_WORK = 3  # units of the budget for each node that is kept
VOCABULARY = "running the vocabulary through the pattern"


@dataclass(frozen=True, eq=False)
class TokenTrie:
    """Nodes in the order of their depth; the children of a node are neighbours."""

    parents_M: np.ndarray
    bytes_M: np.ndarray  # the byte that leads to the node
    begins_M: np.ndarray  # the first child of each node
    ends_M: np.ndarray  # the child behind the last one
    levels: tuple[int, ...]  # the first node of each depth, and the number of nodes

    @classmethod
    def from_parents(cls, parents: Sequence[np.ndarray], bytes_: Sequence[np.ndarray]) -> "TokenTrie":
        """The trie of these nodes, given level by level; the parents are in ascending order."""
        parents_M = np.concatenate(parents).astype(np.int32)
        begins_M = 1 + np.searchsorted(parents_M[1:], np.arange(len(parents_M)), side="left")
        ends_M = 1 + np.searchsorted(parents_M[1:], np.arange(len(parents_M)), side="right")
        levels = (0, *np.cumsum([len(level) for level in parents]).tolist())
        return cls(parents_M, np.concatenate(bytes_), begins_M.astype(np.int32), ends_M.astype(np.int32), levels)

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.parents_M)

    def merge_bytes(self, transitions_Q256: np.ndarray, budget: Budget) -> tuple["TokenTrie", np.ndarray]:
        """The trie with one node for all bytes that a DFA does not tell apart, and the new number of each node.

        A node with a byte that the DFA reads in no state is removed, with all below it; its number is -1.
        """
        budget.spend(self.size // NODES_PER_UNIT, VOCABULARY)
        columns = [column.tobytes() for column in np.ascontiguousarray(transitions_Q256.T)]
        first_byte = {column: byte for byte, column in reversed(list(enumerate(columns)))}
        merged_256 = np.array([first_byte[column] for column in columns])
        is_read_256 = np.asarray(transitions_Q256.any(axis=0))
        number_M = np.full(self.size, -1, dtype=np.int64)
        number_M[0] = 0
        parents = [np.zeros(1, dtype=np.int64)]
        bytes_ = [np.zeros(1, dtype=np.uint8)]
        size = 1
        for begin, end in pairwise(self.levels[1:]):
            parent = number_M[self.parents_M[begin:end]]
            byte = self.bytes_M[begin:end]
            kept = np.flatnonzero((parent >= 0) & is_read_256[byte])
            budget.spend(MERGE_WORK * len(kept), VOCABULARY)
            keys, inverse = np.unique(parent[kept] * 256 + merged_256[byte[kept]], return_inverse=True)
            number_M[begin + kept] = size + inverse.ravel()
            parents.append(keys // 256)
            bytes_.append((keys % 256).astype(np.uint8))
            size += len(keys)
        return TokenTrie.from_parents(parents, bytes_), number_M

    def keep_ancestors(self, nodes: np.ndarray) -> "PartialTrie":
        """The part of the trie that leads to these nodes."""
        kept_M = np.zeros(self.size, dtype=bool)
        while len(nodes):
            kept_M[nodes] = True
            nodes = np.unique(self.parents_M[nodes])
            nodes = nodes[~kept_M[nodes]]
        children = np.flatnonzero(kept_M)
        children = children[children > 0]
        return PartialTrie(
            children,
            self.bytes_M[children],
            np.searchsorted(children, self.begins_M),
            np.searchsorted(children, self.ends_M),
        )

    def walk(self, transitions_Q256: np.ndarray, budget: Budget) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Source states, target states and nodes, wherever the bytes of a node lead from one state to another."""
        whole = PartialTrie(np.arange(1, self.size), self.bytes_M[1:], self.begins_M - 1, self.ends_M - 1)
        return whole.walk(transitions_Q256, budget)


@dataclass(frozen=True, eq=False)
class PartialTrie:
    """Some nodes of a TokenTrie, with all their ancestors."""

    nodes_P: np.ndarray  # their numbers in the whole trie, without the root
    bytes_P: np.ndarray
    begins_M: np.ndarray  # an index of `nodes_P` for each node of the whole trie
    ends_M: np.ndarray

    def walk(self, transitions_Q256: np.ndarray, budget: Budget) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Source states, target states and nodes, wherever the bytes of a node lead from one state to another.

        Each byte that a state reads is one unit of the budget.
        """
        states = np.arange(1, len(transitions_Q256), dtype=np.int32)
        waiting = [(states, states, np.zeros(len(states), dtype=np.int32))]
        while waiting:
            source, state, node = waiting.pop()
            begins = self.begins_M[node]
            ends = self.ends_M[node]
            reached = np.cumsum(ends - begins)
            total = int(reached[-1]) if len(reached) else 0
            if total > CHUNK and len(node) > 1:  # some of them at a time
                cuts = np.unique(np.clip(np.searchsorted(reached, np.arange(CHUNK, total, CHUNK)), 1, len(node) - 1))
                pieces = (np.split(array, cuts) for array in (source, state, node))
                waiting += [piece for piece in zip(*pieces, strict=True) if len(piece[0])]
                continue
            budget.spend(total, VOCABULARY)
            parents = np.repeat(np.arange(len(node)), ends - begins)
            child = expand_segments(begins, ends)
            target = transitions_Q256[state[parents], self.bytes_P[child]]
            alive = np.flatnonzero(target)
            if not len(alive):
                continue
            state = target[alive]
            source = source[parents[alive]]
            node = self.nodes_P[child[alive]]
            yield source, state, node
            waiting.append((source, state, node))


def build_trie(texts: Sequence[bytes]) -> tuple[TokenTrie, np.ndarray]:
    """The trie of these texts, and the node at which each text ends, nodes_N."""
    order_N = sorted(range(len(texts)), key=texts.__getitem__)
    lengths_N = np.array([len(texts[index]) for index in order_N], dtype=np.int64)
    longest = int(lengths_N.max(initial=0))
    bytes_NL = np.zeros((len(texts), longest), dtype=np.uint8)
    for row, index in enumerate(order_N):
        bytes_NL[row, : len(texts[index])] = np.frombuffer(texts[index], dtype=np.uint8)
    node_N = np.zeros(len(texts), dtype=np.int64)  # of the first `depth` bytes of each sorted text
    is_new_N = np.arange(len(texts)) == 0  # whether they differ from those of the text before
    parents = [np.zeros(1, dtype=np.int64)]
    bytes_ = [np.zeros(1, dtype=np.uint8)]
    size = 1
    for depth in range(1, longest + 1):
        column_N = bytes_NL[:, depth - 1]
        is_new_N = is_new_N | (lengths_N < depth) | np.append(True, column_N[1:] != column_N[:-1])
        is_new_N = is_new_N | np.append(False, lengths_N[:-1] < depth)
        first = np.flatnonzero(is_new_N & (lengths_N >= depth))
        parents.append(node_N[first])
        bytes_.append(column_N[first])
        longer = np.flatnonzero(lengths_N >= depth)
        node_N[longer] = size + np.searchsorted(first, longer, side="right") - 1
        size += len(first)
    nodes_N = np.empty_like(node_N)
    nodes_N[order_N] = node_N
    return TokenTrie.from_parents(parents, bytes_), nodes_N
