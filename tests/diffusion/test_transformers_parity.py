"""redraft = transformers: logits, caches, checkpoints and whole generations of DiffusionGemma."""

from dataclasses import replace

import pytest
import tiny
import torch
import transformers_reference
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from redraft import checkpoint
from redraft.diffusion.generate import Committed, Draft, Finished, generate
from redraft.model.diffusion_gemma import DiffusionGemma

CONTEXT = 70  # more than four windows of the plain configuration, fourteen of the short one


def inputs(config, rows: int = 2, context: int = CONTEXT) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size - 3, (rows, context + config.canvas_length), generator=generator)
    return ids[:, :context], ids[:, context:]


def run_both(ours: DiffusionGemma, reference: DiffusionGemmaForBlockDiffusion, context: int = CONTEXT):
    """Pairs (ours, theirs) of encoder states, logits without and with self-conditioning, keys and values."""
    ids_BS, canvas_BC = inputs(ours.config, context=context)
    with torch.inference_mode():
        past = DynamicCache(config=reference.config.text_config)
        first = reference(input_ids=ids_BS, past_key_values=past, decoder_input_ids=canvas_BC)
        soft = first.logits / 0.7
        second = reference(past_key_values=past, decoder_input_ids=canvas_BC, self_conditioning_logits=soft.to(ours.dtype))

        cache = ours.new_cache(len(ids_BS), context)
        hidden = ours.encode(ids_BS, cache)
        pairs = [(hidden, first.encoder_last_hidden_state)]
        pairs.append((ours.denoise(canvas_BC, None, cache), first.logits))
        pairs.append((ours.denoise(canvas_BC, ours.soft_embed(soft), cache), second.logits))
        for layer, theirs_layer in enumerate(past.layers):
            for mine, other in zip(cache.view(layer), (theirs_layer.keys, theirs_layer.values), strict=True):
                pairs.append((mine.transpose(1, 2), other))
    return pairs


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_logits_and_cache_agree_in_float32(name):
    ours = tiny.build(tiny.CONFIGS[name])
    for mine, other in run_both(ours, transformers_reference.same_weights(ours)):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_bf16_agrees_within_two_percent_of_the_spread(name):
    ours = tiny.build(tiny.CONFIGS[name], dtype=torch.bfloat16)
    for mine, other in run_both(ours, transformers_reference.same_weights(ours))[1:3]:
        assert (mine - other).abs().max() <= 0.02 * (other.max() - other.min())


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_checkpoints_go_both_ways(name, tmp_path):
    ours = tiny.build(tiny.CONFIGS[name])
    checkpoint.save(ours, tmp_path / "ours")
    loaded, report = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), report
    assert all(torch.equal(*pair) for pair in run_both(ours, loaded.eval())[:1])

    loaded.save_pretrained(tmp_path / "theirs")
    back = checkpoint.load_model(tmp_path / "theirs")
    assert back.config == replace(ours.config, vision=back.config.vision)
    for name_, tensor in ours.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name_]), name_


# Settings that together cause canvases that settle early, stop tokens inside a canvas, rows with different ends, and a last
# canvas longer than max_new_tokens. test_the_cases_cover_what_they_should makes sure that they do.
CASES = [
    dict(seed=seed, rows=rows, max_new_tokens=new, **extra)
    for seed, rows, new, extra in (
        *((seed, 1, 16, {}) for seed in range(6)),
        *((seed, 1, 48, {}) for seed in range(6, 12)),
        *((seed, 3, 40, {}) for seed in range(12, 18)),
        *((seed, 2, 16, {"max_steps": 20, "confidence_threshold": 0.05}) for seed in range(18, 22)),
        *((seed, 2, 32, {"preset": True}) for seed in range(22, 25)),
        *((seed, 4, 50, {"stability_threshold": 2, "confidence_threshold": 0.3}) for seed in range(25, 28)),
        (28, 2, 32, {"stability_threshold": 0, "confidence_threshold": 0.3}),
        (29, 2, 33, {"eos_token_ids": ()}),
        (30, 2, 32, {"entropy_bound": 3.0, "t_min": 0.1, "t_max": 2.0}),
    )
]


RESULTS: dict[int, tuple[list, torch.Tensor, object]] = {}  # by seed: two tests look at each run


