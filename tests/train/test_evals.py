"""Scores equal their definitions: the bound is tight where it should be, batched = alone, gaps are the lines removed."""

import lzma
import math

import pytest
import tiny
import torch
import torch.nn.functional as F

from redraft.diffusion.generate import generate
from redraft.diffusion.verified import generate_verified
from redraft.train.evals import code_lines, likelihood, samples, words
from redraft.train.evals.code_lines import LineGap
from redraft.train.evals.samples import Samples
from redraft.train.loss import dense_masks

TOKENIZER = tiny.byte_tokenizer()
TEXTS = ["One day a fox", "the cat sat on the mat and slept", "hi", "a longer text, with more than one block in it"]


def test_the_bound_is_the_entropy_where_the_model_is_perfect():
    """A single token of known distribution: the denoiser knows the distribution, so the bound is tight."""
    vocab = 5
    prior = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.double)
    entropy = float(-(prior * prior.log()).sum())
    clean, noisy = (t.flatten() for t in torch.meshgrid(torch.arange(vocab), torch.arange(vocab), indexing="ij"))
    total, levels = 0.0, 1000
    for level in range(levels):
        t = (level + 0.5) / levels
        a = 1 - t
        weight = prior[clean] * (t / vocab + a * (clean == noisy))
        # A denoiser that sees the token itself predicts prior times likelihood.
        logits = prior.log() + F.one_hot(noisy, vocab) * math.log1p(vocab * a / t)
        total += float((weight * likelihood.nelbo_integrand(logits, noisy, clean, t)).sum()) / levels
    assert total == pytest.approx(entropy, rel=1e-3)


def test_the_bound_is_above_the_entropy_for_any_other_model():
    vocab, prior = 4, torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.double)
    clean, noisy = (t.flatten() for t in torch.meshgrid(torch.arange(vocab), torch.arange(vocab), indexing="ij"))
    wrong, total = torch.tensor([0.25] * 4, dtype=torch.double), 0.0
    for level in range(400):
        t = (level + 0.5) / 400
        weight = prior[clean] * (t / vocab + (1 - t) * (clean == noisy))
        logits = wrong.log() + F.one_hot(noisy, vocab) * math.log1p(vocab * (1 - t) / t)
        total += float((weight * likelihood.nelbo_integrand(logits, noisy, clean, t)).sum()) / 400
    assert total == pytest.approx(math.log(4), rel=1e-2)  # the cross-entropy of a uniform guess


