"""The draft objective: canvases behind any token, its loss by hand, no leak, and page rows as without it."""

import math
from dataclasses import replace

import pytest
import tiny
import torch
from test_loop import config as run_config
from test_loop import events

from redraft import checkpoint
from redraft.model.masks import Layout
from redraft.train import draft_loss, loss
from redraft.train.draft_loss import DraftConfig
from redraft.train.loop import Report, add_draft_head, build_model
from redraft.train.loss import Batch, LossConfig
from redraft.train.records import DataConfig, Source

CONFIG = replace(tiny.BASE, draft_head_size=12, eos_token_ids=(1,))
LENGTH = 48
DRAFTS = DraftConfig(rows=2, lengths=(4, 6), token=0)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(rows: int = 4, seed: int = 0) -> Batch:
    """Rows of two documents of 20 and 25 tokens, then padding; pages have canvases of 5."""
    ids_BL = torch.randint(6, tiny.VOCAB, (rows, LENGTH), generator=generator(seed))
    positions_L = torch.cat([torch.arange(20), torch.arange(25), torch.zeros(3, dtype=torch.long)])
    documents_L = torch.cat([torch.zeros(20), torch.ones(25), -torch.ones(3)]).long()
    starts_L = torch.where(documents_L >= 0, positions_L // 5 * 5, -1)
    return Batch(ids_BL, Layout(*(t.repeat(rows, 1) for t in (positions_L, starts_L, documents_L))))


def test_draft_canvases_are_whole_and_begin_behind_any_token():
    seen = set()
    for seed in range(40):
        layout = draft_loss.lay_out_drafts(batch().layout, DRAFTS, generator(seed))
        assert torch.equal(layout.starts[:2], batch().layout.starts[:2])
        for row, length in ((2, 4), (3, 6)):
            for document, size in ((0, 20), (1, 25)):
                starts = layout.starts[row][layout.documents[row] == document].tolist()
                first = next(start for start in starts if start >= 0)
                seen.add((length, document, first))
                count = (size - first) // length
                expected = [-1] * first + [first + i // length * length for i in range(count * length)]
                assert starts == expected + [-1] * (size - len(expected))
            assert (layout.starts[row, 45:] == -1).all()
    for document in (0, 1):  # every phase occurs
        assert {first for length, d, first in seen if (length, d) == (4, document)} == {1, 2, 3, 4}
        assert {first for length, d, first in seen if (length, d) == (6, document)} == {1, 2, 3, 4, 5, 6}


def test_without_draft_rows_nothing_changes():
    data = batch()
    same, noise = loss.prepare(data, LossConfig(), tiny.VOCAB, generator())
    assert same.layout is data.layout
    assert torch.equal(noise.noisy_BL, loss.draw_noise(data, LossConfig(), tiny.VOCAB, generator()).noisy_BL)


def test_draft_canvases_are_empty_and_pages_noised_as_before():
    cfg = LossConfig(draft=DRAFTS)
    data, noise = loss.prepare(batch(), cfg, tiny.VOCAB, generator())
    drafts = data.canvas_BL[2:]
    assert (noise.noisy_BL[2:][drafts] == 0).all()
    assert torch.equal(noise.noisy_BL[2:][~drafts], data.ids_BL[2:][~drafts])
    assert len(noise.temperature_R) == 1  # half of the page rows
    assert set(noise.draft_temperature_W.tolist()) <= {torch.tensor(t).item() for t in DRAFTS.temperatures}


def by_hand(model, data: Batch, noise: loss.Noise, cfg: DraftConfig) -> tuple[float, list[float]]:
    """The loss of drafts, canvas by canvas, with `encode` and `denoise` as in generation."""
    found = []  # length index, slot, cross-entropy, divergence, acceptance
    for row in range(2):
        ids, layout = data.ids_BL[2 + row], data.layout
        starts = layout.starts[2 + row]
        temperature = float(noise.draft_temperature_W[row])
        for document in (0, 1):
            at = (layout.documents[2 + row] == document).nonzero().flatten()
            text = ids[at]
            cache = model.new_cache(1, LENGTH)
            p_TV = torch.log_softmax(model.head(model.encode(text[None], cache)[0]) / temperature, dim=-1)
            for start in sorted(set(starts[at].tolist()) - {-1}):
                length = cfg.lengths[row]
                cache = model.new_cache(1, LENGTH)
                model.encode(text[None, :start], cache)
                kept = []
                model.norm.register_forward_hook(lambda module, inputs, output, kept=kept: kept.append(output))
                model.denoise(torch.full((1, length), cfg.token), None, cache)
                model.norm._forward_hooks.clear()
                logits_CV = model.draft_logits(kept[0][0], text[start - 1 : start - 1 + length])
                q_CV = torch.log_softmax(logits_CV / temperature, dim=-1)
                for slot in range(length):
                    p, q = p_TV[start + slot - 1], q_CV[slot]
                    if text[start + slot - 1] == 1:
                        continue
                    divergence = float((p.exp() * (p - q)).sum())
                    acceptance = float(torch.minimum(p.exp(), q.exp()).sum())
                    found.append((row, slot, -float(q[text[start + slot]]), divergence, acceptance))
    mean = [[_mean([f[4] for f in found if f[:2] == (j, s)]) for s in range(n)] for j, n in enumerate(cfg.lengths)]
    weights = {}
    for j, n in enumerate(cfg.lengths):
        reached = [math.prod(0.5 + 0.5 * mean[j][s] for s in range(1, k + 1)) for k in range(n)]
        weights |= {(j, s): sum(reached[s:]) for s in range(n)}
        weights[j, 0] = cfg.first_slot * weights[j, 1]
    c = math.exp(-cfg.kl_decay * _mean([f[4] for f in found if f[1] > 0]))
    total = sum(weights[f[:2]] for f in found)
    terms = [weights[f[:2]] * (cfg.cross_entropy * f[2] + c * f[3] + (1 - c) * (1 - f[4])) for f in found]
    return sum(terms) / total, [_mean([f[4] for f in found if f[1] == s]) for s in range(max(cfg.lengths))]


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


@pytest.mark.parametrize("max_logits", [2**29, 2 * tiny.VOCAB * 7])
def test_the_loss_of_drafts_by_hand(monkeypatch, max_logits):
    monkeypatch.setattr(draft_loss, "MAX_LOGITS", max_logits)
    model = tiny.build(CONFIG)
    cfg = LossConfig(draft=DRAFTS)
    data = batch()
    data.ids_BL[3, 30:33] = 1  # stop tokens: what follows them does not count
    data, noise = loss.prepare(data, cfg, tiny.VOCAB, generator(3))
    mask_of = loss.dense_masks(CONFIG, data.layout)
    found = loss.Objective(model, cfg)(data, noise, mask_of, loss.slice_masks(mask_of, len(noise.temperature_R)))
    expected, acceptance = by_hand(model, data, noise, DRAFTS)
    assert abs(float(found.draft) - expected) < 1e-4
    assert torch.allclose(found.acceptance_S, torch.tensor(acceptance), atol=1e-5)
    parts = (
        found.denoiser + found.ar + found.draft + 0.01 * loss.load_balance(model_routings(model, data, noise, mask_of))[0]
    )
    assert abs(float(found.total - parts)) < 1e-3
    accepted = float(draft_loss.expected_length(found.acceptance_S))
    assert abs(accepted - sum(math.prod(acceptance[1 : j + 1]) for j in range(1, 6))) < 1e-5


def model_routings(model, data: Batch, noise: loss.Noise, mask_of):
    objective = loss.Objective(model, LossConfig(draft=DRAFTS))
    masks = loss.slice_masks(mask_of, len(noise.temperature_R))
    soft_BLD, ids_BL = loss.self_conditioning_forward(model, data, noise, data.canvas_BL, masks, objective.soft_embedding)
    return model.forward_train(ids_BL, data.ids_BL, soft_BLD, data.layout.positions, mask_of)[2]


def test_drafts_do_not_see_what_they_shall_predict():
    model = tiny.build(CONFIG)
    data, noise = loss.prepare(batch(), LossConfig(draft=DRAFTS), tiny.VOCAB, generator())
    mask_of = loss.dense_masks(CONFIG, data.layout)
    start = int(data.layout.starts[3, 15])
    other = data.ids_BL.clone()
    other[3, start:20] = 7

    def hidden(ids_BL):
        noisy_BL = torch.where(data.canvas_BL, noise.noisy_BL, ids_BL)
        return model.forward_train(noisy_BL, ids_BL, None, data.layout.positions, mask_of)[0][3]

    before = (data.layout.starts[3, :20] >= 0) & (data.layout.starts[3, :20] <= start)
    assert before.sum() >= 6
    assert torch.equal(hidden(data.ids_BL)[:20][before], hidden(other)[:20][before])


def test_own_text_gives_no_next_token_loss():
    model = tiny.build(CONFIG)
    data = batch()
    own_BL = (data.layout.documents == 1) & (torch.arange(4)[:, None] >= 2)
    cfg = LossConfig(draft=DRAFTS, self_condition=0.0)
    with_own = loss.compute_losses(model, Batch(data.ids_BL, data.layout, own_BL), cfg, generator())
    changed = data.ids_BL.clone()
    changed[3, 44] = 9  # the last token of an own text
    again = loss.compute_losses(model, Batch(changed, data.layout, own_BL), cfg, generator())
    assert abs(float(with_own.ar - again.ar)) < 1e-6
    without = loss.compute_losses(model, data, cfg, generator())
    assert abs(float(with_own.ar - without.ar)) > 1e-4


def test_the_teacher_gets_no_gradient_and_the_head_does():
    model = tiny.build(CONFIG).requires_grad_(True)
    teacher = torch.randn(5, CONFIG.hidden_size, requires_grad=True)
    hidden = torch.randn(5, CONFIG.hidden_size, requires_grad=True)
    ids = torch.tensor([7, 8, 9, 10, 11])
    terms = draft_loss.draft_terms(model, hidden, teacher, ids, ids, torch.ones(5))
    terms.sum().backward()
    assert teacher.grad is None
    assert hidden.grad.abs().sum() > 0
    assert model.draft_head.outer.weight.grad.abs().sum() > 0


@pytest.mark.soak
def test_the_terms_are_one_graph_for_the_compiler():
    model = tiny.build(CONFIG).requires_grad_(True)
    states = [torch.randn(5, CONFIG.hidden_size, generator=generator(seed)) for seed in (0, 1)]
    ids = torch.tensor([7, 8, 9, 10, 11])
    compiled = torch.compile(draft_loss.draft_terms, backend="aot_eager", fullgraph=True, dynamic=False)
    plain, other = (terms(model, *states, ids, ids, torch.ones(5)) for terms in (draft_loss.draft_terms, compiled))
    assert torch.allclose(plain, other, atol=1e-5)
    other.sum().backward()


def test_a_new_draft_head_changes_no_logits():
    model = tiny.build(tiny.BASE)
    hidden_ND = torch.randn(4, tiny.BASE.hidden_size)
    previous_N = torch.tensor([3, 4, 5, 6])
    expected = model.draft_logits(hidden_ND, previous_N)
    assert torch.equal(add_draft_head(model, 8, seed=0).draft_logits(hidden_ND, previous_N), expected)
    assert model.draft_head.inner.weight.std() > 0.05


def drafting_config(folder, **changes):
    """A run that starts from a checkpoint without a draft head."""
    init = tiny.save_folder(folder / "init")
    base = run_config(folder, steps=4, save_every=2)
    own = folder / "own.jsonl"
    own.write_text("".join(f'{{"ids": [{n}, {n + 1}, {n + 2}, {n + 3}, {n + 4}, {n + 5}, 1]}}\n' for n in range(30, 60)))
    sources = (Source(files=(str(own),), own=True), *base.data.sources)
    usual = {
        "init": str(init),
        "model": replace(base.model, draft_head_size=12),
        "rows": 4,
        "draft_data": DataConfig(sources=sources, length=40, canvas_lengths=(4,), seed=1),
        "loss": replace(base.loss, draft=replace(DRAFTS, lengths=(3, 4))),
    }
    return replace(base, **{**usual, **changes})


@pytest.fixture(name="run")
def _run(tmp_path):
    return drafting_config(tmp_path)


@pytest.mark.soak
def test_a_run_adds_the_head_and_reports_acceptance(run, tmp_path):
    assert build_model(run).config.draft_head_size == 12
    for report in (event for event in events(run, tmp_path) if isinstance(event, Report)):
        assert len(report.acceptance) == 4
        assert all(0 < share < 1 for share in report.acceptance)
        assert report.accepted < 3
    model = checkpoint.load_model(tmp_path / "model")
    assert model.config.draft_head_size == 12
    assert model.draft_head.outer.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"draft_data": None}, "draft rows need draft_data"),
        ({"rows": 2}, "2 draft rows must be fewer than 2"),
        ({"streams": 4}, "multiple of 4 streams"),
    ],
)
def test_draft_rows_that_do_not_fit_are_refused(run, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        replace(run, **change)


@pytest.mark.parametrize("change", [{"rows": -1}, {"lengths": (1,)}, {"temperatures": (0.0,)}, {"weight": -1.0}])
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError, match="draft"):
        DraftConfig(**change)


def test_draft_rows_learn_the_next_tokens_of_answers_only_if_pages_do():
    data = batch()
    starts_BL = data.layout.starts.masked_fill(data.layout.positions < 5, -1)  # the first canvas becomes a prompt
    data = Batch(data.ids_BL, Layout(data.layout.positions, starts_BL, data.layout.documents))
    prepared, _ = loss.prepare(data, LossConfig(draft=DRAFTS, learns_prompts=False), tiny.VOCAB, generator())
    assert not torch.equal(prepared.layout.starts[2:], starts_BL[2:])
    assert torch.equal(prepared.learned_next_BL[2:], prepared.learned_next_BL[:2])
    assert int(prepared.learned_next_BL[0].sum()) == (20 - 5) + (25 - 5)
