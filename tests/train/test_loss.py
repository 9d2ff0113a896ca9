"""The objective: its mask cell by cell, its forward equal to encode and denoise, its documented noise, its loss by hand."""

import itertools
from dataclasses import replace

import pytest
import tiny
import torch
import torch.nn.functional as F

from redraft.model import masks
from redraft.model.masks import Layout
from redraft.model.moe import Routing
from redraft.train import loss
from redraft.train.evals import masked
from redraft.train.loss import Batch, LossConfig
from redraft.train.noise import draw_levels, number_canvases, select_noised

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
    mask = masks.dense(masks.training(masks.spans(layout, window)), 2, 2 * LENGTH, torch.device("cpu"))
    for b, q, k in itertools.product(range(2), range(2 * LENGTH), range(2 * LENGTH)):
        (qp, qs, qd), (kp, ks, kd) = (
            [int(t[b, i % LENGTH]) for t in (layout.positions, layout.starts, layout.documents)] for i in (q, k)
        )
        if q == k:
            expected = True
        elif qd != kd or qd == -1 or (q >= LENGTH and k < LENGTH):
            expected = False
        elif q < LENGTH and k < LENGTH:
            expected = qs == ks and qs >= 0
        elif q < LENGTH:
            expected = kp < qs and (window is None or kp >= qs - (window - 1))
        else:
            expected = kp <= qp and (window is None or qp - kp < window)
        assert bool(mask[b, q, k]) == expected, (b, q, k)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_the_training_forward_equals_encode_and_denoise_canvas_by_canvas(name):
    model = tiny.build(tiny.CONFIGS[name])
    data, noisy = batch(), batch(1).ids_BL
    soft = torch.randn(2, LENGTH, model.config.hidden_size)
    mask_of = loss.dense_masks(model.config, data.layout)
    noisy_BLD, clean_BLD, _ = model.forward_train(noisy, data.ids_BL, soft, data.layout.positions, mask_of)
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


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_with_the_dense_mask_batch_after_batch():
    model, data = tiny.build(tiny.CONFIGS["short window"]), batch()
    sparse = loss.SparseMasks(model.config, 2, LENGTH, "cpu")
    for layout in (data.layout, Layout(*(getattr(data.layout, n).flip(0) for n in NAMES))):
        both = (loss.dense_masks(model.config, layout), sparse(layout))
        with torch.no_grad():
            pairs = [model.forward_train(data.ids_BL, data.ids_BL, None, layout.positions, m)[:2] for m in both]
            firsts = [
                model.forward_train(data.ids_BL[:1], data.ids_BL[:1], None, layout.positions[:1], loss.slice_masks(m, 1))[:2]
                for m in both
            ]
        for a, b in (*zip(*pairs, strict=True), *zip(*firsts, strict=True)):
            close(a, b)


