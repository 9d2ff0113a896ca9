"""Stories are sampled from a teacher into the files that a recipe reads."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from serving import make

from redraft import checkpoint, load
from redraft.cli import data as cli_data
from redraft.train import stories
from redraft.train.evals.judge import FIRST_BYTE, FIRST_TOKEN
from redraft.train.records import DataConfig, Source, read_shuffled


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama checkpoint of two layers, with a list of its tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), " a", "b", "ab", {"bytes": [0xC3]}, {"bytes": [0xA4]}]
    (folder / "tokens.jsonl").write_text("".join(json.dumps(token) + "\n" for token in tokens), encoding="utf-8")
    return folder


def test_ids_of_a_llama_become_text(llama):
    teacher = stories.LlamaCheckpoint(llama)
    assert teacher.decode([FIRST_TOKEN, FIRST_TOKEN + 2, FIRST_TOKEN + 3, FIRST_TOKEN + 4]) == "aabä"
    assert teacher.decode([FIRST_BYTE + ord("x")]) == "x"


def test_a_llama_with_a_list_of_tokens_becomes_a_folder(llama, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from make_stories_folder import make_folder

    with pytest.raises(SystemExit, match=r"tokens\.jsonl has a token that is not a text"):
        make_folder(llama, tmp_path / "out")
    special = (llama / "tokens.jsonl").read_text(encoding="utf-8").splitlines()[:FIRST_TOKEN]
    source = shutil.copytree(llama, tmp_path / "source")
    (source / "tokens.jsonl").write_text("\n".join([*special, '" "', '"a"', '"b"', '" a"', '"ab"']), encoding="utf-8")
    make_folder(source, tmp_path / "out")
    writer = load(tmp_path / "out", device="cpu")
    for text in ("ab ab", "xab ba\n", "a"):
        assert writer.tokenizer.encode_prompt(text) == stories.LlamaCheckpoint(source).encode(text)
        assert writer.tokenizer.decode(writer.tokenizer.encode(text)) == text
    assert writer.sampler.eos_token_ids == (2, 1)
    assert writer.write("ab", max_tokens=4).stats.prompt_tokens == 3
    with pytest.raises(SystemExit, match="is the teacher itself"):
        make_folder(source, source)
    with pytest.raises(SystemExit, match=r"out has no tokens\.jsonl: give a Llama checkpoint"):
        make_folder(tmp_path / "out", source)


def test_a_recipe_reads_the_stories_of_a_llama(llama, tmp_path, capsys):
    def make_stories(out):
        cli_data.data("stories", teacher=str(llama), count=20, out=str(tmp_path / out), seed=3, device="cpu")
        files = sorted((tmp_path / out / "stories").iterdir())
        assert [file.name for file in files] == [f"stories_{number:02}.txt.xz" for number in range(8)]
        config = DataConfig(sources=(Source(files=tuple(map(str, files))),))
        return sorted(record["text"] for _, record in read_shuffled(config, config.sources[0], 0))

    first = make_stories("a")
    assert len(first) == 20
    assert first == make_stories("b")  # the seed decides
    assert capsys.readouterr().out.startswith("20 stories in ")
    with pytest.raises(ValueError, match="has stories already: add --force"):
        make_stories("a")


@pytest.mark.soak
def test_the_model_that_ships_is_a_teacher_too(monkeypatch):
    monkeypatch.setattr(stories, "BATCH", 12)
    texts = list(itertools.islice(stories.sample_stories("tiny", "cpu", seed=0), 9))
    assert all(len(text) > 20 and "<" not in text for text in texts)


@pytest.mark.soak
def test_a_teacher_that_ends_no_story_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stories, "BATCH", 2)
    monkeypatch.setattr(stories, "LONGEST", 64)
    writer = make(32)
    checkpoint.save(writer.model, tmp_path / "model", tokenizer=writer.tokenizer, sampler=writer.sampler)
    with pytest.raises(ValueError, match="ended none of 8 stories: choose another --teacher"):
        next(stories.sample_stories(tmp_path / "model", "cpu", seed=0))


def test_an_interrupted_run_leaves_no_file(tmp_path):
    def texts():
        yield "one"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(stories.write_stories(texts(), 3, tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keywords", "words"), [({"kind": "poems"}, "can make stories, got 'poems'"), ({"count": 0}, "--count")]
)
def test_mistakes_are_one_sentence(keywords, words):
    with pytest.raises(ValueError, match=words):
        cli_data.data(**{"kind": "stories", **keywords})
