"""Who moves which weight and how fast: Muon for matrices, AdamW for the rest, a schedule, a running average.

Weights are float32 whatever the model computes in. Experts are stacked matrices, which Muon cannot see as such: it is given
each expert's matrix, gate and up apart, as a view into the stack. State is a flat dictionary of tensors by name, updated
in place, so that checkpoints can be read straight into it. Knows nothing of losses, data or files.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from redraft.kernels.backend import has_bf16


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Rates and their schedule."""

    muon_lr: float = 2.5e-3  # in units of AdamW's: updates are scaled to the same root mean square
    adamw_lr: float = 2e-3
    weight_decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # largest norm of the gradient
    warmup: int = 100  # steps to full rate
    cooldown: float = 0.4  # last share of the steps: the rate falls to zero
    ema: float = 0.998

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adamw_lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)!r}")
        for name in ("cooldown", "ema", "momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)!r}")
        for name in ("warmup", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")


def rate(step: int, left: float, cfg: OptimConfig) -> float:
    """The share of the full rate at a step (0 is the first) with this share of the run left: up, along, down to zero."""
    up = (step + 1) / (cfg.warmup + 1)
    down = left / cfg.cooldown if cfg.cooldown else 1.0
    return max(0.0, min(1.0, up, down))


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon moves it: maps between hidden states. Embedding, router and norms are AdamW's."""
    return weight.dim() >= 2 and "embed_tokens" not in name and "router" not in name


def matrices(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of a weight, each with a name of its own. Under sharding a stack holds only this process's experts."""
    if weight.dim() == 2:
        yield name, weight
        return
    first, stack = 0, weight
    if isinstance(weight, DTensor):
        first, stack = _first_here(weight), weight.to_local()
    for expert, matrix in enumerate(stack, first):
        halves = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
        for part, half in enumerate(halves):
            yield f"{name}.{expert}.{part}", half


def _first_here(weight: DTensor) -> int:
    """The index of this process's first row of a weight that is sharded along its first axis."""
    mesh = weight.device_mesh
    each = -(-weight.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * each, weight.shape[0])


class Muon(torch.optim.Muon):
    """torch's Muon, all matrices of one shape at a time: one by one, a hundred small products leave a GPU waiting.

    Steps are sized to AdamW's ("match_rms_adamw") and momentum is Nesterov's, whatever the constructor was told otherwise.
    Sharded matrices are gathered for it, so that every process finds the same move and makes its own part of it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """The move of torch's own, in the same arithmetic."""
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            weights, gradients = [_local(p) for p in moved], [_local(p.grad) for p in moved]
            momenta = [_local(self.state[p]["momentum_buffer"]) for p in moved]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            alike: dict[torch.Size, list[int]] = {}
            for at, p in enumerate(moved):
                alike.setdefault(p.shape, []).append(at)
            for shape, members in alike.items():
                stack = torch.stack([_gathered(updates[at], moved[at]) for at in members])
                turned = orthogonal(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parts = [_part(matrix, moved[at]) for matrix, at in zip(turned.float(), members, strict=True)]
                size = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_([weights[at] for at in members], parts, alpha=-size)


def orthogonal(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Each matrix of a stack with its singular values brought near one, by Newton and Schulz, in bf16 where there is one."""
    a, b, c = coefficients
    x = stack.bfloat16() if has_bf16(stack.device) else stack.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def clip(gradients: list[Tensor], most: float) -> Tensor:
    """Shrinks gradients to a norm of at most `most`; returns what it was. Summed in float64: the same however sharded.

    Gradients that are not finite become zero: one bad pass costs a step, not the run.
    """
    here = [_local(gradient) for gradient in gradients]
    squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in here]).square().sum()
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(squares)
    norm = squares.sqrt()
    torch._foreach_mul_(here, (most / norm.clamp(min=most)).float())
    for gradient in here:
        gradient.masked_fill_(~norm.isfinite(), 0.0)
    return norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gathered(update: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return update
    whole = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(update, like.device_mesh, like.placements, run_check=False, **whole).full_tensor()


def _part(matrix: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return matrix
    first = _first_here(like)
    return matrix[first : first + like.to_local().shape[0]]


class Optimizer:
    """Both optimizers and the average of one model."""

    def __init__(self, model: nn.Module, cfg: OptimConfig) -> None:
        self.cfg = cfg
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = named
        self.stacks = [(n, p) for n, p in named.items() if is_matrix(n, p) and p.dim() > 2]
        self.pieces = {n: m.detach() for name, p in self.stacks for n, m in matrices(name, p)}
        flat = {n: p for n, p in named.items() if is_matrix(n, p) and p.dim() == 2}
        self.of_muon = {**flat, **self.pieces}
        self.of_adamw = {n: p for n, p in named.items() if not is_matrix(n, p)}
        decay = {"weight_decay": cfg.weight_decay}
        self.muon = Muon(
            self.of_muon.values(), lr=cfg.muon_lr, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw", **decay
        )
        still = [p for p in self.of_adamw.values() if p.dim() < 2]  # norms are not pulled towards zero
        moved = [p for p in self.of_adamw.values() if p.dim() >= 2]
        groups = [{"params": moved, **decay}, {"params": still, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.adamw_lr, betas=cfg.betas)
        self.average = {name: p.detach().clone() for name, p in named.items()}
        self._begin()

    def _begin(self) -> None:
        """State that both would otherwise make at their first step, so that a checkpoint finds where to go."""
        for p in self.of_muon.values():
            self.muon.state[p]["momentum_buffer"] = torch.zeros_like(p.detach())
        for p in self.of_adamw.values():
            zeros = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
            self.adamw.state[p] = {"step": torch.tensor(0.0), **zeros}

    def step(self, number: int, share: float) -> Tensor:
        """One step at this share of the full rates. Returns the gradient's norm before clipping; clears the gradients."""
        norm = clip([p.grad for p in self.weights.values() if p.grad is not None], self.cfg.clip)
        for name, p in self.stacks:
            if p.grad is not None:
                for piece, gradient in matrices(name, p.grad):
                    self.pieces[piece].grad = gradient
        for optimizer, lr in ((self.muon, self.cfg.muon_lr), (self.adamw, self.cfg.adamw_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            optimizer.step()
            optimizer.zero_grad()
        for p in self.weights.values():
            p.grad = None
        with torch.no_grad():
            averages, now = list(self.average.values()), [p.detach() for p in self.weights.values()]
            young = (1 + number) / (10 + number)  # else the average would remember the random beginning
            get_ema_multi_avg_fn(min(self.cfg.ema, young))(averages, now, None)
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold, by name; the tensors themselves, not copies."""
        found = {f"weight.{name}": p.detach() for name, p in self.weights.items()}
        found |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        for kind, optimizer, named in (("muon", self.muon, self.of_muon), ("adamw", self.adamw, self.of_adamw)):
            for name, p in named.items():
                found |= {f"{kind}.{name}.{what}": tensor for what, tensor in optimizer.state[p].items()}
        return found
