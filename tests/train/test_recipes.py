"""Recipes are found by name and changed by key=value; errors name the mistake. `toy` learns its grammar."""

import json
import re
from pathlib import Path

import pytest
import torch
from test_loop import config

import redraft
from redraft.train import plot
from redraft.train.data import SPECIAL_TOKENS
from redraft.train.evals import samples
from redraft.train.evals.judge import build_vocabulary
from redraft.train.loop import Trainer
from redraft.train.recipe import change_settings, load_recipe
from redraft.train.recipes import toy
from redraft.train.sudoku_data import PuzzleConfig

ROOT = Path(__file__).parents[2]


def test_the_recipes_that_ship_load_and_state_their_cost(tmp_path):
    for path in sorted((ROOT / "redraft" / "train" / "recipes").glob("[!_]*.py")):
        loaded = load_recipe(path.stem, tmp_path / path.stem)
        assert loaded.model.vocab_size >= 262 or isinstance(loaded.data, PuzzleConfig)
        assert max(loaded.model.image_token_ids) < len(SPECIAL_TOKENS)
        assert "ost" in path.read_text().split('"""')[1], f"{path} does not say what it costs"
        assert load_recipe(str(path), tmp_path / path.stem) == loaded


@pytest.mark.soak
def test_toy_learns_its_grammar(tmp_path):
    """It reaches the losses of its docstring, and at least half of the words it writes are words of the grammar."""
    changes = ["save_every=1000", "report_every=20"]
    trainer = Trainer(load_recipe("toy", tmp_path, changes), tmp_path)
    *reports, _, ended = trainer.run()
    assert reports[0].denoiser > 2.5
    assert reports[-1].denoiser < 0.65
    assert reports[-1].ar < 0.29  # 0.26 is the entropy of the grammar
    assert reports[-1].idle > 0.2
    writer = redraft.load(ended.model, dtype="float32")
    diffusion = samples.sample(samples.make_engine(writer.model), writer.tokenizer, "the ", 16, writer.sampler)
    assert share_of_words(["the " + text for text in diffusion.texts]) > 0.5
    noise = [writer.tokenizer.decode(torch.randint(6, 262, (96,)).tolist()) for _ in range(16)]
    assert share_of_words(noise) < 0.02


def share_of_words(texts: list[str]) -> float:
    known = {word for text in toy.sentences(1) for word in text.replace(".", " ").split()}
    words = [word for text in texts for word in text.replace(".", " ").split()]
    return sum(word in known for word in words) / max(1, len(words))


def test_the_shipped_model_fits_its_folder(tmp_path):
    model = load_recipe("tiny", tmp_path).model
    assert model.parameter_counts()["total"] * 2 < 32 * 2**20 - 400_000
    assert model.num_experts > model.top_k_experts


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("steps=7", lambda c: c.steps == 7),
        ("optim.warmup=3", lambda c: c.optim.warmup == 3),
        ("optim.clip=2", lambda c: c.optim.clip == 2),
        ("data.canvas_lengths=[4, 16]", lambda c: c.data.canvas_lengths == (4, 16)),
        ("tokenizer=some/folder", lambda c: c.tokenizer == "some/folder"),
        ("compile=true", lambda c: c.compile is True),
        ("max_seconds=5", lambda c: c.max_seconds == 5),
        ("model.num_experts=8", lambda c: c.model.num_experts == 8),
    ],
)
def test_a_value_is_replaced(tmp_path, change, read):
    assert read(change_settings(config(tmp_path), [change]))


def test_values_that_need_one_another_come_in_any_order(tmp_path):
    by_clock = change_settings(config(tmp_path), ["by_clock=true", "max_seconds=5"])
    assert by_clock.by_clock
    assert by_clock.max_seconds == 5
    mixed = change_settings(config(tmp_path), ["streams=6", "optim.warmup=3", "rows=12", "optim.clip=2"])
    assert (mixed.streams, mixed.rows, mixed.optim.warmup, mixed.optim.clip) == (6, 12, 3, 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("steps", "key=value"),
        ("stepz=3", "no 'stepz' here; known are model"),
        ("optim.lr=3", "no 'lr' here; known are muon_lr"),
        ("steps.more=3", "'steps' has no parts"),
        ("steps=three", "no JSON value"),
        ("steps=true", "is no int"),
        ("steps=1.5", "is no int"),
        ("compile=1", "is no bool"),
        ("optim.clip=-1", "clip must be above 0"),
        ("rows=0", "rows"),
    ],
)
def test_a_mistake_in_a_change_is_named(tmp_path, change, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        change_settings(config(tmp_path), [change])


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match="no recipe 'nothing'; known are sudoku, tiny, tiny_draft, tiny_sudoku, toy"):
        load_recipe("nothing", tmp_path)
    with pytest.raises(ValueError, match=r"no recipe none/x\.py"):
        load_recipe("none/x.py", tmp_path)
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="has no function recipe"):
        load_recipe(str(tmp_path / "empty.py"), tmp_path)


def test_a_name_never_runs_a_file_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    for name in ("toy", "mine"):
        Path(f"recipes/{name}.py").write_text("raise SystemExit('it has run')")
    assert load_recipe("toy", tmp_path) == toy.recipe(tmp_path)
    with pytest.raises(ValueError, match=r"no recipe 'mine'; .* or give a path as \./mine.py"):
        load_recipe("mine", tmp_path)
    with pytest.raises(SystemExit, match="it has run"):
        load_recipe("recipes/mine.py", tmp_path)


def test_metrics_are_plotted(tmp_path):
    lines = [{"tokens": n * 1000, "denoiser": 3 / n, "ar": 2 / n, "rate": 0.5, "balance": 1.1} for n in range(1, 9)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plot.draw_metrics(tmp_path / "m.jsonl", tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "m.jsonl").write_text("")
    with pytest.raises(ValueError, match="no reports yet"):
        plot.draw_metrics(tmp_path / "m.jsonl", tmp_path / "c.png")


def test_the_judges_vocabulary_merges_the_earliest_pair_first():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "ab", "bc", "abc", "a", "b", "c", " "]
    encoder = build_vocabulary(tokens)
    assert encoder.encode("abc").ids == [261]  # ab first, then abc
    assert encoder.encode("bca").ids == [260, 262]
    assert encoder.encode("a b").ids == [262, 265, 263]
    assert encoder.encode("é").ids == [3 + 0xC3, 3 + 0xA9]
