"""A regular-expression constraint on a canvas: the marginals of matching texts, and the most probable matching text.

Reference: `CanvasAutomaton` in `constraints/canvas_automaton.py`, which explains the mathematics.

    logits -> [_segment_reduce, three times] pieces of token classes -> token classes -> pairs of states
    pairs -> [_mark_live_states] -> [_forward_backward_viterbi: two programs, one for each algorithm] -> token classes

Sums are float64 because probabilities may be as small as e^-300. (Here that is the floor for a tile of tokens, in the
reference for a class of tokens. It matters only where nothing more probable matches.) Forward-backward and Viterbi are one
program each: position after position, all pairs at once, sums by atomics, a barrier between positions.

Shapes: C positions, V vocabulary, K token classes, R pairs of states with a transition, Q states, E indices in S
segments.
"""

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 256  # tokens of a class per program
BLOCK_ROWS = 8  # positions per program of `_segment_reduce`
BLOCK_INDICES = 64  # indices per iteration of `_segment_reduce`
BLOCK_PAIRS = 1024  # per iteration
BLOCK_STATES = 256  # per iteration
MIN_LOG_PROB = tl.constexpr(-300.0)  # nats below the best token: the floor for allowed tokens
FORBIDDEN = tl.constexpr(-1e7)  # nats below the best token: forbidden. Both as in `constraints/canvas_automaton.py`


class IndexSegments(NamedTuple):
    """A list of index lists, concatenated. Segment s is indices_E[begins_S[s] : begins_S[s + 1]]. Both are int32."""

    indices_E: Tensor
    begins_S: Tensor


class DeviceAutomaton(NamedTuple):
    """A token automaton in device memory."""

    piece_tokens: IndexSegments  # the tokens of each piece of a class
    class_pieces: IndexSegments  # the pieces of each class
    pair_classes: IndexSegments  # the classes of each pair
    class_pairs: IndexSegments  # the pairs of each class that has any
    columns_V: Tensor  # int64: the position of each token's class in `class_pairs`; its length for tokens without pairs
    from_R: Tensor  # int32
    to_R: Tensor  # int32


