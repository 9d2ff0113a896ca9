"""Everything a user does, on a GPU, through the door and without naming a device.

    python -m pytest -m gpu tests/gpu tests/engine/test_gpu.py tests/engine/test_cuda_graph_runner.py tests/kernels

Each test asks the GPU how much of its memory was used: a path that silently runs on the CPU fails.
"""

import gc
import json
import lzma
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch

import redraft
from redraft.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}


@pytest.fixture(autouse=True)
def _on_the_gpu(request):
    """The test has used the GPU's memory when it ends; tests that start processes look for themselves."""
    gc.collect()  # models of earlier tests would be let go in the middle of this one
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    if "elsewhere" not in request.keywords:
        assert torch.cuda.max_memory_allocated() > before


@pytest.fixture(name="chat_folder", scope="module")
def _chat_folder(tmp_path_factory):
    """A tiny checkpoint with the special tokens of a chat."""
    return str(tiny.save_folder(tmp_path_factory.mktemp("chat")))


@pytest.fixture(name="cli")
def _cli(monkeypatch, capsys):
    """The command line in this process: exit code, stdout, stderr."""

    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", *args])
        read, write = os.pipe()
        os.write(write, stdin.encode())
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            monkeypatch.setattr(sys, "stdin", pipe)
            with pytest.raises(SystemExit) as left:
                main.main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_load_takes_a_device_with_and_without_an_index(device):
    writer = redraft.load(device=device)
    assert writer.model.device == torch.device("cuda", 0)
    assert writer.write("Once upon a time", seed=1, max_tokens=32).text


def test_a_story_is_the_same_from_the_command_line_and_from_python(cli):
    code, out, err = cli("Once upon a time", "--seed", "7", "--json")
    assert code == 0, err
    assert json.loads(out)["text"] == redraft.load().write("Once upon a time", seed=7).text


def test_the_command_line_takes_a_device_without_an_index(cli):
    code, out, err = cli("Once upon a time", "--device", "cuda", "--seed", "7", "-n", "32")
    assert code == 0, err
    assert out.strip()


def test_several_prompts_are_written_at_once():
    writer = redraft.load()
    prompts = ["Once upon a time", "One day, a little fox", "The big red"]
    answers = writer.write(prompts, seed=3, max_tokens=64)
    assert len(answers) == 3
    assert all(answer.text for answer in answers)


def test_chat(cli, chat_folder):
    code, out, err = cli("chat", "-m", chat_folder, "--seed", "1", stdin="Hello\nAnd now?\n")
    assert code == 0, err
    assert out


def test_fill(cli, tmp_path):
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a little [[ ]] named Lily.")
    code, out, err = cli("fill", str(file), "--seed", "1")
    assert code == 0, err
    assert out.startswith("Once upon a time there was a little ")
    assert out.rstrip().endswith(" named Lily.")
    assert "[[" not in out


def test_edit_and_suggest(cli, tmp_path):
    file = tmp_path / "story.txt"
    file.write_text("Once upon a time there was a little girl named Lily. She loved to play with her table toys.")
    code, out, err = cli("edit", str(file), "--seed", "1")
    assert code == 0, err
    assert out.strip()
    code, _, err = cli("edit", str(file), "--suggest")
    assert code == 0, err


def test_regex(cli):
    code, out, err = cli("The boy was born on", "--regex", " [0-9]{4}-[01][0-9]", "--seed", "3", "--json")
    assert code == 0, err
    year, month = json.loads(out)["text"].strip().split("-")
    assert (len(year), len(month)) == (4, 2)