def test_next_token_loss_is_the_plain_sum_however_batched():
    model = tiny.build(tiny.BASE)
    nats = tokens = 0
    for text in TEXTS:
        ids = torch.tensor([TOKENIZER.encode_prompt(text)])
        logits = model.head(model.encode(ids, model.new_cache(1, ids.shape[1])))
        nats += float(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        tokens += ids.shape[1] - 1
    found = likelihood.autoregressive(model, TOKENIZER, TEXTS)
    assert found.nats == pytest.approx(nats, rel=1e-5)
    assert found.tokens == tokens
    assert found.nats_per_token == pytest.approx(nats / tokens, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / sum(map(len, TEXTS)), rel=1e-5)


def test_a_second_step_is_conditioned_on_the_first():
    model = tiny.build(tiny.BASE)
    batch = likelihood.to_rows([TOKENIZER.encode_prompt(text) for text in TEXTS], 8, model.device)
    noisy = likelihood.add_noise(batch, 0.5, tiny.VOCAB, torch.Generator().manual_seed(0))
    assert torch.equal(noisy[~batch.canvas_BL], batch.ids_BL[~batch.canvas_BL])
    first, second = likelihood.denoise_steps(model, batch, noisy, dense_masks(model.config, batch.layout), 2)
    ids, cache = TOKENIZER.encode_prompt(TEXTS[0]), model.new_cache(1, 64)
    model.encode(torch.tensor([ids[:9]]), cache)  # the start token and the first block of eight
    plain = model.denoise(noisy[:1, 9 : len(ids)], None, cache)
    assert torch.allclose(first[:1, 9 : len(ids)], plain, atol=1e-4)
    conditioned = model.denoise(noisy[:1, 9 : len(ids)], model.soft_embed(plain), cache)
    assert torch.allclose(second[:1, 9 : len(ids)], conditioned, atol=1e-3)


def test_the_bound_of_a_model_is_finite_and_seeded():
    model = tiny.build(tiny.BASE)
    first, again = (likelihood.nelbo(model, TOKENIZER, TEXTS, 8, levels=4) for _ in range(2))
    assert first == again
    assert math.isfinite(first.nats)
    assert first.tokens == likelihood.autoregressive(model, TOKENIZER, TEXTS).tokens


@pytest.mark.parametrize(("answer", "expected"), [("clean", (1.0, 1.0)), ("noisy", (1.0, 0.0))])
def test_repair_counts_tokens_kept_and_repaired(monkeypatch, answer, expected):
    def denoise_steps(model, batch, noisy_BL, mask_of, steps):
        yield F.one_hot(batch.ids_BL if answer == "clean" else noisy_BL, tiny.VOCAB).float()

    monkeypatch.setattr(likelihood, "denoise_steps", denoise_steps)
    found = likelihood.repair(tiny.build(tiny.BASE), TOKENIZER, TEXTS * 4, 8)
    assert list(found) == list(likelihood.LEVELS)
    assert set(found.values()) == {expected}


def kept_tokens(end, cfg) -> list[int]:
    return [token for token in end.ids_BT[0, : end.stats[0].new_tokens].tolist() if token not in cfg.eos_token_ids]


@pytest.mark.parametrize("check", ["off", *(pytest.param(check, marks=pytest.mark.soak) for check in ("checked", "exact"))])
def test_samples_of_every_mode_equal_the_story(check):
    """A batch of the engine gives what `generate` and `generate_verified` give alone."""
    model, sampler = tiny.decided(tiny.BASE), tiny.sampler(max_new_tokens=32, check=check, draft_length=3)
    found = samples.sample(samples.make_engine(model, 2), TOKENIZER, "Hi", 3, sampler, seed=7)
    ids = TOKENIZER.encode_prompt("Hi")
    ends = []
    for seed in (7, 8, 9):
        story = generate(model, [ids], sampler, seeds=[seed])
        if check != "off":
            story = generate_verified(model, ids, sampler, seed=seed, policy=tiny.engine_policy(sampler))
        ends.append([*story][-1])
    assert found.ids == [kept_tokens(end, sampler) for end in ends]
    assert found.texts == [TOKENIZER.decode(ids) for ids in found.ids]
    totals = {name: sum(getattr(end.stats[0], name) for end in ends) for name in ("new_tokens", "forwards", *samples.COUNTS)}
    assert found.counts == {name: totals[name] for name in samples.COUNTS}
    assert found.tokens_per_forward == totals["new_tokens"] / totals["forwards"]
    assert found.cut == {number for number, end in enumerate(ends) if end.reasons[0] == "length"}


def test_autoregressive_samples_at_temperature_0_are_greedy_and_cost_a_forward_each():
    model, sampler = tiny.build(tiny.BASE), tiny.sampler(max_new_tokens=6, check="checked", top_k=3)
    engine = samples.make_engine(model)
    found = samples.sample(engine, TOKENIZER, "Hi", 2, samples.autoregressive(sampler, 0.0))
    ids = TOKENIZER.encode_prompt("Hi")
    for _ in range(6):
        row = torch.tensor([ids])
        ids.append(int(model.head(model.encode(row, model.new_cache(1, len(ids))))[0, -1].argmax()))
        if ids[-1] in sampler.eos_token_ids:
            break
    expected = [i for i in ids[len(TOKENIZER.encode_prompt("Hi")) :] if i not in sampler.eos_token_ids]
    assert found.ids == [expected, expected]
    assert found.tokens_per_forward == 1
    assert found.counts["drafted"] == 0
    warm = samples.sample(engine, TOKENIZER, "Hi", 8, samples.autoregressive(sampler, 1.0), seed=3)
    assert len({tuple(ids) for ids in warm.ids}) > 3  # top_k=3 does not apply


def test_samples_are_compared_at_the_same_entropy():
    def sample_at(temperature: float) -> Samples:
        return Samples([f"{temperature}"], [varied(round(80 * temperature))], 1.0)

    diffusion = Samples(["diffusion"], [varied(74)], 6.0)  # between 1.0 and 0.85, which have 80 and 68
    curve = samples.measure_curve("", judged, sample_at)
    comparison = samples.compare(diffusion, "", judged, curve)
    low, at, high = (Samples([""], [varied(count)], 1.0).entropy for count in (68, 74, 80))
    assert comparison.autoregressive == pytest.approx(math.exp(0.85 + 0.15 * (at - low) / (high - low)))
    assert comparison.ratio == pytest.approx(9.0 / comparison.autoregressive)
    assert [point[0] for point in comparison.curve] == list(samples.TEMPERATURES)
    for strange in (varied(2), [1, 2, 3]):  # lower entropy than every autoregressive sample, and too short
        assert samples.compare(Samples(["diffusion"], [strange], 6.0), "", judged, curve).ratio is None


def test_doubled_and_unknown_words_are_counted(tmp_path):
    texts = ["She came came home. Home was it it's", "No, no! The tHe zorble x2 o'clock"]
    words_in_all = 8 + 7  # of "x2" only the letter counts
    assert [len(words.split_words(text)) for text in texts] == [8, 7]
    assert words.doubled_words(texts) == pytest.approx(1000 * 4 / words_in_all)
    assert words.doubled_adjacent(texts) == pytest.approx(1000 * 2 / words_in_all)
    with lzma.open(tmp_path / "stories_00.txt.xz", "wt", encoding="utf-8") as file:
        file.write("\"She CAME home,\" it was.\n<|endofstory|>\nNo-the x o'clock it's")
    known = words.find_words(None, tmp_path)
    assert words.list_unknown(texts, known) == ["zorble"]
    assert words.unknown_words(texts, known) == pytest.approx(1000 / words_in_all)
    (tmp_path / "words.txt").write_text("\n".join(sorted(known)))
    assert words.find_words(str(tmp_path / "words.txt"), tmp_path / "none") == known
    assert words.find_words(None, tmp_path / "none") is None


def test_a_word_that_was_cut_in_two_is_not_counted():
    texts = ["The end of the stor", "The end.", "The child's"]
    cut = Samples(texts, [[], [], []], 1.0, cut=frozenset({0, 1, 2})).whole_words
    assert cut == ["The end of the ", "The end.", "The "]
    assert Samples(texts, [[], [], []], 1.0).whole_words == texts


def judged(texts):
    return 9.0 if texts == ["diffusion"] else math.exp(float(texts[0]))


def varied(count):
    """A text of WINDOW tokens and more, `count` different ones in its window."""
    return [min(at, count - 1) for at in range(samples.WINDOW)] + [*range(1000, 1020)]


def test_entropy_is_of_as_many_tokens_of_every_text():
    same, two = [1] * samples.WINDOW, [1, 2] * (samples.WINDOW // 2)
    assert Samples([""], [same], 1.0).entropy == 0
    assert Samples([""] * 2, [same, [2] * samples.WINDOW], 1.0).entropy == pytest.approx(math.log(2))  # taken together
    assert Samples([""] * 3, [two, two + [3] * 50, [4, 5, 6]], 1.0).entropy == pytest.approx(math.log(2))
    assert Samples([""], [[1, 2]], 1.0).entropy is None
    assert Samples([""] * 2, [[1, 2], [1] * 6], 1.0).length == 4


CODE = "def f(x):\n    'what it does'\n    y = x + 1\n    if y:\n        return y\n    return None\n"


def test_a_gap_is_one_line_and_the_text_around_it():
    seen = set()
    for seed in range(30):
        (gap,) = code_lines.remove_lines(TOKENIZER, [CODE], max_tokens=64, seed=seed)
        assert [*gap.before, *gap.line, *gap.after] == TOKENIZER.encode(CODE)
        seen.add(TOKENIZER.decode(gap.line))
    assert seen == {"y = x + 1", "if y:", "return y"}  # no signature, no words, not the last
    assert {TOKENIZER.decode(code_lines.remove_lines(TOKENIZER, [CODE], 6, s)[0].line) for s in range(9)} == {"if y:"}
    assert (
        code_lines.remove_lines(
            TOKENIZER, ["one line", "x\n\n.\ny", "def f():\n    'only words'\n", "x = 1\ny = 2\nz = 3"], 64
        )
        == []
    )
    assert code_lines.first_statement("    def f(self):\n        pass") == 2


@pytest.mark.parametrize("length", [1, 60])
def test_infilling_keeps_the_text_around_the_gap_and_its_length(length):
    model, sampler = tiny.decided(tiny.BASE), tiny.sampler(canvas_length=32, max_steps=4)
    text = TOKENIZER.encode("a" * length)
    gap = LineGap(text, TOKENIZER.encode("12345"), TOKENIZER.encode("z" * length))
    plan = code_lines._plan_canvas(gap, sampler)
    assert plan.prompt_length == (0 if length == 1 else 60 - 13)
    assert {plan.pins[at] for at in range(plan.gap_start)} == {text[0]}
    (answer,) = code_lines.fill_gaps(model, TOKENIZER, [gap], sampler)
    assert len(answer) == 5
    assert code_lines.exact_share([answer, gap.line], [gap, gap]) >= 0.5


def test_greedy_continuation_stops_at_the_newline():
    model = tiny.build(tiny.BASE)
    gap = LineGap(TOKENIZER.encode("def"), TOKENIZER.encode("abc"), TOKENIZER.encode("\nx"))
    (ids_after,) = code_lines.continue_before(model, TOKENIZER, [gap])
    assert len(ids_after) <= 2 * 3 + 8
    newline = TOKENIZER.encode("\n")[0]
    assert newline not in ids_after
    ids = [*TOKENIZER.encode_prompt(""), *gap.before]
    for token in ids_after:
        row = torch.tensor([ids])
        assert int(model.head(model.encode(row, model.new_cache(1, len(ids))))[0, -1].argmax()) == token
        ids.append(token)