class AutomatonArrays(Protocol):
    """The attributes of `constraints.token_automaton.TokenAutomaton` that this module reads."""

    classes_V: np.ndarray
    from_R: np.ndarray
    to_R: np.ndarray
    pair_E: np.ndarray
    class_E: np.ndarray

    @property
    def edge_starts_R(self) -> np.ndarray:
        """The index of each pair's first edge."""

    @property
    def tokens_by_class(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens sorted by class, and the index of each class's first token."""

    @property
    def pairs_by_class(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pairs sorted by class, the classes that have edges, and the index of each class's first pair."""


@lru_cache(maxsize=16)  # an automaton over 262,144 tokens takes about 10 MB here and on the device
def upload_automaton(automaton: AutomatonArrays, device: torch.device) -> DeviceAutomaton:
    """Copies an automaton to a device, once."""

    def upload(values: np.ndarray, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device, dtype)

    def segments(indices: np.ndarray, begins: list[int]) -> IndexSegments:
        return IndexSegments(upload(indices), upload(np.array(begins)))

    order_V, bounds_K = automaton.tokens_by_class
    pieces_K = -(-np.diff(np.append(bounds_K, len(order_V))) // PIECE)
    begins = np.concatenate([low + PIECE * np.arange(count) for low, count in zip(bounds_K, pieces_K, strict=True)])
    pairs_E, used_classes, class_begins = automaton.pairs_by_class
    columns_K = np.full(len(bounds_K), len(used_classes))
    columns_K[used_classes] = np.arange(len(used_classes))
    return DeviceAutomaton(
        piece_tokens=segments(order_V, [*begins, len(order_V)]),
        class_pieces=segments(np.arange(len(begins)), [0, *np.cumsum(pieces_K)]),
        pair_classes=segments(automaton.class_E, [*automaton.edge_starts_R, len(automaton.pair_E)]),
        class_pairs=segments(pairs_E, [*class_begins, len(pairs_E)]),
        columns_V=upload(columns_K[automaton.classes_V], torch.int64),
        from_R=upload(automaton.from_R),
        to_R=upload(automaton.to_R),
    )


class SegmentReduction(NamedTuple):
    """The sum and the maximum of each segment, and the token that the maximum belongs to."""

    sums_CS: Tensor  # float64
    best_CS: Tensor  # float32
    argmax_CS: Tensor  # int32


def forward_backward_viterbi(
    logits_CV: Tensor, automaton: DeviceAutomaton, start: int, ends_Q: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log weights of the token classes, the most probable matching text, and whether any text matches.

    weights_CK has one column per class that has pairs, and a last column of -inf for the other tokens. Added to the logits
    of a class's tokens, it gives the marginals of matching texts. The text is ids_C.
    """
    device = logits_CV.device
    count = len(logits_CV)
    states = len(ends_Q)
    pairs = len(automaton.from_R)
    pieces = segment_reduce(automaton.piece_tokens, logits_CV, top_C=logits_CV.amax(dim=1))
    classes = segment_reduce(automaton.class_pieces, *pieces)
    pair_probs_CR, pair_best_CR, pair_argmax_CR = segment_reduce(automaton.pair_classes, *classes)
    live = torch.zeros(count + 1, states, dtype=torch.int8, device=device)
    live[-1] = ends_Q
    _mark_live_states[(1,)](
        pair_probs_CR, automaton.from_R, automaton.to_R, live, count, pairs, states, BLOCK_PAIRS, num_warps=8
    )
    forward = torch.zeros(count + 1, states, dtype=torch.float64, device=device)
    backward = torch.zeros(count + 1, states, dtype=torch.float64, device=device)
    totals_C = torch.ones(count + 1, dtype=torch.float64, device=device)
    scores = torch.full((count + 1, states), -torch.inf, dtype=torch.float64, device=device)
    forward[0, start] = 1.0
    scores[0, start] = 0.0
    outside_CR = torch.empty_like(pair_probs_CR)
    ids_C = torch.empty(count, dtype=torch.int64, device=device)
    _forward_backward_viterbi[(2,)](
        pair_probs_CR, pair_best_CR, pair_argmax_CR, automaton.from_R, automaton.to_R, live,
        forward, backward, totals_C, scores, outside_CR, ids_C, count, pairs, states, BLOCK_PAIRS, BLOCK_STATES, num_warps=8,
    )  # fmt: skip
    weights_CK = segment_reduce(automaton.class_pairs, outside_CR).sums_CS.log().float()
    return torch.nn.functional.pad(weights_CK, (0, 1), value=-torch.inf), ids_C, live[0, start] > 0


def segment_reduce(
    segments: IndexSegments,
    values_CE: Tensor,
    best_CE: Tensor | None = None,
    argmax_CE: Tensor | None = None,
    *,
    top_C: Tensor | None = None,
) -> SegmentReduction:
    """Sums `values_CE` and maximises `best_CE` over segments of columns. `argmax_CE` holds the tokens of the maxima so far.

    With `top_C` the values are logits: their exponentials, relative to `top_C`, are summed.
    """
    count = len(values_CE)
    number = len(segments.begins_S) - 1
    sums_CS = torch.empty(count, number, dtype=torch.float64, device=values_CE.device)
    best_CS = torch.empty(count, number, dtype=torch.float32, device=values_CE.device)
    argmax_CS = torch.empty(count, number, dtype=torch.int32, device=values_CE.device)
    # Arguments that are absent are passed as `values_CE`; the kernel does not use them.
    _segment_reduce[(number, triton.cdiv(count, BLOCK_ROWS))](
        values_CE, values_CE if best_CE is None else best_CE, values_CE if argmax_CE is None else argmax_CE,
        values_CE if top_C is None else top_C, *segments, sums_CS, best_CS, argmax_CS, count, values_CE.shape[1], number,
        top_C is not None, argmax_CE is not None, BLOCK_ROWS, BLOCK_INDICES, num_warps=4,
    )  # fmt: skip
    return SegmentReduction(sums_CS, best_CS, argmax_CS)


@triton.jit
def _segment_reduce(
    values, best, argmax, tops, indices, begins, sums_out, best_out, argmax_out,
    C, E, S, IS_LOGITS: tl.constexpr, HAS_ARGMAX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_INDICES: tl.constexpr,
):  # fmt: skip
    """One segment at some positions."""
    segment = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    mask_row = row < C
    begin = tl.load(begins + segment)
    end = tl.load(begins + segment + 1)
    total = tl.zeros((BLOCK_ROWS,), tl.float64)
    largest = tl.full((BLOCK_ROWS,), -float("inf"), tl.float32)
    token = tl.zeros((BLOCK_ROWS,), tl.int32)
    for start in range(begin, end, BLOCK_INDICES):
        at = start + tl.arange(0, BLOCK_INDICES)
        mask = mask_row[:, None] & (at < end)[None, :]
        index = tl.load(indices + at, mask=at < end, other=0)
        offs = row.to(tl.int64)[:, None] * E + index[None, :]
        value = tl.load(values + offs, mask=mask, other=0.0)
        if IS_LOGITS:
            score = tl.where(mask, value.to(tl.float32), -float("inf"))
            tile_max = tl.max(score, axis=1)
            tile_sum = tl.sum(tl.where(mask, tl.exp(score - tile_max[:, None]), 0.0), axis=1)
            below = tile_max - tl.load(tops + row, mask=mask_row, other=0.0).to(tl.float32)
            tile_prob = tl.exp(tl.maximum(below, MIN_LOG_PROB).to(tl.float64))
            total += tl.where(mask_row & (below >= FORBIDDEN), tile_sum.to(tl.float64) * tile_prob, 0.0)
        else:
            total += tl.sum(value.to(tl.float64), axis=1)
            score = tl.load(best + offs, mask=mask, other=-float("inf")).to(tl.float32)
            score = tl.where(mask, score, -float("inf"))
        tile_best, column = tl.max(score, axis=1, return_indices=True, return_indices_tie_break_left=True)
        is_better = tile_best > largest
        largest = tl.where(is_better, tile_best, largest)
        tile_token = tl.load(indices + tl.minimum(start + column, end - 1))
        if HAS_ARGMAX:
            tile_token = tl.load(argmax + row.to(tl.int64) * E + tile_token, mask=mask_row, other=0).to(tl.int32)
        token = tl.where(is_better, tile_token, token)
    out = row.to(tl.int64) * S + segment
    tl.store(sums_out + out, total, mask=mask_row)
    tl.store(best_out + out, largest, mask=mask_row)
    tl.store(argmax_out + out, token, mask=mask_row)


@triton.jit
def _mark_live_states(pair_probs, from_, to, live, C, R, Q, BLOCK_PAIRS: tl.constexpr):
    """Marks the states from which a match is reachable, from the last position to the first."""
    for back in range(C):
        position = C - 1 - back
        for start in range(0, R, BLOCK_PAIRS):
            pair = start + tl.arange(0, BLOCK_PAIRS)
            mask = pair < R
            target = tl.load(to + pair, mask=mask, other=0)
            is_live = tl.load(live + (position + 1) * Q + target, mask=mask, other=0, cache_modifier=".cg") > 0
            is_usable = mask & is_live & (tl.load(pair_probs + position * R + pair, mask=mask, other=0.0) > 0)
            source = tl.load(from_ + pair, mask=mask, other=0)
            tl.store(live + position * Q + source, tl.full((BLOCK_PAIRS,), 1, tl.int8), mask=is_usable)
        tl.debug_barrier()


@triton.jit
def _forward_backward_viterbi(
    pair_probs, pair_best, pair_argmax, from_, to, live, forward, backward, totals, scores, outside, ids,
    C, R, Q, BLOCK_PAIRS: tl.constexpr, BLOCK_STATES: tl.constexpr,
):  # fmt: skip
    """Two programs, one for each algorithm: they run beside each other."""
    if tl.program_id(0) == 0:
        _forward_backward(
            pair_probs, from_, to, live, forward, backward, totals, outside, C, R, Q, BLOCK_PAIRS, BLOCK_STATES
        )
    else:
        _viterbi(pair_best, pair_argmax, from_, to, live, scores, ids, C, R, Q, BLOCK_PAIRS, BLOCK_STATES)


@triton.jit
def _forward_backward(
    pair_probs, from_, to, live, forward, backward, totals, outside, C, R, Q,
    BLOCK_PAIRS: tl.constexpr, BLOCK_STATES: tl.constexpr,
):  # fmt: skip
    """Computes the probability of matching texts through each pair, without the pair's own probability."""
    total = tl.full((), 1.0, tl.float64)
    for position in range(C):
        for start in range(0, R, BLOCK_PAIRS):
            pair = start + tl.arange(0, BLOCK_PAIRS)
            mask = pair < R
            source = tl.load(from_ + pair, mask=mask, other=0)
            target = tl.load(to + pair, mask=mask, other=0)
            prob = tl.load(pair_probs + position * R + pair, mask=mask, other=0.0)
            is_live = tl.load(live + (position + 1) * Q + target, mask=mask, other=0) > 0
            before = tl.load(forward + position * Q + source, mask=mask, other=0.0, cache_modifier=".cg") / total
            tl.atomic_add(forward + (position + 1) * Q + target, before * prob, mask=mask & is_live & (before * prob > 0))
        tl.debug_barrier()
        total = _reduce_states(forward + (position + 1) * Q, Q, True, BLOCK_STATES)
        tl.store(totals + position + 1, total)
    for start in range(0, Q, BLOCK_STATES):
        state = start + tl.arange(0, BLOCK_STATES)
        is_end = tl.load(live + C * Q + state, mask=state < Q, other=0) > 0
        is_end = is_end & (tl.load(forward + C * Q + state, mask=state < Q, other=0.0, cache_modifier=".cg") > 0)
        tl.store(backward + C * Q + state, tl.where(is_end, 1.0, 0.0).to(tl.float64), mask=state < Q)
    tl.debug_barrier()
    largest = tl.full((), 1.0, tl.float64)
    for back in range(C):
        position = C - 1 - back
        total = tl.load(totals + position, cache_modifier=".cg")
        for start in range(0, R, BLOCK_PAIRS):
            pair = start + tl.arange(0, BLOCK_PAIRS)
            mask = pair < R
            source = tl.load(from_ + pair, mask=mask, other=0)
            target = tl.load(to + pair, mask=mask, other=0)
            prob = tl.load(pair_probs + position * R + pair, mask=mask, other=0.0)
            before = tl.load(forward + position * Q + source, mask=mask, other=0.0, cache_modifier=".cg")
            after = tl.load(backward + (position + 1) * Q + target, mask=mask, other=0.0, cache_modifier=".cg") / largest
            tl.store(outside + position * R + pair, before / total * after, mask=mask)
            tl.atomic_add(backward + position * Q + source, after * prob, mask=mask & (before > 0) & (after * prob > 0))
        tl.debug_barrier()
        largest = _reduce_states(backward + position * Q, Q, False, BLOCK_STATES)


@triton.jit
def _reduce_states(values, Q, IS_SUM: tl.constexpr, BLOCK_STATES: tl.constexpr):
    """Returns the sum of Q numbers, or the largest."""
    result = tl.zeros((BLOCK_STATES,), tl.float64)
    for start in range(0, Q, BLOCK_STATES):
        state = start + tl.arange(0, BLOCK_STATES)
        value = tl.load(values + state, mask=state < Q, other=0.0, cache_modifier=".cg")
        result = result + value if IS_SUM else tl.maximum(result, value)
    return tl.sum(result, axis=0) if IS_SUM else tl.max(result, axis=0)


@triton.jit
def _viterbi(
    pair_best, pair_argmax, from_, to, live, scores, ids, C, R, Q, BLOCK_PAIRS: tl.constexpr, BLOCK_STATES: tl.constexpr
):
    """Finds the most probable matching text: the best score of each state, then the path back from the best final state."""
    for position in range(C):
        for start in range(0, R, BLOCK_PAIRS):
            pair = start + tl.arange(0, BLOCK_PAIRS)
            mask = pair < R
            source = tl.load(from_ + pair, mask=mask, other=0)
            target = tl.load(to + pair, mask=mask, other=0)
            is_live = tl.load(live + (position + 1) * Q + target, mask=mask, other=0) > 0
            score = tl.load(scores + position * Q + source, mask=mask, other=-float("inf"), cache_modifier=".cg")
            score += tl.load(pair_best + position * R + pair, mask=mask, other=-float("inf")).to(tl.float64)
            tl.atomic_max(scores + (position + 1) * Q + target, score, mask=mask & is_live & (score > -float("inf")))
        tl.debug_barrier()
    state = tl.full((), 0, tl.int32)
    top = tl.full((), -float("inf"), tl.float64)
    for start in range(0, Q, BLOCK_STATES):
        final = start + tl.arange(0, BLOCK_STATES)
        is_end = (final < Q) & (tl.load(live + C * Q + final, mask=final < Q, other=0) > 0)
        score = tl.load(scores + C * Q + final, mask=is_end, other=-float("inf"), cache_modifier=".cg")
        block_top, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
        state = tl.where(block_top > top, start + index, state)
        top = tl.maximum(block_top, top)
    for back in range(C):
        position = C - 1 - back
        best_pair = tl.full((), 0, tl.int32)
        top = tl.full((), -float("inf"), tl.float64)
        for start in range(0, R, BLOCK_PAIRS):
            pair = start + tl.arange(0, BLOCK_PAIRS)
            mask = (pair < R) & (tl.load(to + pair, mask=pair < R, other=-1) == state)
            source = tl.load(from_ + pair, mask=mask, other=0)
            score = tl.load(scores + position * Q + source, mask=mask, other=-float("inf"), cache_modifier=".cg")
            score += tl.load(pair_best + position * R + pair, mask=mask, other=-float("inf")).to(tl.float64)
            block_top, index = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
            best_pair = tl.where(block_top > top, start + index, best_pair)
            top = tl.maximum(block_top, top)
        tl.store(ids + position, tl.load(pair_argmax + position * R + best_pair).to(tl.int64))
        state = tl.load(from_ + best_pair)
