"""The sampler's part of a denoising step: random numbers before the model, acceptance and the next canvas after it.

References: `diffusion/rng.py`, and `diffusion/sampler.py` without constraints. Each row has its own seed, block, step and
settings in device memory, so rows at different steps share a launch.

Shapes: B rows, C canvas positions, S steps at most, E stop tokens at most.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels import splitmix
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options

MAX_STOPS = 16  # stop tokens of a row that `stops_last` compares with
NO_TOKEN = -1  # fills the rest of the stop tokens
SURE = 0.2  # this and the next as in `diffusion/sampler.py`
BEHIND = 1e3


@dataclass(frozen=True)
class CanvasBatch:
    """The canvases of a batch with their settings. The kernels update the tensors in place."""

    ids_BC: Tensor  # int64; this and the next six are the state of `sampler.Canvas`
    best_BC: Tensor  # int64
    entropy_BC: Tensor  # float32
    accepted_BC: Tensor  # bool
    unchanged_B: Tensor  # int32
    steps_B: Tensor  # int32
    settled_B: Tensor  # bool
    seeds_B: Tensor  # int64
    blocks_B: Tensor  # int32
    temperatures_BS: Tensor  # float32, of each step
    limit_B: Tensor  # int32, steps
    bound_B: Tensor  # float32
    confidence_B: Tensor  # float32
    stability_B: Tensor  # int32
    quota_B: Tensor  # bool; this and the next four are the settings for small models
    at_end_B: Tensor  # bool, `accept_at_end`
    spread_B: Tensor  # int32
    last_B: Tensor  # bool, `stops_last`
    stops_BE: Tensor  # int64, NO_TOKEN after the last

    @classmethod
    def empty(cls, rows: int, length: int, steps: int, device: torch.device | str) -> "CanvasBatch":
        """Allocates this many rows, all settled."""
        dtypes = {
            "ids": torch.int64,
            "best": torch.int64,
            "accepted": torch.bool,
            "settled": torch.bool,
            "seeds": torch.int64,
            "stops": torch.int64,
        }
        dtypes |= dict.fromkeys(("quota", "at_end", "last"), torch.bool)
        dtypes |= dict.fromkeys(("entropy", "temperatures", "bound", "confidence"), torch.float32)
        shapes = {"BC": (rows, length), "B": (rows,), "BS": (rows, steps), "BE": (rows, MAX_STOPS)}
        tensors = {}
        for field in fields(cls):
            name, shape = field.name.rsplit("_", 1)
            tensors[field.name] = torch.zeros(shapes[shape], dtype=dtypes.get(name, torch.int32), device=device)
        tensors["settled_B"].fill_(True)
        tensors["temperatures_BS"].fill_(1.0)
        tensors["stops_BE"].fill_(NO_TOKEN)
        return cls(**tensors)


def draw_step_inputs(rows: CanvasBatch, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns uniform_BC (float64), noise_BC (int64) and temperature_BC (float32) for each row's next step."""
    b, c = rows.ids_BC.shape
    device = rows.ids_BC.device
    steps = rows.temperatures_BS.shape[1]
    uniform_BC = torch.empty(b, c, dtype=torch.float64, device=device)
    noise_BC = torch.empty_like(rows.ids_BC)
    temperature_BC = torch.empty(b, c, dtype=torch.float32, device=device)
    _draw_step_inputs[(b,)](
        rows.seeds_B, rows.blocks_B, rows.steps_B, rows.temperatures_BS, uniform_BC, noise_BC, temperature_BC,
        c, steps, vocab, triton.next_power_of_2(c), splitmix.SAMPLE, splitmix.NOISE, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return uniform_BC, noise_BC, temperature_BC


def step_canvases_(rows: CanvasBatch, best_BC: Tensor, entropy_BC: Tensor, sampled_BC: Tensor, noise_BC: Tensor) -> None:
    """Accepts, renoises and tests each row for its end, in place. Rows that settled or used all steps do not change."""
    b, c = rows.ids_BC.shape
    _step_canvases[(b,)](
        best_BC, entropy_BC, sampled_BC, noise_BC,
        rows.ids_BC, rows.best_BC, rows.entropy_BC, rows.accepted_BC, rows.unchanged_B, rows.steps_B, rows.settled_B,
        rows.limit_B, rows.bound_B, rows.confidence_B, rows.stability_B,
        rows.quota_B, rows.at_end_B, rows.spread_B, rows.last_B, rows.stops_BE,
        c, triton.next_power_of_2(c), MAX_STOPS, num_warps=8, **pdl_options(),
    )  # fmt: skip


_SURE = tl.constexpr(SURE)  # a kernel reads only globals of this type
_BEHIND = tl.constexpr(BEHIND)
GOLDEN, MIX_1, MIX_2 = (tl.constexpr(number % 2**64) for number in (splitmix.GOLDEN, splitmix.MIX_1, splitmix.MIX_2))


@triton.jit
def _mix(x, counter):
    """One round of splitmix64, on unsigned numbers."""
    x = x ^ ((counter.to(tl.uint64) + 1) * GOLDEN)
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _draw_step_inputs(
    seeds, blocks, steps, temperatures, uniform, noise, temperature,
    C, S, V, C_PADDED: tl.constexpr, SAMPLE: tl.constexpr, NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: mixes seed, stream, block, step and position, in the order of `diffusion/rng.py`."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, C_PADDED)
    mask = position < C
    step = tl.load(steps + row)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    base = _mix(seed ^ seed, seed)
    block = tl.load(blocks + row).to(tl.int64)
    next_step = (step + 1).to(tl.int64)
    zero = position.to(tl.int64) * 0
    for stream in tl.static_range(1, 3):
        x = _mix(base + zero.to(tl.uint64), zero + stream)
        x = _mix(x, zero + block)
        x = _mix(x, zero + next_step)
        x = _mix(x, position.to(tl.int64))
        if stream == SAMPLE:
            two_to_minus_53: tl.constexpr = 1.1102230246251565e-16
            tl.store(uniform + row * C + position, (x >> 11).to(tl.int64).to(tl.float64) * two_to_minus_53, mask=mask)
        else:
            token = ((x >> 32) * V.to(tl.uint64)) >> 32
            tl.store(noise + row * C + position, token.to(tl.int64), mask=mask)
    step_temperature = tl.load(temperatures + row * S + tl.minimum(step, S - 1))
    tl.store(temperature + row * C + position, zero.to(tl.float32) + step_temperature, mask=mask)


@triton.jit
def _step_canvases(
    best, entropy, sampled, noise, ids_out, best_out, entropy_out, accepted_out, unchanged, steps, settled,
    limits, bounds, confidences, stabilities, quotas, at_ends, spreads, lasts, stops,
    C, C_PADDED: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, C_PADDED)
    mask = position < C
    offs = row * C + position
    step = tl.load(steps + row)
    limit = tl.load(limits + row)
    if (tl.load(settled + row) == 0) & (step < limit):
        h = tl.load(entropy + offs, mask=mask, other=float("inf"))
        token = tl.load(best + offs, mask=mask, other=0)
        is_same = tl.sum((mask & (token != tl.load(best_out + offs, mask=mask, other=0))).to(tl.int32), axis=0) == 0
        was_accepted = tl.load(accepted_out + offs, mask=mask, other=0) != 0
        rank = h
        if tl.load(lasts + row) != 0:
            is_stop = position < 0
            for stop in tl.static_range(E):
                is_stop = is_stop | (token == tl.load(stops + row * E + stop))
            rank = rank + tl.where(is_stop, _BEHIND, 0.0)
        is_allowed = mask
        spread = tl.load(spreads + row)
        if (spread > 0) & (step + 1 < limit):
            is_allowed = mask & _spread_apart(
                rank, was_accepted & (token == tl.load(ids_out + offs, mask=mask, other=0)), position, mask, spread
            )
            rank = tl.where(is_allowed, rank, rank + _BEHIND)
        least = _count_required(
            tl.sum(was_accepted.to(tl.int32), axis=0), step, limit, tl.load(quotas + row), tl.load(at_ends + row), C
        )
        # A position is accepted if the ranks before it sum to at most the bound, or if it is among the required ones.
        # Positions are ordered by rank, which is the entropy, and by index where ranks are equal.
        is_before = (rank[None, :] < rank[:, None]) | (
            (rank[None, :] == rank[:, None]) & (position[None, :] < position[:, None])
        )
        is_before = is_before & mask[None, :]
        sum_before = tl.sum(tl.where(is_before, rank[None, :], 0.0), axis=1)
        count_before = tl.sum(is_before.to(tl.int32), axis=1)
        accepted = is_allowed & ((sum_before <= tl.load(bounds + row)) | (count_before < least))
        drawn = tl.load(sampled + offs, mask=mask, other=0)
        tl.store(ids_out + offs, tl.where(accepted, drawn, tl.load(noise + offs, mask=mask, other=0)), mask=mask)
        tl.store(best_out + offs, token, mask=mask)
        tl.store(entropy_out + offs, h, mask=mask)
        tl.store(accepted_out + offs, accepted, mask=mask)
        unchanged_steps = tl.where(is_same & (step > 0), tl.load(unchanged + row) + 1, 0)
        mean_entropy = tl.sum(tl.where(mask, h, 0.0), axis=0) / C
        tl.store(unchanged + row, unchanged_steps)
        tl.store(steps + row, step + 1)
        is_stable = unchanged_steps >= tl.load(stabilities + row)
        tl.store(settled + row, is_stable & (mean_entropy < tl.load(confidences + row)))


@triton.jit
def _spread_apart(rank, confirmed, position, mask, spread):
    """The positions that `spread` allows: `sampler.spread_apart`."""
    open_rank = tl.where(confirmed, float("inf"), rank)
    distance = position[None, :] - position[:, None]
    is_near = (distance < spread) & (distance > -spread) & mask[None, :]
    lowest = tl.min(tl.where(is_near, open_rank[None, :], float("inf")), axis=1)
    return confirmed | (rank < _SURE) | (open_rank == lowest)


@triton.jit
def _count_required(accepted, step, limit, quota, at_end, C):
    """The number of positions that a step must accept: `sampler.count_required`."""
    steps_left = limit - step
    share = accepted + tl.cdiv(C - accepted, steps_left)
    required = tl.where((at_end != 0) & (steps_left == 1), C, 0)
    return tl.where(quota != 0, share, required)
