"""Resumed = unbroken, and whatever happens there is a checkpoint that loads, or none. tests/cli has many processes = one."""

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from redraft import checkpoint
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.config import TrainConfig
from redraft.train.loop import Ended, Report, Trainer, compile_parts, init_model, with_compute_dtype
from redraft.train.loss import LossConfig, Objective
from redraft.train.optim import OptimConfig
from redraft.train.records import DataConfig, Source

ROOT = Path(__file__).parents[2]


def config(folder: Path, **changes: object) -> TrainConfig:
    """A run of a few seconds over a text that repeats itself."""
    texts = folder / "texts.txt"
    folder.mkdir(parents=True, exist_ok=True)
    texts.write_text("\n<|endofstory|>\n".join(f"{n} and {n + 1} are {2 * n + 1}" for n in range(50)))
    usual = {
        "model": tiny.BASE,
        "sampler": tiny.sampler(),
        "data": DataConfig(sources=(Source(files=(str(texts),), prompt_share=0.5),), length=40, canvas_lengths=(4, 8)),
        "loss": LossConfig(on_policy=0.5, span_noise=0.2),
        "optim": OptimConfig(warmup=2),
        "tokenizer": "bytes",
        "steps": 8,
        "rows": 2,
        "microbatches": 2,
        "streams": 2,
        "report_every": 1,
        "save_every": 4,
    }
    return TrainConfig(**{**usual, **changes})


def events(cfg: TrainConfig, out: Path) -> list:
    return list(Trainer(cfg, out).run())


def losses(found: list) -> list[float]:
    return [event.loss for event in found if isinstance(event, Report)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load_model(folder).state_dict())


def test_the_exported_model_is_the_average_and_loads(tmp_path):
    trainer = Trainer(config(tmp_path, steps=3), tmp_path / "run")
    *_, ended = trainer.run()
    assert ended == Ended(3, tmp_path / "run/model", "done")
    for name, tensor in weights(ended.model).items():
        if name in trainer.optimizer.average:
            assert torch.equal(tensor, trainer.optimizer.average[name].to(torch.bfloat16)), name
    assert Tokenizer.from_folder(ended.model).encode("hi") == trainer.tokenizer.encode("hi")


