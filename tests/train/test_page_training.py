"""Page adapters: training lowers the loss of canvases, gaps are filled with what stands behind them, resumed = unbroken."""

import json
import random
from dataclasses import replace
from pathlib import Path

import llama_models
import pytest
import tiny
import torch

from redraft import checkpoint
from redraft.model.page import PageConfig
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.adapting import AdaptOptions, adapting_config, adapting_data, choose_streams, measure_gaps
from redraft.train.config import TrainConfig
from redraft.train.documents import Document
from redraft.train.evals.gaps import TokenGap, read_documents, remove_spans, score_gaps
from redraft.train.held_out import Evaluated
from redraft.train.loop import Trainer
from redraft.train.records import Source


def write_texts(folder: Path) -> Path:
    """A random Llama with a byte vocabulary in `base`, and in `texts.jsonl` texts that repeat one letter each."""
    llama_models.save_with_bytes(folder / "base", num_hidden_layers=1)
    rng = random.Random(0)
    texts = [rng.choice("abcdefgh") * 40 for _ in range(96)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("pages"))


def make_config(folder: Path, steps: int, **changes) -> TrainConfig:
    page = PageConfig(rank=8, alpha=16.0, canvas_lengths=(16, 32))
    options = AdaptOptions(page=page, length=64, batch=8, rows=8, steps=steps, rate=3e-2)
    source = Source(files=(str(folder / "texts.jsonl"),), every=8)
    cfg = adapting_config(str(folder / "base"), adapting_data(source, 128, options), 4000, options, torch.device("cpu"))
    return replace(cfg, **changes)


def test_only_page_adapters_learn_from_gaps_and_from_answers_without_questions(folder):
    source = Source(files=(str(folder / "texts.jsonl"),), own=True, every=8)
    found = []
    for options in (AdaptOptions(page=PageConfig(canvas_lengths=(16, 32)), length=64), AdaptOptions(length=64)):
        data = adapting_data(source, 128, options)
        cfg = adapting_config(str(folder / "base"), data, 4000, options, torch.device("cpu"))
        found.append(
            (cfg.loss.gap_noise, cfg.loss.span_noise, data.sources[0].drop_prompt_share, data.sources[0].prompt_share)
        )
    assert found == [(0.5, 0.3, 0.5, 0.5), (0.0, 0.0, 0.0, 0.0)]


def train(cfg: TrainConfig, out: Path) -> list[dict[str, float]]:
    return [event.scores for event in Trainer(cfg, out).run() if isinstance(event, Evaluated)]


@pytest.mark.soak
def test_canvases_fill_gaps_that_left_to_right_cannot(folder, tmp_path):
    """The base knows nothing of the texts; trained pairs copy the letter that stands on both sides."""
    cfg = make_config(folder, 90, evaluate_every=10, save_every=90)
    before = {path.name: path.read_bytes() for path in (folder / "base").iterdir()}
    scores = train(cfg, tmp_path)
    assert scores[-1]["denoiser"] < scores[0]["denoiser"] - 1
    assert {path.name: path.read_bytes() for path in (folder / "base").iterdir()} == before
    settings = json.loads((tmp_path / "adapter.json").read_text())
    assert settings["kind"] == "page"
    assert settings["scores"]["held_out"]["denoiser"] == min(score["denoiser"] for score in scores)
    model, tokenizer, sampler = checkpoint.load_checkpoint(tmp_path, dtype="float32")
    found = measure_gaps(model, tokenizer, sampler, cfg.data.sources[0])
    assert found["canvases"].exact_tokens > found["left_to_right"].exact_tokens + 0.4
    assert found["removed"].exact_gaps == 1


def test_a_few_steps_lower_the_loss(folder, tmp_path):
    cfg = make_config(folder, 2, evaluate_every=1)
    scores = train(cfg, tmp_path)
    assert scores[-1]["denoiser"] < scores[0]["denoiser"]
    assert scores[0].keys() == {"denoiser"}  # the causal half is frozen
    for page in (replace(cfg.page, rank=4), replace(cfg.page, canvas_lengths=(16,))):
        with pytest.raises(ValueError, match="give another folder"):
            Trainer(replace(cfg, page=page), tmp_path)


def test_one_part_is_trained_at_a_time(folder):
    cfg = make_config(folder, 4)
    with pytest.raises(ValueError, match="not two at once"):
        replace(cfg, drafter=AdaptOptions().drafter)
    with pytest.raises(ValueError, match="needs a model: set init"):
        replace(cfg, init="")


# Gaps


def test_spans_are_removed_from_the_answer_with_context_on_both_sides():
    documents = [Document([9] * 3, [*range(10, 10 + length), 2, 2]) for length in range(60)]
    gaps = list(remove_spans(iter(documents), (2,), 128))
    assert 20 < len(gaps) < 60
    for before, part, after in gaps:
        assert 4 <= len(part) <= 16
        assert min(len(before), len(after)) >= 8
        joined = [*before, *part, *after]
        assert 2 not in joined
        assert joined[3:] == list(range(10, 7 + len(joined)))
    assert gaps == list(remove_spans(iter(documents), (2,), 128))
    short = list(remove_spans(iter(documents), (2,), 70))
    assert max(len(gap.before) for gap in short) <= 70 - 16 - 32


def test_held_out_texts_are_read_in_order(folder):
    source = Source(files=(str(folder / "texts.jsonl"),), every=8, is_held_out=True)
    tokenizer = Tokenizer.from_folder(folder / "base")
    documents = list(read_documents(source, tokenizer, 2))
    lines = (folder / "texts.jsonl").read_text().splitlines()
    assert [tokenizer.decode(document.answer[:-1]) for document in documents] == [
        json.loads(line)["text"] for line in lines[7::8]
    ]


def test_both_ways_are_scored_alike():
    """A gap that the text determines: the removed tokens are all exact, and every way has its score."""
    writer = tiny.writer()
    gaps = [TokenGap([2, *range(20, 30)], [40, 41, 42, 43], list(range(30, 38))) for _ in range(2)]
    done = []
    scores = score_gaps(writer.model, writer.tokenizer, writer.sampler, gaps, done.append)
    assert list(scores) == ["canvases", "left_to_right", "removed"]
    assert (scores["removed"].exact_tokens, scores["removed"].exact_gaps) == (1, 1)
    assert all(score.nats_after > 0 for score in scores.values())
    assert scores["left_to_right"].exact_tokens < 1
    assert done == [2]
    hot = score_gaps(writer.model, writer.tokenizer, writer.sampler.changed(t_min=9.0, t_max=9.0), gaps)
    assert hot["canvases"] != scores["canvases"]  # the settings of the sampler are those of the canvases
    assert hot["left_to_right"] == scores["left_to_right"]
    with pytest.raises(ValueError, match="no text is long enough"):
        score_gaps(writer.model, writer.tokenizer, writer.sampler, [])


def test_a_gpu_gets_its_rows_from_several_processes():
    gpu = torch.device("cuda")
    assert [choose_streams(rows, gpu) for rows in (64, 6, 7, 1)] == [4, 2, 1, 1]
    assert choose_streams(64, torch.device("cpu")) == 1
