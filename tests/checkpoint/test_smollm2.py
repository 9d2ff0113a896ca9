"""SmolLM2-135M-Instruct itself: ours = transformers, alone and with a drafter. REDRAFT_SMOLLM2 names its GGUF file."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch

import redraft
from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.model.drafter import DrafterConfig, new_drafter

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
REAL = Path(os.environ.get("REDRAFT_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about rain.",
    "What is 12 + 30?",
    "Explain photosynthesis in one sentence.",
    "List three colours.",
    "Who wrote Hamlet?",
    "Translate 'good morning' to Spanish.",
    "Give me a recipe for pancakes.",
    "What is a prime number?",
    "Name a planet.",
)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(not REAL.is_file(), reason="REDRAFT_SMOLLM2 names no file")]


@pytest.mark.parametrize("tokens", [40, pytest.param(200, marks=pytest.mark.soak_long)])
def test_it_equals_transformers(tokens):
    """20 prompts: logits within 1e-4; the greedy tokens of two of them are equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = {"pretrained_model_name_or_path": str(REAL.parent), "gguf_file": REAL.name}
    reference = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32).eval()
    theirs = AutoTokenizer.from_pretrained(**names)
    model = checkpoint.load_model(REAL, dtype=torch.float32)
    tokenizer = checkpoint.open_gguf(REAL).tokenizer()
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    prompts += [tokenizer.encode(question) for question in QUESTIONS]
    assert prompts[10:] == [theirs(question).input_ids for question in QUESTIONS]
    with torch.inference_mode():
        for ids in prompts:
            expected = reference(torch.tensor([ids])).logits
            found = model.head(model.encode(torch.tensor([ids]), model.new_cache(1, len(ids))))
            assert (found - expected).abs().max() < 1e-4
        checkpoint.lay_out_for_cpu(model)  # as generation has it; products may add in another order
        unused = tokenizer.size - 1
        greedy = SamplerConfig(temperature=0.0, eos_token_ids=(unused,))
        for ids in (prompts[1], prompts[12]):
            settings = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": unused, "pad_token_id": 0}
            batch = torch.tensor([ids])
            expected = reference.generate(batch, attention_mask=torch.ones_like(batch), **settings)[0, len(ids) :]
            assert list(generate_autoregressive(model, ids, tokens, greedy)) == expected.tolist()


@pytest.fixture(name="path")
def _path(tmp_path):
    """It with a drafter: the one in the package, or a random one."""
    config, tensors = checkpoint.open_weights(REAL)
    if checkpoint.find_drafters(config, tensors):
        return REAL
    model = checkpoint.load_model(REAL, dtype=torch.float32)
    size = DrafterConfig(rank=4, head_size=64, canvas_length=3)
    drafter = new_drafter(size, config, torch.zeros(config.hidden_size))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    base = {"base": str(REAL.resolve()), "fingerprint": checkpoint.fingerprint(model)}
    return checkpoint.save_drafter(drafter, tmp_path, **base)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.soak_long)])
def test_greedy_answers_with_a_drafter_are_those_of_transformers(path, count):
    """`golden/make_smollm2.py` has made the answers, because transformers takes minutes for them."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["answers"]
    answers = dict(itertools.islice(golden.items(), 0, None, 200 // count))
    assert len(answers) == count
    writer = redraft.load(path, device="cpu", dtype="float32")
    assert writer.sampler.draft_length > 0
    found = [writer.chat(prompt, temperature=0.0, max_tokens=12, seed=0) for prompt in answers]
    assert [list(answer.ids) for answer in found] == list(answers.values())
    assert all(answer.stats.drafted > 0 for answer in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_its_logits_do_not_change_by_a_bit_when_a_drafter_is_added(path, dtype):
    options = {"device": "cpu", "dtype": dtype}
    drafting, tokenizer, _ = checkpoint.load_checkpoint(path, **options)
    alone, _, _ = checkpoint.load_checkpoint(path, **options, drafter=False)
    assert (drafting.drafter is None, alone.drafter is None, alone.dtype) == (False, True, getattr(torch, dtype))
    for question in QUESTIONS[:3]:
        ids_1S = torch.tensor([tokenizer.encode_chat([{"role": "user", "content": question}])])
        logits = [model.head(model.encode(ids_1S, model.new_cache(1, ids_1S.shape[1]))) for model in (drafting, alone)]
        assert torch.equal(*logits)


def test_it_fills_gaps_with_the_page_adapter_of_the_package():
    writer = redraft.load(REAL, device="cpu", dtype="float32")
    for text, gap in (
        ("The [[ ]] of France is Paris.", "capital"),
        ("Dear Anna, thank you for the [[ ]] to your party on Saturday.", "invitation"),
    ):
        assert writer.fill(text, seed=1, temperature=0).gaps == (gap,)


def test_it_mends_doubled_words():
    writer = redraft.load(REAL, device="cpu", dtype="float32")
    text = "The quick brown fox jumps over the the lazy dog and and ran away."
    assert str(writer.edit(text, seed=1)) == "The quick brown fox jumps over the lazy dog and ran away."
