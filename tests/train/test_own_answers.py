"""Own answers: prompts of files and of the model itself, parts that are kept, answers in the model's own tokens."""

import json
from dataclasses import replace
from itertools import islice

import llama_models
import pytest
import tiny
import torch

from redraft import checkpoint
from redraft.train.own_answers import OwnAnswerConfig, OwnPrompts, chat_frame, read_prompts, write_own_answers

CFG = OwnAnswerConfig(tokens=30, part_tokens=10, rows=6, length=48, user_length=16, most_repeats=20)
STOPS = (5,)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small decoder that ends a text about every sixth token."""
    folder = tmp_path_factory.mktemp("own") / "model"
    llama_models.save_reference(folder, "llama 2", vocab_size=tiny.VOCAB, eos_token_id=5)
    model = checkpoint.load_model(folder, dtype=torch.float32)
    model.lm_head.weight.data *= 0.2
    bias = torch.zeros(tiny.VOCAB)
    bias[5] = 4.0
    head = model.head
    model.head = lambda hidden: head(hidden) + bias
    return model


def read(folder):
    return [json.loads(line) for path in sorted(folder.glob("own-*.jsonl")) for line in path.read_text().splitlines()]


def test_a_chat_model_writes_its_own_user_turns(model, tmp_path):
    tokenizer = tiny.byte_tokenizer()
    before, behind = chat_frame(tokenizer)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [*before, *tokenizer.encode("hi"), *behind]
    assert list(write_own_answers(model, tokenizer, tmp_path, CFG, STOPS))[-1] == 30
    records = read(tmp_path)
    for record in records:
        prompt = record["prompt_ids"]
        turn = prompt[len(before) : -len(behind)]
        assert prompt == [*before, *turn, *behind]
        assert turn
        assert 5 not in turn
        assert record["ids"].count(5) <= 1
    assert len({tuple(record["prompt_ids"]) for record in records}) > 3
    assert sum(len(record["ids"]) for record in records) >= 30


@pytest.mark.soak
def test_whole_parts_are_kept_and_the_others_are_written_again(model, tmp_path):
    tokenizer = tiny.byte_tokenizer()
    list(write_own_answers(model, tokenizer, tmp_path / "one", CFG, STOPS))
    run = write_own_answers(model, tokenizer, tmp_path / "two", CFG, STOPS)
    list(islice(run, 3))
    run.close()
    assert len(list((tmp_path / "two").glob("own-*.jsonl"))) < 3
    assert list(write_own_answers(model, tokenizer, tmp_path / "two", CFG, STOPS))[-1] == 30
    assert read(tmp_path / "one") == read(tmp_path / "two")
    with pytest.raises(ValueError, match="holds answers with another seed, 0 and not 1"):
        list(write_own_answers(model, tokenizer, tmp_path / "two", replace(CFG, seed=1), STOPS))


def test_prompts_of_a_file_are_answered(model, tmp_path):
    tokenizer = tiny.byte_tokenizer()
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hi"}\n\nSay no\n' + "x" * 500 + "\n")
    prompts = read_prompts(path, tokenizer, 40)
    assert prompts == [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Hi", "Say no")]
    found = list(islice(OwnPrompts(model, tokenizer, CFG, STOPS, prompts).read(0), 6))
    assert sorted(map(tuple, found[:2])) == sorted(map(tuple, prompts))
    assert found[:2] == found[2:4]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": 3}\n', ':1 has no text under "prompt"'),
        ("fine\n{oops\n", ":2 is no JSON"),
        ("\n\n", "has no prompt of at most 40 tokens"),
    ],
)
def test_bad_prompts_are_named(tmp_path, text, message):
    path = tmp_path / "prompts"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(path, tiny.byte_tokenizer(), 40)


def test_a_model_that_only_loops_is_refused(model, tmp_path):
    cfg = replace(CFG, rows=4, most_repeats=1, temperatures=(1e-6,))
    head = model.head
    model.head = lambda hidden: torch.nn.functional.one_hot(torch.full(hidden.shape[:-1], 70), tiny.VOCAB).float() * 50
    try:
        with pytest.raises(ValueError, match="writes no user turns of its own"):
            list(write_own_answers(model, tiny.byte_tokenizer(), tmp_path / "turns", cfg, STOPS))
        with pytest.raises(ValueError, match="every answer loops"):
            list(write_own_answers(model, tiny.byte_tokenizer(), tmp_path / "given", cfg, STOPS, [[1, 9, 10]]))
    finally:
        model.head = head
