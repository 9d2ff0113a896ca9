"""The sampler's part of a denoising step: random numbers before the model, acceptance and the next canvas after it.

References: `diffusion/rng.py`, and `diffusion/sampler.py` with the released settings (an entropy bound; no quota, no
spread, no constraints). Each row has its own seed, block, step and settings in device memory, so rows at different steps
share a launch.

Shapes: B rows, C canvas positions, S steps at most.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels import splitmix
from redraft.kernels.triton.pdl import _pdl_wait, pdl_options


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

    @classmethod
    def empty(cls, rows: int, length: int, steps: int, device: torch.device | str) -> "CanvasBatch":
        """Allocates this many rows, all settled."""
        dtypes = {
            "ids": torch.int64,
            "best": torch.int64,
            "accepted": torch.bool,
            "settled": torch.bool,
            "seeds": torch.int64,
        }
        dtypes |= dict.fromkeys(("entropy", "temperatures", "bound", "confidence"), torch.float32)
        shapes = {"BC": (rows, length), "B": (rows,), "BS": (rows, steps)}
        tensors = {}
        for field in fields(cls):
            name, shape = field.name.rsplit("_", 1)
            tensors[field.name] = torch.zeros(shapes[shape], dtype=dtypes.get(name, torch.int32), device=device)
        tensors["settled_B"].fill_(True)
        tensors["temperatures_BS"].fill_(1.0)
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
        c, triton.next_power_of_2(c), num_warps=8, **pdl_options(),
    )  # fmt: skip


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
    limits, bounds, confidences, stabilities, C, C_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    _pdl_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, C_PADDED)
    mask = position < C
    offs = row * C + position
    step = tl.load(steps + row)
    if (tl.load(settled + row) == 0) & (step < tl.load(limits + row)):
        h = tl.load(entropy + offs, mask=mask, other=float("inf"))
        token = tl.load(best + offs, mask=mask, other=0)
        is_same = tl.sum((mask & (token != tl.load(best_out + offs, mask=mask, other=0))).to(tl.int32), axis=0) == 0
        # A position is accepted if the entropies before it sum to at most the bound. Positions are ordered by entropy, and
        # by index where entropies are equal.
        is_before = (h[None, :] < h[:, None]) | ((h[None, :] == h[:, None]) & (position[None, :] < position[:, None]))
        sum_before = tl.sum(tl.where(is_before & mask[None, :], h[None, :], 0.0), axis=1)
        accepted = mask & (sum_before <= tl.load(bounds + row))
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
