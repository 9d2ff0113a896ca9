"""redraft train and redraft eval as people type them."""

import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
import test_loop
import tiny
import torch

from redraft.cli import main
from redraft.cli.train import drop_later_reports
from redraft.train.evals import judge, tasks
from redraft.train.loop import Report, Trainer

ROOT = Path(__file__).parents[2]
RECIPE = """
import sys
sys.path[:0] = {tests!r}
import test_loop


def recipe(folder):
    return test_loop.config(folder)
"""


@pytest.fixture(name="run")
def _run(monkeypatch, capsys):
    """Runs the command line in this process: (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", *args])
        with pytest.raises(SystemExit) as left:
            main.main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


@pytest.fixture(name="recipe")
def _recipe(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(RECIPE.format(tests=[str(ROOT / "tests" / "train"), str(ROOT / "tests")]))
    return str(path)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_a_model_metrics_and_a_picture(run, recipe, tmp_path):
    out = tmp_path / "run"
    code, printed, err = run("train", recipe, "--out", str(out), "--set", "steps=3", "--device", "cpu")
    assert (code, printed) == (0, f"{out}/model\n")
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]
    assert {"loss", "denoiser", "ar", "tokens_per_second", "balance", "idle", "rate", "epoch"} <= set(metrics(out)[0])
    assert (out / "curves.png").stat().st_size > 1000
    assert json.loads((out / "recipe.json").read_text())["steps"] == 3
    assert "step 3  loss" in err
    assert f"redraft -m {out}/model" in err
    code, text, _ = run("Hi", "--raw", "-m", str(out / "model"), "--json", "-n", "8")
    assert code == 0
    assert json.loads(text)["stats"]["canvases"] == 1


@pytest.mark.soak
def test_a_run_resumes_where_it_stopped(run, recipe, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run("train", recipe, "--out", str(whole), "--set", "steps=6", "--device", "cpu")
    run("train", recipe, "--out", str(parts), "--set", "steps=6", "--set", "max_seconds=0", "--device", "cpu")
    assert [line["step"] for line in metrics(parts)] == [1]
    run("train", recipe, "--out", str(parts), "--set", "steps=6", "--device", "cpu")
    assert [line["loss"] for line in metrics(parts)] == [line["loss"] for line in metrics(whole)]


def test_a_line_that_a_killed_run_did_not_finish_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\n{"step": 3}\n{"st')
    drop_later_reports(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.soak
def test_ctrl_c_writes_a_checkpoint(recipe, tmp_path):
    out = tmp_path / "run"
    command = [*commands.redraft(), "train", recipe, "--out", str(out), "--set", "steps=100000"]
    process = subprocess.Popen([*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    while not (out / "metrics.jsonl").exists() or not metrics(out):
        time.sleep(0.2)
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "stopped at step" in err
    assert list(out.glob("step-*"))


@pytest.mark.soak
def test_two_processes_give_the_losses_of_one(recipe, tmp_path):
    """torchrun starts two processes: FSDP2 over gloo. One process computes the same losses and resumes their checkpoint."""
    two = tmp_path / "two"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "redraft"]
    command = [*launcher, "train", recipe, "--out", str(two), "--set", "steps=10", "--set", "save_every=5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("done at step 10") == 1
    assert [line["step"] for line in metrics(two)] == list(range(1, 11))
    cfg = test_loop.config(tmp_path, steps=10, save_every=5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in each of the two: sums split over threads round differently
    one = Trainer(cfg, tmp_path / "one")
    losses = [event.loss for event in one.run() if isinstance(event, Report)]
    torch.set_num_threads(threads)
    assert len(losses) == 10
    assert max(abs(a["loss"] - b) for a, b in zip(metrics(two), losses, strict=True)) < 1e-4
    gathered = Trainer(cfg, two)
    assert gathered.step == 10
    for name, tensor in one.optimizer.state().items():
        assert torch.allclose(tensor, gathered.optimizer.state()[name], rtol=1e-2, atol=1e-3), name


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "no recipe 'nothing'"),
        (["toy", "--set", "stepz=1"], "no 'stepz' here"),
        (["toy", "--set", "steps=x"], "no JSON value"),
        (["tiny"], "stories_0"),
    ],
)
def test_a_mistake_is_one_sentence(run, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.setenv("REDRAFT_DATA", str(tmp_path / "nowhere"))
    code, _, err = run("train", *arguments, "--out", str(tmp_path / "run"), "--device", "cpu")
    assert code == 2
    assert complaint in err
    assert err.strip().count("\n") == 0


@pytest.fixture(name="data")
def _data(tmp_path):
    """A folder as the evaluations expect it, with texts of our own."""
    (tmp_path / "stories").mkdir()
    (tmp_path / "code").mkdir()
    with lzma.open(tmp_path / "stories/tinystories_val_a.txt.xz", "wt") as file:
        file.write("\n\n".join(["short"] + [f"{n} little foxes went out to play. " * 11 for n in range(3)]))
    for name, numbers in (("eval", (0, 1, 2)), ("train", (1, 5))):
        with lzma.open(tmp_path / f"code/pyfuncs_{name}.jsonl.xz", "wt") as file:
            for n in numbers:
                file.write(json.dumps({"t": f"def f{n}(x):\n    y = x + {n}\n\n    return y * {n}\n    pass\n"}) + "\n")
    return tmp_path


@pytest.mark.soak
def test_stories_and_code_are_scored(run, data, tmp_path):
    folder = str(tiny.save_folder(tmp_path / "model"))
    common = ["--data", str(data), "--count", "2", "--device", "cpu"]
    code, out, err = run("eval", folder, *common, "--levels", "2", "--out", str(tmp_path / "scores.json"))
    assert code == 0
    found = json.loads(out)
    assert found["texts"] == 2
    assert found["ar_bits_per_byte"] > 0
    assert 0 <= found["kept_0.3_look2"] <= 1
    assert json.loads((tmp_path / "scores.json").read_text()) == found
    assert "nelbo_over_ar" in err
    code, out, _ = run("eval", folder, "--task", "code", *common, "--canvas-length", "32")
    assert code == 0
    assert (json.loads(out)["holes"], json.loads(out)["new"]) == (2, 1)  # f1 was trained on
    code, out, err = run("eval", folder, "--task", "infill", *common)
    assert (code, out) == (2, "")
    assert err == "redraft: this task runs code that the model writes: allow that with --allow-code-execution\n"
    code, _, err = run("eval", folder, "--task", "poems", *common)
    assert (code, "no task 'poems'" in err) == (2, True)
    code, _, err = run("eval", folder, "--data", str(tmp_path / "none"), "--device", "cpu")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.soak
def test_samples_are_scored_by_a_judge(run, data, tmp_path, monkeypatch):
    class Letters:
        """Finds letters likelier than anything else."""

        def __init__(self, folder: str, device: torch.device) -> None:
            assert folder == "someone"

        def __call__(self, texts: list[str]) -> float:
            letters = sum(c.isalpha() for text in texts for c in text)
            return 1 + 10 * (1 - letters / sum(map(len, texts)))

    monkeypatch.setattr(tasks, "LlamaJudge", Letters)
    folder = str(tiny.save_folder(tmp_path / "model"))
    common = ["eval", folder, "--task", "samples", "--count", "2", "--judge", "someone", "--device", "cpu"]
    code, out, _ = run(*common, "--set", "max_steps=2", "--set", "max_new_tokens=16", "--set", "stability_threshold=9")
    assert code == 0
    found = json.loads(out)
    assert found["tokens_per_forward"] <= 8  # two steps at least for a canvas of 16
    assert found["changes"][0] == "max_steps=2"
    assert (found["entropy"], found["ratio"]) == (None, None)  # too short to say
    assert len(found["left_to_right"]) == 8
    assert (found["check"], found["drafted"], found["unknown_words"]) == ("off", 0, None)
    (tmp_path / "words.txt").write_text("once upon a time")
    short = ["--set", "max_new_tokens=16", "--batch", "1", "--words", str(tmp_path / "words.txt")]
    for check in ("checked", "exact"):
        code, out, _ = run(*common, "--check", check, *short)
        found = json.loads(out)
        assert (code, found["check"]) == (0, check)
        assert found["drafted"] >= found["accepted"] + found["corrected"] > 0
        assert found["unknown_words"] >= 0
        assert found["doubled_words"] >= found["doubled_adjacent"]
    for flags, sentence in (
        (["--check", "maybe"], "check must be off, checked or exact, got 'maybe'"),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--task", "stories", "--check", "exact"], "--check is for --task samples: leave it out"),
    ):
        code, _, err = run(*common, *flags)
        assert (code, err) == (2, f"redraft: {sentence}\n")
    with pytest.raises(ValueError, match=r"no tokens\.jsonl"):
        judge.LlamaJudge(tmp_path)
