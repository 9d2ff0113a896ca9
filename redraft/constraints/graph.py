"""Distances in an automaton's graph. Shapes: Q states, R pairs of states (from, to) with a transition."""

import numpy as np

UNREACHABLE = 1 << 30


def distances_to(ends_Q: np.ndarray, from_R: np.ndarray, to_R: np.ndarray) -> np.ndarray:
    """The fewest transitions from each state to one of `ends_Q`: a breadth-first search that visits every pair once."""
    states = len(ends_Q)
    order_R = np.argsort(to_R, kind="stable")
    sources_R = from_R[order_R]
    begins_Q = np.searchsorted(to_R[order_R], np.arange(states + 1))
    distance_Q = np.where(ends_Q, 0, UNREACHABLE)
    frontier = np.flatnonzero(ends_Q)
    distance = 0
    while len(frontier):
        distance += 1
        sources = sources_R[expand_segments(begins_Q[frontier], begins_Q[frontier + 1])]
        frontier = np.unique(sources[distance_Q[sources] == UNREACHABLE])
        distance_Q[frontier] = distance
    return distance_Q


def expand_segments(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The indices of several segments, concatenated: begins[0], begins[0] + 1, ..., ends[0] - 1, begins[1], ..."""
    counts = ends - begins
    first = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(begins - first, counts)
