"""A pattern on a canvas: how much matching text goes through each class of tokens, and the likeliest text that matches.

Reference: `CanvasAutomaton.conform` in `patterns.py`, which has the mathematics; here the vocabulary is read where it lies.

    logits -> [1 gather] pieces of classes -> classes -> pairs of states
    pairs -> [2 live] -> [3 walk: one program sums forward and backward, another finds the likeliest] -> classes

Probabilities may be as faint as e^-300 (here that is the floor of a tile of tokens, there of a class: it only matters
where nothing likelier matches), so sums are float64. A walk is one program: position after position, all pairs of
states at once, sums by atomics, a barrier between positions. Shapes: C positions, V vocabulary, K classes of tokens, R pairs
of states with a step between them, Q states, E entries of a list of segments, S segments.
"""

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 256  # tokens of a class that one program reads
ROWS, WIDE = 8, 64  # positions and entries at once
PAIRS, STATES = 1024, 256  # looked at together in a walk
FAINTEST, IMPOSSIBLE = tl.constexpr(-300.0), tl.constexpr(-1e7)  # as in `patterns.py`


class IndexSegments(NamedTuple):
    """Entries, and where each segment of them begins; one more says where the last ends. Both int32."""

    entries_E: Tensor
    begins_S: Tensor


class DeviceAutomaton(NamedTuple):
    """An automaton on a device."""

    pieces: IndexSegments  # of tokens, each of one class
    classes: IndexSegments  # of pieces
    pairs: IndexSegments  # of classes
    kinds: IndexSegments  # of pairs, for every class that makes a step
    slots_V: Tensor  # int64: which of those each token has; one more for tokens of none
    from_R: Tensor  # int32
    to_R: Tensor  # int32


class AutomatonArrays(Protocol):
    """What is read of an automaton, `patterns.TokenAutomaton`."""

    classes_V: np.ndarray
    from_R: np.ndarray
    to_R: np.ndarray
    pair_E: np.ndarray
    class_E: np.ndarray
    edge_starts_R: np.ndarray
    tokens_by_class: tuple[np.ndarray, np.ndarray]
    pairs_by_class: tuple[np.ndarray, np.ndarray, np.ndarray]


