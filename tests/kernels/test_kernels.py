"""Every operation equals its definition in float64, at odd shapes."""

import pytest
import torch
import torch.nn.functional as F

from redraft import kernels
from redraft.kernels import attention
from redraft.kernels.attention import SCORES_AT_ONCE
from redraft.kernels.vocabulary import sample_from

torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 7, 13), (3, 5, 4, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    truth = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6) ** -0.5
    rounding = 2 * torch.finfo(dtype).eps * truth.abs().max()
    assert (kernels.rms_norm(x, None, 1e-6).double() - truth).abs().max() <= rounding
    assert (kernels.rms_norm(x, weight, 1e-6).double() - truth * weight.double()).abs().max() <= rounding


def test_rope_rotates_pairs_by_position():
    cos, sin = kernels.rope_table(torch.tensor([[0, 3, 8]]), 8, 100.0, 1.0, torch.float32)
    x = torch.randn(1, 3, 2, 8)
    rotated = kernels.apply_rope(x, cos, sin)
    assert torch.allclose(rotated[:, 0], x[:, 0])
    for s, position in enumerate((0, 3, 8)):
        for pair in range(4):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / 8), dtype=torch.float64)
            a, b = x[0, s, :, pair].double(), x[0, s, :, pair + 4].double()
            assert torch.allclose(rotated[0, s, :, pair].double(), a * angle.cos() - b * angle.sin(), atol=1e-5)
            assert torch.allclose(rotated[0, s, :, pair + 4].double(), b * angle.cos() + a * angle.sin(), atol=1e-5)


def test_proportional_rope_leaves_other_pairs_unchanged():
    cos, sin = kernels.rope_table(torch.tensor([[5]]), 16, 1e6, 0.25, torch.float32)
    x = torch.randn(1, 1, 1, 16)
    rotated = kernels.apply_rope(x, cos, sin)
    unchanged = [i for i in range(16) if torch.equal(rotated[..., i], x[..., i])]
    assert unchanged == [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("mask_rows", [0, 1, 3])
@pytest.mark.parametrize("scores_at_once", [None, 1, 2 * 6 * 11 * 2])
@pytest.mark.parametrize("as_on_a_gpu", [None, "without gradients", "with gradients"])
def test_attention(heads, groups, mask_rows, scores_at_once, as_on_a_gpu, monkeypatch):
    """Whether all queries attend at once, one after another, or two at a time; with torch's grouped kernels or without."""
    if scores_at_once is not None:
        monkeypatch.setitem(SCORES_AT_ONCE, "cpu", scores_at_once)
    q, k, v = torch.randn(2, 3, heads, 8), torch.randn(2, 11, groups, 8), torch.randn(2, 11, groups, 8)
    if as_on_a_gpu:
        monkeypatch.setattr(attention, "has_no_grouped_kernel", lambda q: True)
        q.requires_grad_(as_on_a_gpu == "with gradients")
    mask = torch.rand(2, mask_rows, 11) < 0.6 if mask_rows else None
    if mask is not None:
        mask[..., 0] = True
    wide = [t.double().repeat_interleave(heads // groups, dim=2).transpose(1, 2) for t in (k, v)]
    scores = q.double().transpose(1, 2) @ wide[0].transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
    truth = (scores.softmax(-1) @ wide[1]).transpose(1, 2).flatten(2)
    assert (kernels.attend(q, k, v, mask) - truth).abs().max() < 1e-5


@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 3, 1), (7, 40, 2), (13, 4, 4), (31, 5, 3)])
def test_experts_equal_a_loop_over_tokens(tokens, experts, top):
    x, gate_up, down = torch.randn(tokens, 6), torch.randn(experts, 10, 6), torch.randn(experts, 6, 5)
    chosen = torch.stack([torch.randperm(experts)[:top] for _ in range(tokens)])
    weights = torch.rand(tokens, top)
    truth = torch.zeros(tokens, 6, dtype=torch.float64)
    for n in range(tokens):
        for expert, weight in zip(chosen[n].tolist(), weights[n], strict=True):
            gate, up = (gate_up[expert].double() @ x[n].double()).chunk(2)
            truth[n] += weight * (down[expert].double() @ (F.gelu(gate, approximate="tanh") * up))
    assert (kernels.gated_experts(x, chosen, weights, gate_up, down) - truth).abs().max() < 1e-4


@pytest.mark.parametrize("vocab", [2, 127, 128, 129, 1000])
@pytest.mark.parametrize("scale", [0.0, 3.0, 40.0])
def test_argmax_entropy_and_sample(vocab, scale):
    logits, uniform = scale * torch.randn(2, 5, vocab), torch.rand(2, 5, dtype=torch.float64)
    probs = logits.double().softmax(-1)
    prediction = kernels.argmax_entropy_sample(logits, uniform)
    assert torch.equal(prediction.best_BC, logits.argmax(-1))
    truth = -(probs * probs.clamp(min=1e-300).log()).sum(-1)
    assert (prediction.entropy_BC - truth).abs().max() < 1e-5
    assert (prediction.entropy_BC >= 0).all()
    total = probs.cumsum(-1)
    sampled = prediction.sampled_BC[..., None]
    after, before = total.gather(-1, sampled)[..., 0], (total - probs).gather(-1, sampled)[..., 0]
    assert (before - 1e-6 <= uniform).all()
    assert (uniform <= after + 1e-6).all()


def test_nearly_certain_entropy_is_not_lost_to_rounding():
    logits = torch.zeros(1, 1, 262_144)
    logits[..., 5] = 30.0
    probs = logits.double().softmax(-1)
    truth = -(probs * probs.log()).sum()
    assert abs(kernels.argmax_entropy_sample(logits, torch.rand(1, 1)).entropy_BC - truth) < 1e-7 < truth


def test_samples_follow_the_probabilities():
    weights = torch.tensor([0.5, 0.0, 2.0, 1.5]).expand(40_000, 4)
    counts = torch.bincount(sample_from(weights, torch.rand(40_000, dtype=torch.float64)), minlength=4) / 40_000
    assert counts[1] == 0
    assert (counts - torch.tensor([0.125, 0.0, 0.5, 0.375])).abs().max() < 0.02


def test_sampling_at_both_ends_of_the_uniform_range():
    weights = torch.zeros(2, 300)
    weights[:, 130:140] = 1.0
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_from(weights, uniform).tolist() == [130, 139]


def test_soft_embedding_equals_its_definition():
    logits, table = 30 * torch.randn(2, 3, 50), torch.randn(50, 7)
    truth = logits.double().softmax(-1) @ table.double()
    assert (kernels.soft_embed(logits, table) - truth).abs().max() < 1e-5


def test_softcap():
    logits = torch.randn(3, 5) * 50
    truth = 30 * torch.tanh(logits.double() / 30)
    with_gradient = logits.clone().requires_grad_()
    capped = kernels.softcap_(with_gradient, 30.0)
    assert (capped - truth).abs().max() < 1e-5
    capped.sum().backward()
    assert with_gradient.grad is not None
    assert (kernels.softcap_(logits, 30.0) - truth).abs().max() < 1e-5
