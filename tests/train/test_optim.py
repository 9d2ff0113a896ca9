"""Batched Muon = torch's Muon, and exactly one of the two optimizers updates each weight."""

import pytest
import tiny
import torch

from redraft.train import optim
from redraft.train.optim import Muon, OptimConfig, Optimizer, clip_gradients, learning_rate_scale, split_matrices

SHAPES = [(24, 8), (8, 24), (16, 16), (24, 8), (16, 16), (5, 40)]


def test_muon_equals_torchs_muon(monkeypatch):
    monkeypatch.setattr(optim, "has_bf16", lambda device: True)  # torch's computes in bf16 wherever it is
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    ours, theirs = ([torch.nn.Parameter(t.clone()) for t in start] for _ in range(2))
    settings = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    both = Muon(ours, **settings), torch.optim.Muon(theirs, **settings)
    for p in ours:
        both[0].state[p]["momentum_buffer"] = torch.zeros_like(p)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        for optimizer in both:
            optimizer.step()
    for before, p, q in zip(start, ours, theirs, strict=True):
        assert (p - q).norm() < 0.01 * (q - before).norm()


def test_every_weight_has_one_optimizer_and_stacks_are_split():
    model = tiny.build(tiny.BASE).requires_grad_(True)
    optimizer = Optimizer(model, OptimConfig())
    moved = sum(p.numel() for p in [*optimizer.muon_weights.values(), *optimizer.adamw_weights.values()])
    assert moved == sum(p.numel() for p in model.parameters())
    assert not any("embed" in n or "router" in n or "norm" in n for n in optimizer.muon_weights)
    stack = model.layers[0].experts.gate_up_proj
    pieces = dict(split_matrices("gate_up_proj", stack))
    assert len(pieces) == 2 * tiny.BASE.num_experts
    assert torch.equal(torch.cat([pieces["gate_up_proj.3.0"], pieces["gate_up_proj.3.1"]]), stack[3])


def test_a_step_updates_every_weight_and_the_average():
    model = tiny.build(tiny.BASE).requires_grad_(True)
    optimizer = Optimizer(model, OptimConfig())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    norm = optimizer.step(0, 1.0)
    assert norm > 1
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
        assert p.grad is None
        assert torch.allclose(optimizer.average[name], before[name].lerp(p.detach(), 0.9), atol=1e-6)


def test_gradients_are_clipped_as_torch_does():
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    for most in (0.5, 1e6):
        ours, theirs = [t.clone() for t in start], [torch.nn.Parameter(t.clone()) for t in start]
        for p, t in zip(theirs, start, strict=True):
            p.grad = t.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs, most)
        assert torch.allclose(clip_gradients(ours, most).float(), expected)
        for t, p in zip(ours, theirs, strict=True):
            assert torch.allclose(t, p.grad, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_costs_one_step(bad):
    model = tiny.build(tiny.BASE).requires_grad_(True)
    optimizer = Optimizer(model, OptimConfig(weight_decay=0.0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, bad if number == 3 else 1.0)
    assert not optimizer.step(0, 1.0).isfinite()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_rates_and_decay_reach_the_right_weights():
    model = tiny.build(tiny.BASE).requires_grad_(True)
    optimizer = Optimizer(model, OptimConfig(muon_lr=1e-2, adamw_lr=1e-2, weight_decay=0.5))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0, 0.5)  # nothing to follow: what moves is decay alone
    for name, p in model.named_parameters():
        expected = before[name] if p.dim() < 2 else before[name] * (1 - 0.5 * 1e-2 * 0.5)
        assert torch.allclose(p, expected, rtol=1e-6), name


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 1 / 11), (9, 10 / 11), (10, 1.0), (59, 1.0), (80, 0.5), (99, 0.025), (100, 0)]
)
def test_the_learning_rate_warms_up_and_cools_down(step, expected):
    assert learning_rate_scale(step, 1 - step / 100, OptimConfig(warmup=10, cooldown=0.4)) == pytest.approx(expected)


@pytest.mark.parametrize("change", [{"muon_lr": 0.0}, {"clip": -1.0}, {"cooldown": 1.5}, {"ema": -0.1}, {"warmup": -1}])
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        OptimConfig(**change)
