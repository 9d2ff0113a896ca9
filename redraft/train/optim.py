"""Optimizers: Muon for matrices, AdamW for all other weights, a learning-rate schedule, an exponential moving average.

Weights are float32 whatever precision the model computes in. Expert weights are stacks of matrices; Muon gets each expert's
matrix, gate and up separately, as a view into the stack. The state is a flat dictionary of named tensors that are updated in
place, so a checkpoint loads directly into it.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from redraft.kernels.backend import has_bf16


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Learning rates and their schedule."""

    muon_lr: float = 2.5e-3  # updates are scaled to AdamW's root mean square, so both rates have the same unit
    adamw_lr: float = 2e-3
    weight_decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0  # the largest gradient norm
    warmup: int = 100  # steps to the full learning rate
    cooldown: float = 0.4  # over this last share of the run the learning rate falls to zero
    ema: float = 0.998
    muon: bool = True  # False: AdamW updates all weights

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


def learning_rate_scale(step: int, remaining: float, cfg: OptimConfig) -> float:
    """Returns the factor on the learning rates: linear warmup, constant, linear cooldown.

    `step` counts from 0; `remaining` is the share of the run that is left.
    """
    warmup = (step + 1) / (cfg.warmup + 1)
    cooldown = remaining / cfg.cooldown if cfg.cooldown else 1.0
    return max(0.0, min(1.0, warmup, cooldown))


def uses_muon(name: str, weight: Tensor) -> bool:
    """Whether Muon updates this weight. AdamW updates the embedding, the router and the norms."""
    return weight.dim() >= 2 and "embed_tokens" not in name and "router" not in name