def test_schema_and_choices(cli, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    code, out, err = cli("Lily was three years old. JSON:", "--schema", str(schema), "--seed", "1", "--json")
    assert code == 0, err
    assert set(json.loads(json.loads(out)["text"])) == {"age"}
    code, out, err = cli("The cat was", "--choices", " happy, sad", "--seed", "1", "--json")
    assert code == 0, err
    assert json.loads(out)["text"].strip() in ("happy", "sad")


def test_decide():
    probabilities = redraft.load().decide("Lily was very", [" happy", " table"])
    assert sum(probabilities.values()) == pytest.approx(1.0)
    assert probabilities[" happy"] > probabilities[" table"]


def test_sudoku(cli):
    code, out, err = cli("sudoku", PUZZLE, "--seed", "1", "--json")
    assert code == 0, err
    assert json.loads(out)["board"] == SOLVED


def test_quantize_and_load_what_was_written(cli, tmp_path):
    code, _, err = cli("quantize", "tiny", str(tmp_path / "fp8"))
    assert code == 0, err
    code, out, err = cli("Once upon a time", "-m", str(tmp_path / "fp8"), "--seed", "1", "-n", "64")
    assert code == 0, err
    assert len(out.split()) > 10
    code, out, err = cli("Once upon a time", "--quant", "fp8", "--seed", "1", "-n", "64")
    assert code == 0, err


def test_eval(cli, tmp_path):
    (tmp_path / "stories").mkdir()
    story = "Once upon a time there was a little girl named Lily. She loved to play with her toys in the park. " * 5
    with lzma.open(tmp_path / "stories" / "tinystories_val_a.txt.xz", "wt", encoding="utf-8") as file:
        file.write("\n".join([story] * 4))
    code, out, err = cli("eval", "tiny", "--task", "stories", "--count", "2", "--data", str(tmp_path))
    assert code == 0, err
    assert json.loads(out)["task"] == "stories"


def test_augment(cli, tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"text": "Lily loved to play with her big red ball in the park."}) + "\n")
    code, _, err = cli("augment", str(source), "--out", str(tmp_path / "more.jsonl"), "--seed", "1")
    assert code == 0, err
    assert (tmp_path / "more.jsonl").read_text().strip()


def test_info_and_warm(cli):
    code, out, err = cli("info")
    assert code == 0, err
    assert torch.cuda.get_device_name() in out
    code, _, err = cli("warm")
    assert code == 0, err


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_train(cli, tmp_path):
    code, _, err = cli("train", "toy", "--out", str(tmp_path / "toy"), "--set", "steps=2", "--set", "compile=false")
    assert code == 0, err
    assert (tmp_path / "toy" / "model" / "model.safetensors").exists()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.elsewhere
def test_serve_with_the_openai_client(tmp_path):
    openai = pytest.importorskip("openai")
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("fastapi")
    port = _free_port()
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "redraft", "serve", "--port", str(port)]
    free, _ = torch.cuda.mem_get_info()
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, env=environment, stderr=stderr)
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.1)
        assert torch.cuda.mem_get_info()[0] < free  # the server's memory is on the GPU
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        whole = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=64, seed=5)
        assert whole.choices[0].text == redraft.load().write("Once upon a time", seed=5, max_tokens=64).text
        pieces = client.completions.create(model="tiny", prompt="Once upon a time", max_tokens=64, seed=5, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text
        choice = client.completions.create(
            model="tiny", prompt="The cat was", max_tokens=16, extra_body={"guided_choice": [" happy", " sad"]}
        )
        assert choice.choices[0].text in (" happy", " sad")
        filled = client.completions.create(model="tiny", prompt="The little ", suffix=" wanted to play.", max_tokens=8)
        assert filled.choices[0].text
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(600)


@pytest.mark.elsewhere
def test_a_second_process_finds_its_kernels_on_disk(tmp_path):
    """Counted by Triton itself: the second process builds nothing."""
    root = Path(__file__).parents[2]
    paths = {"TRITON_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": str(root)}
    code = (
        "import redraft\n"
        "from redraft.kernels.builds import watch_builds\n"
        "built = []\n"
        "with watch_builds(built.append):\n"
        "    redraft.load().write('Once upon a time', seed=1)\n"
        "print(len(built))\n"
    )
    counts = [
        int(subprocess.run([sys.executable, "-c", code], env={**os.environ, **paths}, capture_output=True, text=True).stdout)
        for _ in range(2)
    ]
    assert counts[0] > 0
    assert counts[1] == 0
