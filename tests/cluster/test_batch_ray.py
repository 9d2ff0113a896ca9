"""Batches on a Ray cluster of this machine: workers and the whole command are killed, and every request has one answer."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import commands
import pytest
import tiny
from batches import choices_by_id, read_answers, request, write_batch
from ray_cluster import RayCluster
from tiny import wait_until

ROOT = Path(__file__).parent.parent.parent
LINES = [request(f"r{number}", prompt=f"prompt {number}", max_tokens=6, seed=number) for number in range(150)]
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


def start(folder: Path, *arguments: str, cluster: RayCluster | None = None) -> subprocess.Popen:
    """Starts a command of redraft in a folder, on a cluster or without one."""
    on_cluster = ("--ray", cluster.address) if cluster else ()
    environment = cluster.env if cluster else {**os.environ, "PYTHONPATH": str(ROOT)}
    environment = {**environment, "REDRAFT_MODEL": str(folder / "model")}
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [*commands.redraft(), *arguments, *on_cluster], cwd=folder, env=environment, stdout=log, stderr=log
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


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_a_worker(cluster: RayCluster, command: subprocess.Popen) -> None:
    assert wait_until(lambda: bool(find_workers(cluster.pid)) or command.poll() is not None)
    os.kill(find_workers(cluster.pid)[0], signal.SIGKILL)


def test_requests_are_answered_once_while_workers_of_a_running_cluster_are_killed(folder, cluster):
    out = folder / "killed.jsonl"
    with start(folder, "batch", "in.jsonl", "--out", out.name, "-m", "model", cluster=cluster) as command:
        for least in (1, 60):
            assert wait_until(lambda least=least: count_lines(out) >= least or command.poll() is not None)
            assert command.poll() is None, (folder / "log.txt").read_text()
            assert count_lines(out) < len(LINES)
            kill_a_worker(cluster, command)
        assert command.wait() == 0, (folder / "log.txt").read_text()
    answers = choices_by_id(out)  # no custom_id is there twice
    assert len(answers) == len(LINES)
    assert answers == choices_by_id(folder / "alone.jsonl")


def test_a_killed_batch_leaves_no_worker_and_resumes(folder):
    out = folder / "resumed.jsonl"
    arguments = ["batch", "in.jsonl", "--out", out.name, "--workers", "2"]
    local = [sys.executable, "-m", "redraft", *arguments, "--ray", "local"]  # whose processes are found below its own
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REDRAFT_MODEL": str(folder / "model")}
    with subprocess.Popen(local, cwd=folder, env=environment, stderr=subprocess.DEVNULL) as command:
        assert wait_until(lambda: count_lines(out) > 0 or command.poll() is not None)
        workers = find_workers(command.pid)
        assert len(workers) == 2
        command.kill()
    assert wait_until(lambda: all(tiny.has_ended(pid) for pid in workers))  # they end with it
    kept = out.read_bytes()
    assert 0 < count_lines(out) < len(LINES)
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req_to')  # a torn line
    with start(folder, *arguments, "--ray", "local", "--resume") as command:
        assert command.wait() == 0, (folder / "log.txt").read_text()
    assert out.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert choices_by_id(out) == choices_by_id(folder / "alone.jsonl")


def test_a_worker_says_what_the_user_did_wrong(folder, cluster):
    out = folder / "none.jsonl"
    (folder / "log.txt").unlink()
    with start(folder, "batch", "in.jsonl", "--out", out.name, "--adapter", "none", cluster=cluster) as command:
        assert command.wait() == 2
    assert "redraft: a worker of the Ray cluster cannot begin: none holds no adapter" in (folder / "log.txt").read_text()
    assert not out.exists()


def test_augment_on_a_cluster_equals_augment_on_one_machine(folder, cluster):
    records = [json.dumps({"id": number, "text": f"record {number} has six words"}) for number in range(30)]
    (folder / "records.jsonl").write_text("\n".join(records))
    options = ["augment", "records.jsonl", "--share", "50%", "-n", "2", "--seed", "3", "--out"]
    for name, where in (("alone.aug", None), ("ray.aug", cluster)):
        with start(folder, *options, name, cluster=where) as command:
            assert command.wait() == 0, (folder / "log.txt").read_text()
    assert len(read_answers(folder / "alone.aug")) > 10
    assert (folder / "ray.aug").read_bytes() == (folder / "alone.aug").read_bytes()