def split_matrices(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the named matrices of a weight. A sharded stack yields only this process's experts."""
    if weight.dim() == 2:
        yield name, weight
        return
    first_expert = 0
    stack = weight
    if isinstance(weight, DTensor):
        first_expert = _first_local_row(weight)
        stack = weight.to_local()
    for expert, matrix in enumerate(stack, first_expert):
        halves = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
        for part, half in enumerate(halves):
            yield f"{name}.{expert}.{part}", half


def _first_local_row(weight: DTensor) -> int:
    """Returns the index of this process's first row of a weight that is sharded along its first axis."""
    mesh = weight.device_mesh
    rows_per_process = -(-weight.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows_per_process, weight.shape[0])


class Muon(torch.optim.Muon):
    """torch's Muon with all matrices of one shape in one batch: a hundred small products would leave a GPU idle.

    Updates always match AdamW's root mean square ("match_rms_adamw") and use Nesterov momentum, whatever the constructor
    got. Sharded matrices are gathered first, so that every process computes the same update and applies its own part.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates the weights with the same arithmetic as torch's own step."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            weights = [_to_local(p) for p in params]
            gradients = [_to_local(p.grad) for p in params]
            momenta = [_to_local(self.state[p]["momentum_buffer"]) for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            indices_of_shape: dict[torch.Size, list[int]] = {}
            for index, p in enumerate(params):
                indices_of_shape.setdefault(p.shape, []).append(index)
            for shape, indices in indices_of_shape.items():
                stack = torch.stack([_gather(updates[i], params[i]) for i in indices])
                orthogonal = orthogonalize(stack, group["ns_coefficients"], group["ns_steps"], group["eps"])
                parts = [_local_part(matrix, params[i]) for matrix, i in zip(orthogonal.float(), indices, strict=True)]
                step_size = group["lr"] * 0.2 * math.sqrt(max(shape))
                torch._foreach_add_([weights[i] for i in indices], parts, alpha=-step_size)


def orthogonalize(stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Brings the singular values of each matrix near one by Newton-Schulz iterations, in bf16 where the device has it."""
    a, b, c = coefficients
    x = stack.bfloat16() if has_bf16(stack.device) else stack.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def clip_gradients(gradients: list[Tensor], max_norm: float) -> Tensor:
    """Scales gradients to a norm of at most `max_norm`; returns the norm before. Sums in float64: sharding changes nothing.

    Gradients that are not finite become zero: one bad batch costs a step, not the run.
    """
    local = [_to_local(gradient) for gradient in gradients]
    squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in local]).square().sum()
    if isinstance(gradients[0], DTensor):
        dist.all_reduce(squares)
    norm = squares.sqrt()
    torch._foreach_mul_(local, (max_norm / norm.clamp(min=max_norm)).float())
    for gradient in local:
        gradient.masked_fill_(~norm.isfinite(), 0.0)
    return norm


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gather(update: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return update
    whole = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(update, like.device_mesh, like.placements, run_check=False, **whole).full_tensor()


def _local_part(matrix: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return matrix
    first = _first_local_row(like)
    return matrix[first : first + like.to_local().shape[0]]


class Optimizer:
    """Muon, AdamW and the moving average of one model."""

    def __init__(self, model: nn.Module, cfg: OptimConfig) -> None:
        self.cfg = cfg
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = named
        by_muon = {n for n, p in named.items() if cfg.muon and uses_muon(n, p)}
        self.stacks = [(n, p) for n, p in named.items() if n in by_muon and p.dim() > 2]
        self.expert_matrices = {n: m.detach() for name, p in self.stacks for n, m in split_matrices(name, p)}
        plain_matrices = {n: p for n, p in named.items() if n in by_muon and p.dim() == 2}
        self.muon_weights = {**plain_matrices, **self.expert_matrices}
        self.adamw_weights = {n: p for n, p in named.items() if n not in by_muon}
        decay = {"weight_decay": cfg.weight_decay}
        # By name: the optimizer, its weights and its learning rate. An optimizer without weights is left out.
        self.optimizers: dict[str, tuple[torch.optim.Optimizer, dict[str, Tensor], float]] = {}
        if self.muon_weights:
            options = {"lr": cfg.muon_lr, "momentum": cfg.momentum, "adjust_lr_fn": "match_rms_adamw", **decay}
            self.optimizers["muon"] = (Muon(self.muon_weights.values(), **options), self.muon_weights, cfg.muon_lr)
        norms = [p for p in self.adamw_weights.values() if p.dim() < 2]  # without weight decay
        others = [p for p in self.adamw_weights.values() if p.dim() >= 2]
        groups = [{"params": others, **decay}, {"params": norms, "weight_decay": 0.0}]
        if self.adamw_weights:
            adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.adamw_lr, betas=cfg.betas)
            self.optimizers["adamw"] = (adamw, self.adamw_weights, cfg.adamw_lr)
        self.average = {name: p.detach().clone() for name, p in named.items()}
        self._init_state()

    def _init_state(self) -> None:
        """Creates the state that both optimizers would create at their first step, so that a checkpoint can load into it."""
        for kind, (optimizer, weights, _) in self.optimizers.items():
            names = ("momentum_buffer",) if kind == "muon" else ("exp_avg", "exp_avg_sq")
            for p in weights.values():
                first = {} if kind == "muon" else {"step": torch.tensor(0.0)}
                optimizer.state[p] = {**first, **{name: torch.zeros_like(p.detach()) for name in names}}

    def step(self, step: int, scale: float) -> Tensor:
        """Updates the weights with learning rates times `scale`.

        Returns the gradient norm before clipping; clears gradients.
        """
        norm = clip_gradients([p.grad for p in self.weights.values() if p.grad is not None], self.cfg.clip)
        for name, p in self.stacks:
            if p.grad is not None:
                for matrix_name, gradient in split_matrices(name, p.grad):
                    self.expert_matrices[matrix_name].grad = gradient
        for optimizer, _, lr in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad()
        for p in self.weights.values():
            p.grad = None
        with torch.no_grad():
            averages = list(self.average.values())
            weights = [p.detach() for p in self.weights.values()]
            early_decay = (1 + step) / (10 + step)  # else the average would keep the random initial weights for long
            get_ema_multi_avg_fn(min(self.cfg.ema, early_decay))(averages, weights, None)
        return norm

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights."""
        with torch.no_grad():
            kept = {name: p.detach().clone() for name, p in self.weights.items()}
            for name, p in self.weights.items():
                p.copy_(self.average[name])
            try:
                yield
            finally:
                for name, p in self.weights.items():
                    p.copy_(kept[name])

    def state(self) -> dict[str, Tensor]:
        """Returns every tensor that a checkpoint must hold, by name; the tensors themselves, not copies."""
        state = {f"weight.{name}": p.detach() for name, p in self.weights.items()}
        state |= {f"average.{name}": tensor for name, tensor in self.average.items()}
        for kind, (optimizer, weights, _) in self.optimizers.items():
            for name, p in weights.items():
                state |= {f"{kind}.{name}.{key}": tensor for key, tensor in optimizer.state[p].items()}
        return state