def generate_both(case: dict, monkeypatch) -> tuple[list, torch.Tensor, object]:
    """Our events, their tokens, and their tokens per forward."""
    if case["seed"] not in RESULTS:
        RESULTS[case["seed"]] = run_case(monkeypatch, **case)
    return RESULTS[case["seed"]]


def run_case(monkeypatch, *, seed: int, rows: int, preset: bool = False, **settings: object):
    config = list(tiny.CONFIGS.values())[seed % 3]
    ours = tiny.decided(config, seed)
    cfg = tiny.sampler(**settings)
    ids_BS, canvas_BC = inputs(config, rows, context=9 + seed % 20)
    first = canvas_BC if preset else None
    seeds = [1000 * seed + row for row in range(rows)]
    events = list(generate(ours, ids_BS.tolist(), cfg, seeds=seeds, first_canvas_BC=first))
    reference = transformers_reference.same_weights(ours)
    options = {"decoder_input_ids": canvas_BC} if preset else {}
    with transformers_reference.our_draws(monkeypatch, seeds):
        expected = transformers_reference.generate(reference, ids_BS, cfg, **options)
    return events, expected.sequences[:, ids_BS.shape[1] :], expected.tokens_per_forward


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case['seed']}")
def test_whole_generations_agree_token_for_token(case, monkeypatch):
    events, expected_BT, per_forward_B = generate_both(case, monkeypatch)
    last = events[-1]
    assert isinstance(last, Finished)
    assert torch.equal(last.ids_BT, expected_BT)
    drafts = [e for e in events if isinstance(e, Draft)]
    canvases = [e for e in events if isinstance(e, Committed)]
    assert torch.equal(torch.cat([canvas.ids_BC for canvas in canvases], dim=1), last.ids_BT)
    for row, stats in enumerate(last.stats):
        tokens = int((expected_BT[row] != 0).sum())
        if 0 not in expected_BT[row][:tokens]:  # transformers does not count a pad token inside the text
            assert tokens / stats.steps == pytest.approx(per_forward_B[row].item())
        assert stats.steps == sum(int(canvas.steps_B[row]) for canvas in canvases)
    assert max(draft.step for draft in drafts) <= drafts[0].max_steps


def test_the_cases_cover_what_they_should(monkeypatch):
    seen = set()
    for case in CASES:
        events, _, _ = generate_both(case, monkeypatch)
        canvases = [e for e in events if isinstance(e, Committed)]
        last = events[-1]
        steps = [canvas.steps_B.tolist() for canvas in canvases]
        seen.add("several canvases" if len(canvases) > 1 else "one canvas")
        limit = case.get("max_steps", 6)
        seen |= {"settled early" for canvas in canvases if bool(canvas.settled_B.any()) and canvas.steps_B.min() < limit}
        seen |= {"never settled" for canvas in canvases if not canvas.settled_B.all()}
        seen |= {"rows at different steps" for row in steps if len(set(row)) > 1}
        seen |= {"stop token inside" for reason in last.reasons if reason == "stop"}
        seen |= {"rows with different ends"} if len(set(last.reasons)) > 1 else set()
        seen |= {"not a multiple"} if case["max_new_tokens"] % 16 else set()
        seen |= {"preset canvas"} if case.get("preset") else set()
    assert len(CASES) >= 24
    assert seen >= {
        "one canvas",
        "several canvases",
        "settled early",
        "never settled",
        "rows at different steps",
        "stop token inside",
        "rows with different ends",
        "not a multiple",
        "preset canvas",
    }, seen


def test_rows_of_different_lengths_agree_with_left_padding(monkeypatch):
    config = tiny.CONFIGS["short window"]
    ours = tiny.decided(config, 3)
    cfg = tiny.sampler(max_new_tokens=32, confidence_threshold=0.05)
    ids_BS, _ = inputs(config, 3, context=30)
    lengths = [30, 11, 23]
    seeds = [5, 6, 7]
    prompts = [row[-n:].tolist() for row, n in zip(ids_BS, lengths, strict=True)]
    mask_BS = torch.tensor([[0] * (30 - n) + [1] * n for n in lengths])
    *_, last = generate(ours, prompts, cfg, seeds=seeds)
    with transformers_reference.our_draws(monkeypatch, seeds):
        expected = transformers_reference.generate(
            transformers_reference.same_weights(ours), ids_BS * mask_BS, cfg, attention_mask=mask_BS
        )
    assert torch.equal(last.ids_BT, expected.sequences[:, 30:])