@lru_cache(maxsize=64)
def upload_automaton(automaton: AutomatonArrays, device: torch.device) -> DeviceAutomaton:
    """An automaton brought to a device, once."""

    def there(values: np.ndarray, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device, kind)

    order_V, bounds_K = automaton.tokens_by_class
    counts_K = -(-np.diff(np.append(bounds_K, len(order_V))) // PIECE)
    begins = np.concatenate([low + PIECE * np.arange(count) for low, count in zip(bounds_K, counts_K, strict=True)])
    pairs_E, used, first = automaton.pairs_by_class
    slots_K = np.full(len(bounds_K), len(used))
    slots_K[used] = np.arange(len(used))
    segments = (
        (order_V, [*begins, len(order_V)]),
        (np.arange(len(begins)), [0, *np.cumsum(counts_K)]),
        (automaton.class_E, [*automaton.edge_starts_R, len(automaton.pair_E)]),
        (pairs_E, [*first, len(pairs_E)]),
    )
    made = [IndexSegments(there(entries), there(np.array(ends))) for entries, ends in segments]
    slots_V = there(slots_K[automaton.classes_V], torch.int64)
    return DeviceAutomaton(*made, slots_V, there(automaton.from_R), there(automaton.to_R))


class SegmentReduction(NamedTuple):
    """Of every segment: the sum, the largest, and the entry that it is of (or what that entry's largest is of)."""

    sums_CS: Tensor  # float64
    best_CS: Tensor  # float32
    which_CS: Tensor  # int32


def forward_backward_viterbi(
    logits_CV: Tensor, tables: DeviceAutomaton, start: int, ends_Q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """weights_CK for the classes that make a step (one more, of nothing, behind), ids_C, and whether anything matches."""
    one, device, count, states = tables, logits_CV.device, len(logits_CV), len(ends_Q)
    top_C = logits_CV.amax(dim=1)
    pieces = segment_reduce(one.pieces, logits_CV, top_C=top_C)
    classes = segment_reduce(one.classes, pieces.sums_CS, pieces.best_CS, pieces.which_CS)
    pairs = segment_reduce(one.pairs, classes.sums_CS, classes.best_CS, classes.which_CS)
    steps = len(one.from_R)
    live = torch.zeros(count + 1, states, dtype=torch.int8, device=device)
    live[-1] = ends_Q
    _mark_live_states[(1,)](pairs.sums_CS, one.from_R, one.to_R, live, count, steps, states, PAIRS, num_warps=8)
    before, behind = (torch.zeros(count + 1, states, dtype=torch.float64, device=device) for _ in range(2))
    totals_C = torch.ones(count + 1, dtype=torch.float64, device=device)
    scores = torch.full((count + 1, states), -torch.inf, dtype=torch.float64, device=device)
    before[0, start], scores[0, start] = 1.0, 0.0
    through_CR, ids_C = torch.empty_like(pairs.sums_CS), torch.empty(count, dtype=torch.int64, device=device)
    _forward_backward_viterbi[(2,)](
        pairs.sums_CS, pairs.best_CS, pairs.which_CS, one.from_R, one.to_R, live,
        before, behind, totals_C, scores, through_CR, ids_C, count, steps, states, PAIRS, STATES, num_warps=8,
    )  # fmt: skip
    weights_CK = segment_reduce(one.kinds, through_CR).sums_CS.log().float()
    return torch.nn.functional.pad(weights_CK, (0, 1), value=-torch.inf), ids_C, live[0, start] > 0


def segment_reduce(
    segments: IndexSegments,
    values_CE: Tensor,
    best_CE: Tensor | None = None,
    which_CE: Tensor | None = None,
    *,
    top_C: Tensor | None = None,
) -> SegmentReduction:
    """Sums and maxima over segments of columns. With `top_C`, values are logits: their exponentials below it are summed."""
    entries_E, begins_S = segments
    count, number, device = len(values_CE), len(begins_S) - 1, values_CE.device
    sums_CS = torch.empty(count, number, dtype=torch.float64, device=device)
    best_CS = torch.empty(count, number, dtype=torch.float32, device=device)
    which_CS = torch.empty(count, number, dtype=torch.int32, device=device)
    raw = top_C is not None
    best_CE, which_CE = (values_CE if other is None else other for other in (best_CE, which_CE))
    _segment_reduce[(number, triton.cdiv(count, ROWS))](
        values_CE, best_CE, which_CE, top_C if raw else values_CE, entries_E, begins_S, sums_CS, best_CS, which_CS,
        count, values_CE.shape[1], number, raw, which_CE is not values_CE, ROWS, WIDE, num_warps=4,
    )  # fmt: skip
    return SegmentReduction(sums_CS, best_CS, which_CS)


@triton.jit
def _segment_reduce(
    values, best, which, tops, entries, begins, sums_out, best_out, which_out,
    C, E, S, RAW: tl.constexpr, KNOWN: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    here = row < C
    begin, end = tl.load(begins + segment), tl.load(begins + segment + 1)
    total = tl.zeros((ROWS,), tl.float64)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    found = tl.zeros((ROWS,), tl.int32)
    for start in range(begin, end, WIDE):
        at = start + tl.arange(0, WIDE)
        valid = here[:, None] & (at < end)[None, :]
        entry = tl.load(entries + at, mask=at < end, other=0)
        place = row.to(tl.int64)[:, None] * E + entry[None, :]
        value = tl.load(values + place, mask=valid, other=0.0)
        if RAW:
            score = tl.where(valid, value.to(tl.float32), -float("inf"))
            own = tl.max(score, axis=1)
            near = tl.sum(tl.where(valid, tl.exp(score - own[:, None]), 0.0), axis=1)
            below = own - tl.load(tops + row, mask=here, other=0.0).to(tl.float32)
            chance = tl.exp(tl.maximum(below, FAINTEST).to(tl.float64))
            total += tl.where(here & (below >= IMPOSSIBLE), near.to(tl.float64) * chance, 0.0)
        else:
            total += tl.sum(value.to(tl.float64), axis=1)
            score = tl.load(best + place, mask=valid, other=-float("inf")).to(tl.float32)
            score = tl.where(valid, score, -float("inf"))
        now, column = tl.max(score, axis=1, return_indices=True, return_indices_tie_break_left=True)
        better = now > largest
        largest = tl.where(better, now, largest)
        mine = tl.load(entries + tl.minimum(start + column, end - 1))
        if KNOWN:
            mine = tl.load(which + row.to(tl.int64) * E + mine, mask=here, other=0).to(tl.int32)
        found = tl.where(better, mine, found)
    out = row.to(tl.int64) * S + segment
    tl.store(sums_out + out, total, mask=here)
    tl.store(best_out + out, largest, mask=here)
    tl.store(which_out + out, found, mask=here)


@triton.jit
def _mark_live_states(steps, from_, to, live, C, R, Q, PAIRS: tl.constexpr):
    """From which states a match can still be reached, from the last position to the first."""
    for back in range(C):
        at = C - 1 - back
        for start in range(0, R, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            known = pair < R
            target = tl.load(to + pair, mask=known, other=0)
            open_ = tl.load(live + (at + 1) * Q + target, mask=known, other=0, cache_modifier=".cg") > 0
            can = known & open_ & (tl.load(steps + at * R + pair, mask=known, other=0.0) > 0)
            source = tl.load(from_ + pair, mask=known, other=0)
            tl.store(live + at * Q + source, tl.full((PAIRS,), 1, tl.int8), mask=can)
        tl.debug_barrier()


@triton.jit
def _forward_backward_viterbi(
    steps, best, which, from_, to, live, before, behind, totals, scores, through, ids,
    C, R, Q, PAIRS: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0:
        _forward_backward(steps, from_, to, live, before, behind, totals, through, C, R, Q, PAIRS, STATES)
    else:
        _viterbi(best, which, from_, to, live, scores, ids, C, R, Q, PAIRS, STATES)


@triton.jit
def _forward_backward(
    steps, from_, to, live, before, behind, totals, through, C, R, Q, PAIRS: tl.constexpr, STATES: tl.constexpr
):  # fmt: skip
    """How much matching text goes through each pair, but for the step's own probability."""
    total = tl.full((), 1.0, tl.float64)
    for at in range(C):
        for start in range(0, R, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            known = pair < R
            source, target = tl.load(from_ + pair, mask=known, other=0), tl.load(to + pair, mask=known, other=0)
            step = tl.load(steps + at * R + pair, mask=known, other=0.0)
            open_ = tl.load(live + (at + 1) * Q + target, mask=known, other=0) > 0
            came = tl.load(before + at * Q + source, mask=known, other=0.0, cache_modifier=".cg") / total
            tl.atomic_add(before + (at + 1) * Q + target, came * step, mask=known & open_ & (came * step > 0))
        tl.debug_barrier()
        total = _reduce_states(before + (at + 1) * Q, Q, True, STATES)
        tl.store(totals + at + 1, total)
    for start in range(0, Q, STATES):
        state = start + tl.arange(0, STATES)
        ended = tl.load(live + C * Q + state, mask=state < Q, other=0) > 0
        ended = ended & (tl.load(before + C * Q + state, mask=state < Q, other=0.0, cache_modifier=".cg") > 0)
        tl.store(behind + C * Q + state, tl.where(ended, 1.0, 0.0).to(tl.float64), mask=state < Q)
    tl.debug_barrier()
    largest = tl.full((), 1.0, tl.float64)
    for back in range(C):
        at = C - 1 - back
        total = tl.load(totals + at, cache_modifier=".cg")
        for start in range(0, R, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            known = pair < R
            source, target = tl.load(from_ + pair, mask=known, other=0), tl.load(to + pair, mask=known, other=0)
            step = tl.load(steps + at * R + pair, mask=known, other=0.0)
            came = tl.load(before + at * Q + source, mask=known, other=0.0, cache_modifier=".cg")
            goes = tl.load(behind + (at + 1) * Q + target, mask=known, other=0.0, cache_modifier=".cg") / largest
            tl.store(through + at * R + pair, came / total * goes, mask=known)
            tl.atomic_add(behind + at * Q + source, goes * step, mask=known & (came > 0) & (goes * step > 0))
        tl.debug_barrier()
        largest = _reduce_states(behind + at * Q, Q, False, STATES)


@triton.jit
def _reduce_states(values, Q, SUMMED: tl.constexpr, STATES: tl.constexpr):
    """The sum of Q numbers, or the largest."""
    found = tl.zeros((STATES,), tl.float64)
    for start in range(0, Q, STATES):
        at = start + tl.arange(0, STATES)
        value = tl.load(values + at, mask=at < Q, other=0.0, cache_modifier=".cg")
        found = found + value if SUMMED else tl.maximum(found, value)
    return tl.sum(found, axis=0) if SUMMED else tl.max(found, axis=0)


@triton.jit
def _viterbi(best, which, from_, to, live, scores, ids, C, R, Q, PAIRS: tl.constexpr, STATES: tl.constexpr):
    """Viterbi: the most probable text that matches."""
    for at in range(C):
        for start in range(0, R, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            known = pair < R
            source, target = tl.load(from_ + pair, mask=known, other=0), tl.load(to + pair, mask=known, other=0)
            open_ = tl.load(live + (at + 1) * Q + target, mask=known, other=0) > 0
            score = tl.load(scores + at * Q + source, mask=known, other=-float("inf"), cache_modifier=".cg")
            score += tl.load(best + at * R + pair, mask=known, other=-float("inf")).to(tl.float64)
            tl.atomic_max(scores + (at + 1) * Q + target, score, mask=known & open_ & (score > -float("inf")))
        tl.debug_barrier()
    state, top = tl.full((), 0, tl.int32), tl.full((), -float("inf"), tl.float64)
    for start in range(0, Q, STATES):
        last = start + tl.arange(0, STATES)
        ended = (last < Q) & (tl.load(live + C * Q + last, mask=last < Q, other=0) > 0)
        score = tl.load(scores + C * Q + last, mask=ended, other=-float("inf"), cache_modifier=".cg")
        now, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        state, top = tl.where(now > top, start + place, state), tl.maximum(now, top)
    for back in range(C):
        at = C - 1 - back
        taken, top = tl.full((), 0, tl.int32), tl.full((), -float("inf"), tl.float64)
        for start in range(0, R, PAIRS):
            pair = start + tl.arange(0, PAIRS)
            mine = (pair < R) & (tl.load(to + pair, mask=pair < R, other=-1) == state)
            source = tl.load(from_ + pair, mask=mine, other=0)
            score = tl.load(scores + at * Q + source, mask=mine, other=-float("inf"), cache_modifier=".cg")
            score += tl.load(best + at * R + pair, mask=mine, other=-float("inf")).to(tl.float64)
            now, place = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
            taken, top = tl.where(now > top, start + place, taken), tl.maximum(now, top)
        tl.store(ids + at, tl.load(which + at * R + taken).to(tl.int64))
        state = tl.load(from_ + taken)
