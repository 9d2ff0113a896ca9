"""Batches on a Ray cluster of this machine: workers and the whole command are killed, and every request has one answer."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from batches import choices_by_id, read_answers, request, write_batch
from tiny import wait_until

ROOT = Path(__file__).parent.parent.parent
LINES = [request(f"r{number}", prompt=f"prompt {number}", max_tokens=6, seed=number) for number in range(500)]
pytestmark = pytest.mark.soak


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    """A folder with a model, a batch and the answers of one machine to it."""
    folder = tmp_path_factory.mktemp("batch")
    tiny.save_folder(folder / "model")
    write_batch(folder / "in.jsonl", LINES)
    with start(folder, "batch", "in.jsonl", "--out", "alone.jsonl") as command:
        assert command.wait() == 0
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    """Starts a command of redraft in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REDRAFT_MODEL": str(folder / "model")}
    log = (folder / "log.txt").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "redraft", *arguments], cwd=folder, env=environment, stdout=log, stderr=log
        )


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for process in found:
        found += parents.get(process, [])
    return found[1:]


def find_workers(pid: int) -> list[int]:
    """The workers of a job that a process runs."""
    workers = []
    for process in descendants(pid):
        try:
            title = (Path("/proc") / str(process) / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::MapWorker"):
            workers.append(process)
    return workers


def first_choices(folder: Path, count: int) -> dict[str, object]:
    """The answers of one machine to the first requests."""
    alone = choices_by_id(folder / "alone.jsonl")
    return {line["custom_id"]: alone[line["custom_id"]] for line in LINES[:count]}


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_a_worker(command: subprocess.Popen) -> None:
    assert wait_until(lambda: bool(find_workers(command.pid)) or command.poll() is not None, checks=12_000)
    os.kill(find_workers(command.pid)[0], signal.SIGKILL)


def test_500_requests_are_answered_once_while_workers_are_killed(folder):
    out = folder / "killed.jsonl"
    with start(folder, "batch", "in.jsonl", "--out", out.name, "--ray", "local", "--workers", "2") as command:
        for least in (1, 200):
            assert wait_until(lambda least=least: count_lines(out) >= least or command.poll() is not None, checks=12_000)
            assert command.poll() is None, (folder / "log.txt").read_text()
            assert count_lines(out) < len(LINES)
            kill_a_worker(command)
        assert command.wait() == 0, (folder / "log.txt").read_text()
    answers = choices_by_id(out)  # no custom_id is there twice
    assert len(answers) == 500
    assert answers == choices_by_id(folder / "alone.jsonl")


def test_a_killed_batch_resumes_on_a_cluster(folder):
    out = folder / "resumed.jsonl"
    write_batch(folder / "fewer.jsonl", LINES[:200])
    arguments = ["batch", "fewer.jsonl", "--out", out.name, "--ray", "local", "--workers", "2"]
    with start(folder, *arguments) as command:
        assert wait_until(lambda: count_lines(out) > 0 or command.poll() is not None, checks=12_000)
        workers = find_workers(command.pid)
        command.kill()
    assert wait_until(lambda: all(tiny.has_ended(pid) for pid in workers), checks=12_000)  # they end with it
    kept = out.read_bytes()
    assert 0 < count_lines(out) < 200
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_to')  # a torn line
    with start(folder, *arguments, "--resume") as command:
        assert command.wait() == 0, (folder / "log.txt").read_text()
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert choices_by_id(out) == first_choices(folder, 200)


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.fixture(name="address", scope="module")
def _address():
    """A running cluster of two nodes."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", CLUSTER], env=environment, **pipes) as process:
        line = next(line for line in process.stdout if ":" in line and " " not in line)
        yield line.strip()
        process.communicate("\n")


def test_a_batch_joins_a_running_cluster(folder, address):
    write_batch(folder / "some.jsonl", LINES[:40])
    with start(folder, "batch", "some.jsonl", "--out", "joined.jsonl", "--ray", address, "-m", "model") as command:
        assert command.wait() == 0, (folder / "log.txt").read_text()
    assert choices_by_id(folder / "joined.jsonl") == first_choices(folder, 40)


def test_a_worker_says_what_the_user_did_wrong(folder, address):
    out = folder / "none.jsonl"
    (folder / "log.txt").unlink()
    with start(folder, "batch", "in.jsonl", "--out", out.name, "--ray", address, "--adapter", "none") as command:
        assert command.wait() == 2
    assert "redraft: a worker of the Ray cluster cannot begin: none holds no adapter" in (folder / "log.txt").read_text()
    assert not out.exists()


def test_augment_on_a_cluster_equals_augment_on_one_machine(folder, address):
    records = [json.dumps({"id": number, "text": f"record {number} has six words"}) for number in range(30)]
    (folder / "records.jsonl").write_text("\n".join(records))
    options = ["augment", "records.jsonl", "--share", "50%", "-n", "2", "--seed", "3", "--out"]
    for name, more in (("alone.aug", []), ("ray.aug", ["--ray", address])):
        with start(folder, *options, name, *more) as command:
            assert command.wait() == 0, (folder / "log.txt").read_text()
    assert len(read_answers(folder / "alone.aug")) > 10
    assert (folder / "ray.aug").read_bytes() == (folder / "alone.aug").read_bytes()
