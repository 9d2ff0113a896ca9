"""Drafters are trained in bf16 as in float32: they cast their own weights, also where logits are computed in pieces.

Training may start with an earlier drafter.
"""

import json
import random
from dataclasses import replace

import llama_models
import pytest
import torch

from redraft import checkpoint
from redraft.cli.adapt import check_start, name_scores
from redraft.diffusion.draft_tree import engine_tree
from redraft.model.drafter import DrafterConfig, new_drafter
from redraft.model.lora import AdapterError
from redraft.train import adapting, draft_loss
from redraft.train.adapting import AdaptOptions, adapting_config, adapting_data
from redraft.train.config import TrainConfig
from redraft.train.evals import acceptance
from redraft.train.held_out import Evaluated
from redraft.train.loop import Trainer
from redraft.train.records import Source


def write_answers(folder):
    """A random Llama with a byte vocabulary in `base`, and answers in `own-0000.jsonl`."""
    llama_models.save_with_bytes(folder / "base", num_hidden_layers=1)
    rng = random.Random(0)
    answers = [{"prompt_ids": [1, 9], "ids": [rng.choice((70, 71, 72))] * 40} for _ in range(64)]
    (folder / "own-0000.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return folder


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return write_answers(tmp_path_factory.mktemp("drafts"))


def make_config(folder, **changes) -> TrainConfig:
    drafter = DrafterConfig(rank=4, alpha=8.0, head_size=16, canvas_length=4)
    options = AdaptOptions(drafter=drafter, length=64, batch=4, rows=4, steps=4, rate=3e-2)
    source = Source(files=(str(folder / "own-0000.jsonl"),), own=True, every=8)
    cfg = adapting_config(str(folder / "base"), adapting_data(source, 128, options), 2560, options, torch.device("cpu"))
    return replace(cfg, **{"evaluate_every": 1, "save_every": 4, **changes})


def train(folder, out, **changes) -> list[dict[str, float]]:
    return [event.scores for event in Trainer(make_config(folder, **changes), out).run() if isinstance(event, Evaluated)]


def test_bf16_learns_what_float32_learns_also_in_pieces(folder, tmp_path, monkeypatch):
    expected = train(folder, tmp_path / "float32")
    monkeypatch.setattr(draft_loss, "MAX_LOGITS", 2 * 260 * 100)  # pieces are computed again in the backward pass
    found = train(folder, tmp_path / "bfloat16", precision="bfloat16")
    assert expected[-1]["draft"] < expected[0]["draft"] - 0.1
    assert [score["draft"] for score in found] == pytest.approx([score["draft"] for score in expected], rel=0.02)


def test_an_earlier_drafter_is_the_start(folder, tmp_path):
    first = train(folder, tmp_path / "first")
    again = {"start_adapter": str(tmp_path / "first")}
    assert train(folder, tmp_path / "second", **again)[0]["draft"] < first[0]["draft"] - 0.05
    kept = checkpoint.read_drafter_config(tmp_path / "second")[0]
    model = checkpoint.load_model(folder / "base")
    check_start(str(tmp_path / "first"), tmp_path / "second", model)  # as the run that made the checkpoint there
    check_start("", tmp_path / "first", model)
    for start, message in (("", r"began with --from .*first: repeat it"), (str(tmp_path), r"began with --from .*first")):
        with pytest.raises(ValueError, match=message):
            check_start(start, tmp_path / "second", model)
    with pytest.raises(AdapterError, match=r"first has .*rank=4.*, but this run trains .*rank=2"):
        train(folder, tmp_path / "third", **again, drafter=replace(kept, rank=2))


PROMPTS = [[1, 9], [1, 70, 71]]


def make_drafting(folder, canvas_length: int, family: str = "smollm2"):
    """A random model with a new drafter."""
    llama_models.save_reference(folder, family, num_hidden_layers=2, max_position_embeddings=64)
    model = checkpoint.load_model(folder)
    cfg = DrafterConfig(rank=2, head_size=8, canvas_length=canvas_length)
    model.drafter = new_drafter(cfg, model.config, torch.zeros(model.config.hidden_size))
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(("canvas_length", "runs"), [(4, 1), (8, 2)])
def test_drafts_are_measured_in_rows_and_in_the_tree_of_the_engine(tmp_path, monkeypatch, canvas_length, runs):
    """The canvases behind a tree may be shorter: then both are measured."""
    monkeypatch.setattr(adapting, "MEASURED_TOKENS", 20)
    monkeypatch.setattr(adapting, "TEMPERATURES", (0.7, 1.0))
    model = make_drafting(tmp_path, canvas_length)
    calls = []
    monkeypatch.setattr(adapting, "measure", lambda *args, **kwargs: calls.append(1) or acceptance.measure(*args, **kwargs))
    found = adapting.measure_drafts(model, PROMPTS, canvas_length)
    assert len(calls) == 2 * runs
    for score, temperature in zip(found, (0.7, 1.0), strict=True):
        texts = acceptance.sample_texts(model, PROMPTS, temperature, 23)
        measured = (model, texts, [2, 3], temperature)
        rows = acceptance.measure(*measured, canvas_length=canvas_length, draft_token=llama_models.VOCAB)
        tree = engine_tree(canvas_length)
        trees = acceptance.measure(*measured, canvas_length=tree.depth + 1, draft_token=llama_models.VOCAB, tree=tree)
        assert score == replace(rows, tree=trees.tree)
        assert trees.tree > rows.exact
        assert f", in trees {trees.tree:.2f}, " in str(score)
    assert name_scores(found).keys() == {"tokens_per_round", "tokens_per_round_in_trees"}


def test_windows_have_no_scores_in_trees(tmp_path, monkeypatch):
    monkeypatch.setattr(adapting, "MEASURED_TOKENS", 20)
    found = adapting.measure_drafts(make_drafting(tmp_path, 4, "mistral"), PROMPTS, 4)
    assert [score.tree for score in found] == [None] * 3
    assert "trees" not in str(found[0])
    assert name_scores(found).keys() == {"tokens_per_round"}