def many(rows: int) -> Batch:
    layout = Layout(*(getattr(packed(), n).repeat(rows // 2, 1) for n in NAMES))
    return Batch(torch.randint(0, tiny.VOCAB, (rows, LENGTH), generator=generator()), layout)


def test_canvases_are_numbered_over_the_batch():
    data = many(4)
    index, count = number_canvases(data.layout)
    seen = {}
    for b, i in itertools.product(range(4), range(LENGTH)):
        key = (b, *(int(getattr(data.layout, n)[b, i]) for n in ("starts", "documents")))
        if key[1] < 0 or key[2] < 0:
            assert index[b, i] == -1
        else:
            assert seen.setdefault(key, int(index[b, i])) == index[b, i]
    assert sorted(seen.values()) == list(range(count))


def test_noise_levels_are_stratified_and_sometimes_full():
    levels = draw_levels(200, generator()).sort().values
    assert (levels.diff() - 1 / 200).abs().max() < 1e-3  # evenly spread over (0, 1)
    offsets = {round(float(draw_levels(4, generator(i)).min()), 4) for i in range(9)}
    assert len(offsets) == 9  # the slices are the same, the place inside them is not
    squared = draw_levels(200, generator(), power=2.0).sort().values
    assert torch.allclose(squared, levels.square(), atol=1e-4)
    full = draw_levels(2000, generator(), full=0.25)
    assert 0.2 < (full == 1).float().mean() < 0.3


@pytest.mark.parametrize("t", [1e-4, 0.3, 1.0])
def test_noise_replaces_a_share_t_of_the_canvas_and_nothing_else(t):
    data = many(600)
    index, count = number_canvases(data.layout)
    hit = select_noised(data.layout, torch.full((count,), t), index, 0.0, generator())
    assert abs(hit[data.canvas_BL].float().mean() - t) < 0.02
    assert not hit[~data.canvas_BL].any()


def canvases_of(length: int) -> Batch:
    """300 rows: a prompt of 3 tokens, and two canvases of so many. All clean tokens are 0."""
    positions = torch.arange(3 + 2 * length).repeat(300, 1)
    starts = torch.where(positions < 3, -1, 3 + (positions - 3) // length * length)
    return Batch(torch.zeros_like(positions), Layout(positions, starts, torch.zeros_like(positions)))


def test_span_noise_hits_spans_of_a_canvas_and_still_a_share_t_of_it():
    layout = canvases_of(64).layout
    index, count = number_canvases(layout)
    hits = [
        select_noised(layout, torch.full((count,), 0.4), index, span_noise, generator(1)) for span_noise in (0.0, 0.5, 1.0)
    ]
    for hit in hits:
        assert abs(hit[:, 3:].float().mean() - 0.4) < 0.05
        assert not hit[:, :3].any()
    changes = [int(hit[:, 3:].int().diff(dim=1).abs().sum()) for hit in hits]
    assert changes[2] < 0.7 * changes[1] < 0.7**2 * changes[0]
    runs = [len(list(run)) for row in hits[2][:, 3:].tolist() for struck, run in itertools.groupby(row) if struck]
    assert sum(run == 1 for run in runs) < 0.1 * len(runs)  # where a block's edge cuts a stretch off
    assert max(runs) >= 32


def draw_hits(length: int, cfg: LossConfig) -> torch.Tensor:
    """Which tokens of 600 canvases noise replaces."""
    data = canvases_of(length)
    noise = loss.draw_noise(data, cfg, 10**6, generator())
    return (noise.noisy_BL != data.ids_BL)[:, 3:].reshape(600, length)


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_gap_noise_leaves_the_text_behind_a_gap(share):
    hit = draw_hits(64, LossConfig(full_noise=1.0, gap_noise=share))
    sizes = hit.sum(dim=1)
    assert torch.equal(hit, torch.arange(64) < sizes[:, None])  # noise is what stands first
    gaps = sizes[sizes < 64]
    assert abs(len(gaps) / 600 - share) < 0.05
    assert (gaps.min(), gaps.max()) == (2, 31)
    assert 7 <= gaps.median() <= 9  # the middle of 2 and 32 on a logarithmic scale is 8


@pytest.mark.parametrize(("length", "smallest", "largest"), [(1, 1, 1), (2, 2, 2), (3, 2, 2), (8, 2, 3), (128, 2, 63)])
def test_gaps_fit_their_canvas(length, smallest, largest):
    sizes = draw_hits(length, LossConfig(full_noise=1.0, gap_noise=1.0)).sum(dim=1)
    assert (sizes.min(), sizes.max()) == (smallest, largest)


def test_the_settings_of_noise_reach_the_canvases():
    plain = draw_hits(64, LossConfig(full_noise=0.0))
    assert abs(plain.float().mean() - 1 / 2) < 0.02
    weak = draw_hits(64, LossConfig(full_noise=0.0, t_power=4.0))
    assert abs(weak.float().mean() - 1 / 5) < 0.02  # the mean of t to the fourth power
    in_spans = draw_hits(64, LossConfig(full_noise=0.0, span_noise=1.0))
    assert in_spans.int().diff(dim=1).abs().sum() < 0.4 * plain.int().diff(dim=1).abs().sum()


def test_soft_embeddings_use_the_temperature_of_their_row():
    model = tiny.build(tiny.BASE)
    hidden = torch.randn(2, 3, tiny.BASE.hidden_size, generator=generator())
    soft = loss.predict_soft_embedding(model, hidden, torch.tensor([0.5, 1.0]))
    assert torch.allclose(soft[0], model.soft_embed(model.head(hidden[0]) * 2), atol=1e-6)
    assert torch.allclose(soft[1], model.soft_embed(model.head(hidden[1])), atol=1e-6)


def test_drawn_ids_are_noise_where_selected_and_clean_elsewhere():
    data = many(40)
    noise = loss.draw_noise(data, LossConfig(self_condition=0.5, on_policy=0.25, full_noise=1.0), tiny.VOCAB, generator())
    changed = (noise.noisy_BL != data.ids_BL)[data.canvas_BL].float().mean()
    assert abs(changed - (1 - 1 / tiny.VOCAB)) < 0.02
    assert torch.equal(noise.noisy_BL[~data.canvas_BL], data.ids_BL[~data.canvas_BL])
    assert (len(noise.temperature_R), len(noise.uniform_OL)) == (20, 5)
    assert 0.4 <= noise.temperature_R.min() <= 0.5
    assert 0.9 <= noise.temperature_R.max() <= 1
    shares = [
        len(loss.draw_noise(many(2), LossConfig(self_condition=0.25), 9, generator(i)).temperature_R) for i in range(200)
    ]
    assert set(shares) == {0, 1}
    assert 0.35 < sum(shares) / 200 < 0.65  # a quarter of two rows, rounded by chance


NAMES = ("positions", "starts", "documents")


def test_the_losses_are_the_plain_means():
    model, data = tiny.build(tiny.BASE), batch()
    cfg = LossConfig(self_condition=0.0, ar_weight=0.5, balance_weight=0.1)
    got = loss.compute_losses(model, data, cfg, generator(3))
    noisy = loss.draw_noise(data, cfg, tiny.VOCAB, generator(3)).noisy_BL
    mask_of = loss.dense_masks(model.config, data.layout)
    noisy_BLD, clean_BLD, routings = model.forward_train(noisy, data.ids_BL, None, data.layout.positions, mask_of)
    per_token = F.cross_entropy(model.head(noisy_BLD).transpose(1, 2), data.ids_BL, reduction="none")
    denoiser = per_token[data.canvas_BL].mean()
    ahead = F.cross_entropy(model.head(clean_BLD)[:, :-1].transpose(1, 2), data.ids_BL[:, 1:], reduction="none")
    ar = ahead[data.next_BL[:, :-1]].mean()
    assert torch.allclose(got.denoiser, denoiser, rtol=1e-5)
    assert torch.allclose(got.ar, ar, rtol=1e-5)
    assert torch.allclose(got.total, denoiser + 0.5 * ar + 0.1 * loss.load_balance(routings)[0], rtol=1e-5)
    assert not data.next_BL[1, TWO[0] - 1]  # the last token of a document predicts nothing


def test_logits_in_pieces_give_the_same_loss_and_gradients(monkeypatch):
    model, data = tiny.build(tiny.BASE).requires_grad_(True), batch()
    cfg, found = LossConfig(self_condition=1.0, on_policy=0.5), []
    for at_once in (2**28, 7 * tiny.VOCAB):
        monkeypatch.setattr(loss, "MAX_LOGITS", at_once)
        model.zero_grad()
        total = loss.compute_losses(model, data, cfg, generator(3)).total
        total.backward()
        found.append([total.detach(), *(p.grad for p in model.parameters())])
    for whole, pieces in zip(*found, strict=True):
        assert torch.allclose(whole, pieces, rtol=1e-4, atol=1e-6)


def test_gradients_agree_with_a_plain_reference():
    """The definition by hand: canvas by canvas through a cache that keeps its gradients, each loss with its own forward."""
    model, data = tiny.build(tiny.CONFIGS["every expert"]).requires_grad_(True), batch()
    cfg = LossConfig(self_condition=0.0, balance_weight=0.0)
    loss.compute_losses(model, data, cfg, generator(4)).total.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    noisy = loss.draw_noise(data, cfg, tiny.VOCAB, generator(4)).noisy_BL
    denoiser, ar = [], []
    for row, document in ((0, 0), (1, 0), (1, 1)):
        at = (data.layout.documents[row] == document).nonzero().flatten()
        ids = data.ids_BL[row, at][None]
        hidden = model.encode(ids, PrefixCache(model))
        ar.append(F.cross_entropy(model.head(hidden[0, :-1]), ids[0, 1:], reduction="none"))
        for start in sorted(set(data.layout.starts[row, at].tolist()) - {-1}):
            here = at[data.layout.starts[row, at] == start]
            cache = PrefixCache(model)
            if start:
                model.encode(ids[:, :start], cache)
            logits = model.denoise(noisy[row, here][None], None, cache)
            denoiser.append(F.cross_entropy(logits[0], data.ids_BL[row, here], reduction="none"))
    (torch.cat(denoiser).mean() + torch.cat(ar).mean()).backward()
    for name, p in model.named_parameters():
        if p.grad is None or not p.grad.any():
            assert name not in got or not got[name].any(), name
        else:
            assert (got[name] - p.grad).abs().max() <= 1e-4 * p.grad.abs().max(), name


class PrefixCache:
    """A KV cache of concatenations, through which gradients flow."""

    def __init__(self, model) -> None:
        self.config, self.length, self.pairs = model.config, 0, {}

    adapters = ()
    has_equal_lengths = False

    @property
    def lengths_B(self) -> torch.Tensor:
        return torch.tensor([self.length])

    def next_positions(self, count: int) -> torch.Tensor:
        return torch.arange(self.length, self.length + count)[None]

    def key_positions(self, layer: int) -> torch.Tensor:
        return torch.arange(self.length)[None]

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        empty = torch.zeros(1, 0, *self.config.layer_heads(layer))
        return self.pairs.get(layer, (empty, empty))

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, counts: list[int]) -> None:
        self.pairs[layer] = tuple(torch.cat(pair, dim=1) for pair in zip(self.view(layer), (k, v), strict=True))

    def advance(self, counts: list[int]) -> None:
        self.length += counts[0]


def test_the_training_forward_gets_the_self_conditioning_forwards_prediction():
    model, data = tiny.build(tiny.BASE), batch()
    mask_of = loss.dense_masks(model.config, data.layout)
    noise = loss.Noise(data.ids_BL, torch.tensor([1.0]), torch.zeros(0), torch.zeros(0, LENGTH))
    soft, noisy = loss.self_conditioning_forward(model, data, noise, data.canvas_BL, loss.slice_masks(mask_of, 1))
    hidden, _, _ = model.forward_train(data.ids_BL, data.ids_BL, None, data.layout.positions, mask_of)
    expected = model.soft_embed(model.head(hidden)) * data.canvas_BL[..., None]
    close(soft[:1], expected[:1])
    assert not soft[1].any()
    assert torch.equal(noisy, data.ids_BL)


def test_on_policy_rows_replace_noise_by_low_entropy_samples():
    model, data = tiny.decided(tiny.BASE), batch()
    mask_of = loss.dense_masks(model.config, data.layout)
    noise = loss.draw_noise(data, LossConfig(self_condition=1.0, on_policy=0.5), tiny.VOCAB, generator(1))
    noise = replace(noise, nats_O=torch.tensor([1.0]), temperature_R=torch.ones(2))
    _, own = loss.self_conditioning_forward(model, data, noise, data.canvas_BL, mask_of)
    struck = noise.noisy_BL != data.ids_BL
    assert torch.equal(own[~struck], data.ids_BL[~struck])
    assert torch.equal(own[1], noise.noisy_BL[1])  # half of two rows
    logits = model.head(model.forward_train(noise.noisy_BL, data.ids_BL, None, data.layout.positions, mask_of)[0])[0]
    probs = logits.softmax(-1)
    entropy = -(probs * probs.log()).sum(-1)
    sure = struck[0] & (entropy < 1.0)
    assert 0 < sure.sum() < struck[0].sum()
    assert torch.equal(own[0][~sure], noise.noisy_BL[0][~sure])
    ranks = (logits > logits.gather(-1, own[0][:, None])).sum(-1)[sure]
    assert ranks.float().mean() < 0.05 * tiny.VOCAB  # noise would lie in the middle


def test_with_mask_noise_only_masked_tokens_have_a_loss():
    model, data = tiny.build(tiny.BASE), many(8)
    cfg = LossConfig(noise="mask", self_condition=0.0)
    noisy = loss.draw_noise(data, cfg, tiny.VOCAB, generator()).noisy_BL
    hidden = noisy != data.ids_BL
    assert set(noisy[hidden].tolist()) == {tiny.VOCAB - 1}
    got = loss.compute_losses(model, data, cfg, generator())
    mask_of = loss.dense_masks(model.config, data.layout)
    noisy_BLD, _, _ = model.forward_train(noisy, data.ids_BL, None, data.layout.positions, mask_of)
    per_token = F.cross_entropy(model.head(noisy_BLD).transpose(1, 2), data.ids_BL, reduction="none")
    assert torch.allclose(got.denoiser, per_token[hidden].mean(), rtol=1e-5)
    with pytest.raises(ValueError, match="on_policy must be 0"):
        LossConfig(noise="mask", on_policy=0.5)
    with pytest.raises(ValueError, match="uniform or mask"):
        LossConfig(noise="gauss")


def test_masked_diffusion_never_changes_an_accepted_token(monkeypatch):
    model, cfg = tiny.decided(tiny.BASE), tiny.sampler(max_steps=5, entropy_bound=0.5)
    seen, denoise = [], model.denoise

    def watched(canvas, soft, cache):
        seen.append(canvas.clone())
        return denoise(canvas, soft, cache)

    monkeypatch.setattr(model, "denoise", watched)
    canvas, steps = masked.fill_masks(model, [[2, 9, 8], [2]], cfg, [0, 1])
    mask = tiny.VOCAB - 1
    assert (seen[0] == mask).all()
    assert not (canvas == mask).any()
    assert steps == len(seen) <= 5
    for before, after in itertools.pairwise([*seen, canvas]):
        assert torch.equal(before[before != mask], after[before != mask])
        assert ((after != mask).sum(-1) > (before != mask).sum(-1)).all()


def test_balance_is_one_when_even_and_experts_when_collapsed():
    even = Routing(torch.arange(8).view(4, 2) % 4, torch.ones(4, 2), torch.full((4, 4), 0.25))
    assert torch.allclose(loss.load_balance([even])[0], torch.tensor(1.0))
    assert torch.allclose(loss.load_balance([even])[1], torch.full((1, 4), 0.25))
    one = Routing(
        torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1), F.one_hot(torch.zeros(4, dtype=torch.long), 4).float()
    )
    assert torch.allclose(loss.load_balance([one])[0], torch.tensor(4.0))


def test_the_same_seed_gives_the_same_loss_and_gradients_reach_every_weight():
    model, data = tiny.build(tiny.CONFIGS["every expert"]).requires_grad_(True), batch()
    cfg = LossConfig(self_condition=1.0, on_policy=0.5)
    first = loss.compute_losses(model, data, cfg, generator(5)).total
    assert torch.equal(loss.compute_losses(model, data, cfg, generator(5)).total, first)
    assert not torch.equal(loss.compute_losses(model, data, cfg, generator(6)).total, first)
    first.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.soak
def test_a_few_steps_learn_a_sentence():
    """The loss falls, and the model then repairs a noisy canvas: the whole objective points the right way."""
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
        result = loss.compute_losses(model, data, LossConfig(), rng)
        optimizer.zero_grad()
        result.total.backward()
        optimizer.step()
        history.append(float(result.denoiser.detach()))
    assert sum(history[-5:]) < 0.2 * sum(history[:5])


@pytest.mark.parametrize(
    "change",
    [
        {"full_noise": 1.5},
        {"self_condition": -0.1},
        {"ar_weight": -1.0},
        {"t_min": 0.0},
        {"t_power": 0.0},
        {"gap_noise": 1.5},
    ],
)
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError, match=str(next(iter(change.values())))):
        LossConfig(**change)


def test_the_causal_half_may_learn_answers_only():
    model, data = tiny.build(tiny.BASE), batch()
    cfg = LossConfig(self_condition=0.0, learns_prompts=False)
    got = loss.compute_losses(model, data, cfg, generator())
    everything = loss.compute_losses(model, data, replace(cfg, learns_prompts=True), generator())
    _, noise = loss.prepare(data, cfg, tiny.VOCAB, generator())
    mask_of = loss.dense_masks(model.config, data.layout)
    _, clean_BLD, _ = model.forward_train(noise.noisy_BL, data.ids_BL, None, data.layout.positions, mask_of)
    per_token = F.cross_entropy(model.head(clean_BLD)[:, :-1].transpose(1, 2), data.ids_BL[:, 1:], reduction="none")
    same_document = data.layout.documents[:, :-1] == data.layout.documents[:, 1:]
    learned = same_document & (data.layout.starts[:, 1:] >= 0)
    assert torch.allclose(got.ar, per_token[learned].mean(), rtol=1e-5)
    assert got.ar != everything.ar
    assert got.denoiser == everything.denoiser
