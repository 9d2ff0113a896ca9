"""A canvas's step but for the model: chance before it, acceptance and the next canvas after it. References: `rng.py`,
`sampler.py` with the released settings (entropy bound alone; no quota, no spread, no constraints).

Every row has its own seed, page, step and settings, which lie on the device: rows at different steps run in one launch.

Shapes: B rows, C canvas positions, S steps at most.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from redraft.kernels import splitmix
from redraft.kernels.triton.pdl import pdl_options, pdl_wait


@dataclass(frozen=True)
class CanvasBatch:
    """Canvases in work, and what was asked for each. Written in place."""

    ids_BC: Tensor  # int64, as `sampler.Canvas`
    best_BC: Tensor  # int64
    entropy_BC: Tensor  # float32
    accepted_BC: Tensor  # bool
    unchanged_B: Tensor  # int32
    steps_B: Tensor  # int32
    settled_B: Tensor  # bool
    seeds_B: Tensor  # int64
    blocks_B: Tensor  # int32
    temperatures_BS: Tensor  # float32, of every step
    limit_B: Tensor  # int32: steps
    bound_B: Tensor  # float32
    confidence_B: Tensor  # float32
    stability_B: Tensor  # int32

    @classmethod
    def empty(cls, rows: int, length: int, steps: int, device: torch.device | str) -> "CanvasBatch":
        """Room for that many, all settled."""
        kinds = {
            "ids": torch.int64,
            "best": torch.int64,
            "accepted": torch.bool,
            "settled": torch.bool,
            "seeds": torch.int64,
        }
        kinds |= dict.fromkeys(("entropy", "temperatures", "bound", "confidence"), torch.float32)
        sizes = {"BC": (rows, length), "B": (rows,), "BS": (rows, steps)}
        made = {}
        for field in fields(cls):
            name, shape = field.name.rsplit("_", 1)
            made[field.name] = torch.zeros(sizes[shape], dtype=kinds.get(name, torch.int32), device=device)
        made["settled_B"].fill_(True)
        made["temperatures_BS"].fill_(1.0)
        return cls(**made)


def draw_step_inputs(rows: CanvasBatch, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """uniform_BC (float64), noise_BC (int64) and temperature_BC (float32) of every row's next step."""
    b, c = rows.ids_BC.shape
    device, steps = rows.ids_BC.device, rows.temperatures_BS.shape[1]
    uniform_BC = torch.empty(b, c, dtype=torch.float64, device=device)
    noise_BC, temperature_BC = torch.empty_like(rows.ids_BC), torch.empty(b, c, dtype=torch.float32, device=device)
    _draw_step_inputs[(b,)](
        rows.seeds_B, rows.blocks_B, rows.steps_B, rows.temperatures_BS, uniform_BC, noise_BC, temperature_BC,
        c, steps, vocab, triton.next_power_of_2(c), splitmix.SAMPLE, splitmix.NOISE, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return uniform_BC, noise_BC, temperature_BC


def step_canvases_(rows: CanvasBatch, best_BC: Tensor, entropy_BC: Tensor, sampled_BC: Tensor, noise_BC: Tensor) -> None:
    """Every row's next canvas, in place; rows that have settled or used up their steps stay as they are."""
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
    C, S, V, WIDE: tl.constexpr, SAMPLE: tl.constexpr, NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here = at < C
    step = tl.load(steps + row)
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    base = _mix(seed ^ seed, seed)
    block, now = tl.load(blocks + row).to(tl.int64), (step + 1).to(tl.int64)
    zero = at.to(tl.int64) * 0
    for stream in tl.static_range(1, 3):
        x = _mix(base + zero.to(tl.uint64), zero + stream)
        x = _mix(x, zero + block)
        x = _mix(x, zero + now)
        x = _mix(x, at.to(tl.int64))
        if stream == SAMPLE:
            tl.store(uniform + row * C + at, (x >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=here)
        else:
            token = ((x >> 32) * V.to(tl.uint64)) >> 32
            tl.store(noise + row * C + at, token.to(tl.int64), mask=here)
    heat = tl.load(temperatures + row * S + tl.minimum(step, S - 1))
    tl.store(temperature + row * C + at, zero.to(tl.float32) + heat, mask=here)


@triton.jit
def _step_canvases(
    best, entropy, sampled, noise, ids_out, best_out, entropy_out, accepted_out, unchanged, steps, settled,
    limits, bounds, confidences, stabilities, C, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    here, place = at < C, row * C + at
    step = tl.load(steps + row)
    if (tl.load(settled + row) == 0) & (step < tl.load(limits + row)):
        worry = tl.load(entropy + place, mask=here, other=float("inf"))
        token = tl.load(best + place, mask=here, other=0)
        same = tl.sum((here & (token != tl.load(best_out + place, mask=here, other=0))).to(tl.int32), axis=0) == 0
        # Who is accepted: the entropy of all that are surer, or as sure and further to the left, stays within the bound.
        surer = (worry[None, :] < worry[:, None]) | ((worry[None, :] == worry[:, None]) & (at[None, :] < at[:, None]))
        before = tl.sum(tl.where(surer & here[None, :], worry[None, :], 0.0), axis=1)
        accepted = here & (before <= tl.load(bounds + row))
        drawn = tl.load(sampled + place, mask=here, other=0)
        tl.store(ids_out + place, tl.where(accepted, drawn, tl.load(noise + place, mask=here, other=0)), mask=here)
        tl.store(best_out + place, token, mask=here)
        tl.store(entropy_out + place, worry, mask=here)
        tl.store(accepted_out + place, accepted, mask=here)
        still = tl.where(same & (step > 0), tl.load(unchanged + row) + 1, 0)
        mean = tl.sum(tl.where(here, worry, 0.0), axis=0) / C
        tl.store(unchanged + row, still)
        tl.store(steps + row, step + 1)
        tl.store(settled + row, (still >= tl.load(stabilities + row)) & (mean < tl.load(confidences + row)))
