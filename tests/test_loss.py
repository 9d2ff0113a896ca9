"""The objective: its mask cell by cell, its pass equal to encode and denoise, its noise as promised, its loss by hand."""

import itertools

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask

from redraft import masks
from redraft.masks import Layout
from redraft.train import loss
from redraft.train.loss import Batch, LossConfig

BLOCK, PROMPT, LENGTH = 6, 5, 23  # 5 of prompt, blocks at 5, 11, 17
TWO = [8, 15]  # and a packed row: a document without a prompt, and one with a prompt of 3


def packed() -> Layout:
    """Row 0: one document. Row 1: two documents, the second with a prompt, then nothing (padding)."""
    positions = torch.arange(LENGTH)
    starts = torch.where(positions < PROMPT, -1, PROMPT + (positions - PROMPT) // BLOCK * BLOCK)
    inner, document = positions.clone(), torch.full((LENGTH,), -1)
    second = torch.full((LENGTH,), -1)
    document[: TWO[0]], document[TWO[0] : sum(TWO) - 2] = 0, 1
    inner[TWO[0] :] = torch.arange(LENGTH - TWO[0])
    second[: TWO[0]] = inner[: TWO[0]] // BLOCK * BLOCK
    tail = inner[TWO[0] : sum(TWO) - 2]
    second[TWO[0] : sum(TWO) - 2] = torch.where(tail < 3, -1, 3 + (tail - 3) // BLOCK * BLOCK)
    return Layout(
        torch.stack([positions, inner]), torch.stack([starts, second]), torch.stack([torch.zeros_like(positions), document])
    )


def batch(seed: int = 0) -> Batch:
    ids = torch.randint(0, tiny.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, packed())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("window", [None, 2, 5])
def test_the_training_mask_cell_by_cell(window):
    layout = packed()
    mask = masks.dense(masks.training(layout, window), 2, 2 * LENGTH, torch.device("cpu"))
    for b, q, k in itertools.product(range(2), range(2 * LENGTH), range(2 * LENGTH)):
        (qp, qs, qd), (kp, ks, kd) = (
            [int(t[b, i % LENGTH]) for t in (layout.positions, layout.starts, layout.documents)] for i in (q, k)
        )
        if q == k:
            expected = True
        elif qd != kd or (q >= LENGTH and k < LENGTH):
            expected = False
        elif q < LENGTH and k < LENGTH:
            expected = qs == ks and qs >= 0
        elif q < LENGTH:
            expected = kp < qs and (window is None or kp >= qs - (window - 1))
        else:
            expected = kp <= qp and (window is None or qp - kp < window)
        assert bool(mask[b, q, k]) == expected, (b, q, k)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_one_pass_equals_encoding_and_denoising_block_by_block(name):
    model = tiny.build(tiny.CONFIGS[name])
    data, noisy = batch(), batch(1).ids_BL
    soft = torch.randn(2, LENGTH, model.config.hidden_size)
    mask_of = loss.training_masks(model, data.layout)
    noisy_BLD, clean_BLD = model.learn(noisy, data.ids_BL, soft, data.layout.positions, mask_of)
    for row, document in ((0, 0), (1, 0), (1, 1)):
        at = (data.layout.documents[row] == document).nonzero().flatten()
        ids = data.ids_BL[row : row + 1, at]
        cache = model.new_cache(1, LENGTH)
        close(clean_BLD[row : row + 1, at], model.encode(ids, cache))
        for start in data.layout.starts[row, at].unique().tolist():
            if start >= 0:
                here = at[data.layout.starts[row, at] == start]
                cache = model.new_cache(1, LENGTH)
                if start:
                    model.encode(ids[:, :start], cache)
                expected = model.denoise(noisy[row : row + 1, here], soft[row : row + 1, here], cache)
                close(model.head(noisy_BLD[row : row + 1, here]), expected)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert (a - b).abs().max() <= 1e-4 * b.abs().max()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_with_the_dense_mask():
    model, data = tiny.build(tiny.CONFIGS["short window"]), batch()
    dense = loss.training_masks(model, data.layout)
    sparse = {}
    for layer, kind in enumerate(model.config.layer_types):
        rule = masks.training(data.layout, model.config.layer_window(layer))
        size = 2 * LENGTH
        sparse[kind] = create_block_mask(lambda b, h, q, k, rule=rule: rule(b, q, k), 2, None, size, size, device="cpu")
    with torch.no_grad():
        pairs = [model.learn(data.ids_BL, data.ids_BL, None, data.layout.positions, m) for m in (dense, sparse)]
    for a, b in zip(*pairs, strict=True):
        close(a, b)


def test_noise_levels_are_one_per_block_stratified_and_sometimes_full():
    rows = 64
    layout = Layout(*(t[:1].expand(rows, -1) for t in (packed().positions, packed().starts, packed().documents)))
    data = Batch(torch.zeros(rows, LENGTH, dtype=torch.long), layout)
    t = loss.noise_levels(data, LossConfig(full_noise=0.0), generator())
    for start in (5, 11, 17):
        block = t[:, layout.starts[0] == start]
        assert (block == block[:, :1]).all()
    levels = t.unique()
    assert len(levels) == 4 * rows  # three blocks and the prompt of every row
    assert (levels.diff() - 1 / len(levels)).abs().max() < 1e-3  # evenly spread over (0, 1)
    full = loss.noise_levels(data, LossConfig(full_noise=0.25), generator())
    assert 0.15 < (full == 1).float().mean() < 0.35


def test_corruption_replaces_a_share_t_of_the_canvas_and_nothing_else():
    data = batch()
    big = Batch(data.ids_BL.repeat(300, 1), Layout(*(getattr(data.layout, n).repeat(300, 1) for n in NAMES)))
    for t in (0.0, 0.3, 1.0):
        noisy = loss.corrupt(big, torch.full(big.ids_BL.shape, t), tiny.VOCAB, generator())
        changed = (noisy != big.ids_BL)[big.canvas_BL].float().mean()
        assert abs(changed - t * (1 - 1 / tiny.VOCAB)) < 0.03
        assert torch.equal(noisy[~big.canvas_BL], big.ids_BL[~big.canvas_BL])


NAMES = ("positions", "starts", "documents")


def test_the_losses_are_the_plain_means():
    model, data = tiny.build(tiny.BASE), batch()
    cfg = LossConfig(self_condition=0.0, ar_weight=0.5)
    got = loss.losses(model, data, cfg, generator(3))
    rng = generator(3)
    noisy = loss.corrupt(data, loss.noise_levels(data, cfg, rng), tiny.VOCAB, rng)
    noisy_BLD, clean_BLD = model.learn(
        noisy, data.ids_BL, None, data.layout.positions, loss.training_masks(model, data.layout)
    )
    per_token = F.cross_entropy(model.head(noisy_BLD).transpose(1, 2), data.ids_BL, reduction="none")
    denoiser = per_token[data.canvas_BL].mean()
    ahead = F.cross_entropy(model.head(clean_BLD)[:, :-1].transpose(1, 2), data.ids_BL[:, 1:], reduction="none")
    ar = ahead[data.next_BL[:, :-1]].mean()
    assert torch.allclose(got.denoiser, denoiser, rtol=1e-5)
    assert torch.allclose(got.ar, ar, rtol=1e-5)
    assert torch.allclose(got.total, denoiser + 0.5 * ar, rtol=1e-5)
    assert not data.next_BL[1, TWO[0] - 1]  # the last token of a document predicts nothing


def test_the_second_pass_is_told_what_the_first_believed():
    model, data = tiny.build(tiny.BASE), batch()
    mask_of = loss.training_masks(model, data.layout)
    soft, noisy = loss.first_look(model, data.ids_BL, data, mask_of, LossConfig(self_condition=1.0, t_min=1.0), generator())
    hidden, _ = model.learn(data.ids_BL, data.ids_BL, None, data.layout.positions, mask_of)
    expected = model.soft_embed(model.head(hidden)) * data.canvas_BL[..., None]
    close(soft, expected)
    assert torch.equal(noisy, data.ids_BL)
    none, _ = loss.first_look(model, data.ids_BL, data, mask_of, LossConfig(self_condition=0.0), generator())
    assert not none.any()


def test_on_policy_rows_carry_the_models_own_samples_where_noise_had_struck():
    model, data = tiny.decided(tiny.BASE), batch()
    mask_of = loss.training_masks(model, data.layout)
    noisy = loss.corrupt(data, torch.full(data.ids_BL.shape, 0.5), tiny.VOCAB, generator(1))
    cfg = LossConfig(self_condition=1.0, on_policy=1.0)
    _, own = loss.first_look(model, noisy, data, mask_of, cfg, generator(2))
    struck = noisy != data.ids_BL
    assert torch.equal(own[~struck], noisy[~struck])
    logits = model.head(model.learn(noisy, data.ids_BL, None, data.layout.positions, mask_of)[0])
    ranks = (logits > logits.gather(-1, own[..., None])).sum(-1)[struck]
    assert ranks.float().mean() < 0.1 * tiny.VOCAB  # noise would lie in the middle


def test_the_same_seed_gives_the_same_loss_and_gradients_reach_every_weight():
    model, data = tiny.build(tiny.CONFIGS["every expert"]).requires_grad_(True), batch()
    cfg = LossConfig(self_condition=1.0, on_policy=0.5)
    first = loss.losses(model, data, cfg, generator(5)).total
    assert torch.equal(loss.losses(model, data, cfg, generator(5)).total, first)
    assert not torch.equal(loss.losses(model, data, cfg, generator(6)).total, first)
    first.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


def test_a_few_steps_learn_a_sentence():
    """The loss falls, and the model then repairs a corrupted page: the whole objective points the right way."""
    torch.manual_seed(0)
    text = tiny.byte_tokenizer().encode("the cat sat on the mat. ")
    ids = torch.tensor([text[:LENGTH]] * 4)
    positions = torch.arange(LENGTH).expand(4, -1)
    starts = torch.where(positions < PROMPT, -1, PROMPT + (positions - PROMPT) // BLOCK * BLOCK)
    data = Batch(ids, Layout(positions, starts, torch.zeros_like(positions)))
    model = tiny.build(tiny.BASE).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rng, history = generator(0), []
    for _ in range(60):
        result = loss.losses(model, data, LossConfig(), rng)
        optimizer.zero_grad()
        result.total.backward()
        optimizer.step()
        history.append(float(result.denoiser.detach()))
    assert sum(history[-5:]) < 0.2 * sum(history[:5])


@pytest.mark.parametrize("change", [{"full_noise": 1.5}, {"self_condition": -0.1}, {"ar_weight": -1.0}, {"t_min": 0.0}])
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        LossConfig(**change)