def test_only_the_last_checkpoints_are_kept(tmp_path):
    events(config(tmp_path, steps=6, save_every=1, keep=2), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000005", "step-00000006"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path, number):
    found = []
    for event in Trainer(config(tmp_path, steps=100, save_every=100), tmp_path / "run").run():
        found.append(event)
        if isinstance(event, Report) and event.step == 3:
            os.kill(os.getpid(), number)
    assert found[-1].why == "stopped"
    assert found[-1].step in (3, 4)
    assert Trainer(config(tmp_path, steps=100), tmp_path / "run").step == found[-1].step


def test_out_of_time_ends_the_run_with_a_checkpoint(tmp_path):
    for expected in (1, 2):  # each call has the time for itself
        *_, saved, ended = events(config(tmp_path, steps=100, max_seconds=0.0), tmp_path / "run")
        assert (saved.step, ended.why) == (expected, "out of time")


@pytest.mark.soak
def test_a_run_by_the_clock_cools_down_in_time(tmp_path):
    cfg = config(tmp_path, steps=10**6, max_seconds=3.0, by_clock=True, report_every=1)
    found = events(cfg, tmp_path / "run")
    reports = [event for event in found if isinstance(event, Report)]
    assert found[-1].why == "done"
    assert found[-2].step == found[-1].step < 10**5
    rates = [report.rate for report in reports]
    cooling = rates[rates.index(max(rates)) :]  # warm-up comes before
    assert cooling[-1] == min(cooling) < 0.5 * max(rates)
    late = [report for report in reports if report.seconds > 2.0]
    assert all(a.rate >= b.rate for a, b in itertools.pairwise(late))
    with pytest.raises(ValueError, match="by_clock needs max_seconds"):
        config(tmp_path, by_clock=True)


def test_losses_fall_and_experts_share_the_load(tmp_path):
    optim = OptimConfig(warmup=2, muon_lr=1e-2, adamw_lr=8e-3)
    cfg = config(tmp_path, steps=24, rows=8, microbatches=1, optim=optim)
    found = [event for event in events(cfg, tmp_path / "run") if isinstance(event, Report)]
    assert found[-1].denoiser < 0.8 * found[0].denoiser
    assert found[-1].ar < 0.8 * found[0].ar
    assert found[-1].idle > 0.1
    assert found[-1].tokens == 24 * 8 * 40


@pytest.mark.soak
def test_bf16_computes_near_float32_and_keeps_float32_weights(tmp_path):
    both = [losses(events(config(tmp_path, precision=p, steps=4), tmp_path / p)) for p in ("float32", "bfloat16")]
    assert max(abs(a - b) for a, b in zip(*both, strict=True)) < 0.1
    assert both[0] != both[1]
    objective = Objective(init_model(tiny.BASE, 0), LossConfig())
    assert with_compute_dtype(objective, "bfloat16") is not objective
    trainer = Trainer(config(tmp_path, precision="bfloat16"), tmp_path / "run")
    assert {p.dtype for p in trainer.objective.parameters()} == {torch.float32}


def test_a_run_can_start_from_a_checkpoint(tmp_path):
    start = tiny.save_folder(tmp_path / "start")
    trainer = Trainer(config(tmp_path, init=str(start), steps=2), tmp_path / "run")
    before = weights(start)
    for name, p in trainer.objective.model.named_parameters():
        assert torch.equal(p.to(before[name].dtype), before[name]), name
    *_, ended = trainer.run()
    assert Tokenizer.from_folder(ended.model).size == tiny.byte_tokenizer().size
    after = weights(ended.model)
    for name in (n for n in before if n.endswith("layer_scalar")):
        assert torch.equal(after[name], before[name].to(after[name].dtype)), name
        assert not torch.equal(after[name], torch.ones_like(after[name])), name


def test_another_batch_does_not_continue_a_run(tmp_path):
    events(config(tmp_path, steps=2), tmp_path / "run")
    with pytest.raises(ValueError, match="another folder"):
        Trainer(config(tmp_path, rows=4), tmp_path / "run")


def test_a_vocabulary_is_trained_once(tmp_path):
    cfg = config(tmp_path, tokenizer="bpe", model=replace(tiny.BASE, vocab_size=300), steps=1)
    events(cfg, tmp_path / "run")
    kept = tmp_path / "run/tokenizer/tokenizer.json"
    stamp = kept.stat().st_mtime_ns
    Trainer(replace(cfg, steps=2), tmp_path / "run")
    assert kept.stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match="the tokenizer has 262 tokens, the model 200"):
        Trainer(config(tmp_path, model=replace(tiny.BASE, vocab_size=200, image_token_ids=(1, 2, 3))), tmp_path / "other")


def test_a_loss_that_is_not_finite_ends_the_run_with_one_sentence(tmp_path):
    trainer = Trainer(config(tmp_path), tmp_path / "run")
    with torch.no_grad():
        trainer.objective.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="the loss is nan at step 1"):
        list(trainer.run())


def test_an_export_replaces_that_of_an_earlier_run_and_nothing_else(tmp_path):
    out = tmp_path / "run"
    trainer = Trainer(config(tmp_path), out)
    trainer.export()
    trainer.export()
    (out / "model" / "thesis.txt").write_text("x")
    with pytest.raises(checkpoint.CheckpointError, match=r"holds 'thesis\.txt', which is no file of a checkpoint"):
        Trainer(config(tmp_path), out)


def test_a_run_names_the_records_that_it_reads_skips_and_shortens(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"prompt": "x", "completion": "y" * (60 if n == 3 else 5)} for n in range(9)] + [{"prompt": "x"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    data = DataConfig(sources=(Source(files=(str(path),)),), length=40, canvas_lengths=(8,), skip_bad=True)
    trainer = Trainer(config(tmp_path, data=data, steps=6), tmp_path / "run")
    *_, report = (event for event in trainer.run() if isinstance(event, Report))
    assert (report.bad, report.shortened) == (1, 1)
    assert set(trainer.task.records) == {0, 1}  # by microbatch
    assert {name for names in trainer.task.records.values() for name in names} <= {f"{path}:{n}" for n in range(1, 10)}
    notes = dict(trainer.task.take_notes())
    assert set(notes) == {f"{path}:4", f"{path}:10"}
    assert "divided between rows" in notes[f"{path}:4"]
    assert trainer.task.take_notes() == []


def test_every_part_and_function_of_an_objective_is_compiled(monkeypatch):
    functions = []
    parts = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: functions.append(function.__name__) or function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda part, **_: parts.append(part))
    model = init_model(tiny.BASE, 0)
    compile_parts(Objective(model, LossConfig()))
    assert functions == ["cross_entropy", "predict_soft_embedding", "draft_terms"]
    assert parts == [*model.layers, model.norm, model.self_conditioning]
