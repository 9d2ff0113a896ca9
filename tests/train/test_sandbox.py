"""The sandbox contains every program: network, files, processes, memory and time. A contained program counts as failed."""

import os
import socket
import subprocess
import sys

import pytest

from redraft.train.evals import sandbox, tasks

try:
    sandbox.check_isolation()
    REASON = ""
except sandbox.IsolationError as error:
    REASON = str(error)
isolated = pytest.mark.skipif(bool(REASON), reason=REASON)


@isolated
def test_programs_pass_only_if_they_run_to_their_end():
    assert sandbox.passes("assert 1 + 1 == 2")
    assert sandbox.passes("import collections, heapq, json, math, re, string, typing\nassert math.pi > 3")
    assert not sandbox.passes("assert 1 + 1 == 3")
    assert not sandbox.passes("this is no program")
    assert not sandbox.passes("import sys; sys.exit(0)")
    assert not sandbox.passes("import os; assert os.environ.get('PATH')")


@isolated
def test_no_socket_can_be_opened():
    """A server of ours gets no connection, by TCP or UDP; no Unix socket can be made either."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not sandbox.passes(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # a connection would wait in the backlog
            server.accept()
    assert not sandbox.passes("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)")
    assert not sandbox.passes("import socket; socket.socket(socket.AF_UNIX)")


@isolated
@pytest.mark.parametrize(
    "attack",
    [
        "open(target, 'w')",
        "open(target, 'a')",
        "open(target + '.new', 'w')",
        "os.remove(target)",
        "os.rename(target, target + '.moved')",
        "os.rename(target, 'here')",
        "os.link(target, 'here')",
        "os.truncate(target, 0)",
        "os.open(target, os.O_RDONLY | os.O_TRUNC)",
        "os.chmod(target, 0)",
        "os.utime(target)",
        "os.setxattr(target, 'user.x', b'1')",
        "os.mkdir(target + '.folder')",
        "os.symlink('x', target + '.link')",
    ],
)
def test_nothing_outside_its_folder_changes(tmp_path, attack):
    target = tmp_path / "target"
    target.write_text("unchanged")
    before = target.stat()
    assert not sandbox.passes(f"import os\ntarget = {str(target)!r}\n{attack}")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert target.read_text() == "unchanged"
    assert target.stat() == before or (target.stat().st_mode, target.stat().st_mtime_ns) == (
        before.st_mode,
        before.st_mtime_ns,
    )


@isolated
def test_files_in_its_folder_stay_empty():
    assert sandbox.passes("open('a', 'w').close()")
    assert not sandbox.passes("open('a', 'w').write('x' * 10); open('a').read()[0]")


@isolated
@pytest.mark.parametrize(
    "attack",
    [
        "import os\nwhile True: os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true') == 0 or exit(1)",
        "import os; os.execv('/bin/true', ['true'])",
        "import threading; threading.Thread(target=print).start()",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
    ],
)
def test_no_process_can_be_started(attack):
    assert not sandbox.passes(attack)


@isolated
def test_no_process_can_be_signalled():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        assert not sandbox.passes(f"import os; os.kill({victim.pid}, 9)")
        assert not sandbox.passes(f"import os; os.kill({os.getpid()}, 0)")
        assert victim.poll() is None
        victim.communicate(b"\n")


@isolated
def test_the_kernel_sends_no_signal_for_it_and_no_folder_is_made():
    assert sandbox.passes("import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_GETFD)")
    for command in ("F_SETOWN", "F_SETSIG"):
        assert not sandbox.passes(f"import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.{command}, os.getppid())")
    assert not sandbox.passes("import os; os.mkdir('folder')")
    assert not sandbox.passes("import socket; socket.socketpair()")


@pytest.mark.soak
@isolated
def test_memory_and_time_are_limited(monkeypatch):
    assert not sandbox.passes("x = bytearray(3 << 30)")
    assert not sandbox.passes("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert not sandbox.passes("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))")
    monkeypatch.setattr(sandbox, "WALL_SECONDS", 1.0)
    assert not sandbox.passes("while True: pass")
    assert not sandbox.passes("import time; time.sleep(100)")


@isolated
def test_the_rights_stay_lost():
    """A program cannot replace the filter or the Landlock rules."""
    assert not sandbox.passes("import os; os.setgroups([])")
    escape = "import ctypes; libc = ctypes.CDLL(None); assert libc.unshare(0x10000000) == 0"
    assert not sandbox.passes(escape)
    assert not sandbox.passes("import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0")


def options(**changes) -> tasks.Options:
    return tasks.Options(data=None, judge="", count=1, levels=1, canvas=None, **changes)


def test_code_runs_only_with_permission():
    with pytest.raises(ValueError, match="allow that with --allow-code-execution"):
        tasks.infill(None, None, None, options())


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("platform", "darwin", "isolation needs Linux, this is darwin"),
        ("machine", "riscv64", "not for riscv64"),
        ("landlock", 99, "the kernel needs Landlock version 99"),
    ],
)
def test_code_does_not_run_where_it_cannot_be_isolated(monkeypatch, attribute, value, reason):
    sandbox.check_isolation.cache_clear()
    if attribute == "platform":
        monkeypatch.setattr(sandbox.sys, "platform", value)
    elif attribute == "machine":
        monkeypatch.setattr(sandbox.platform, "machine", lambda: value)
    else:
        monkeypatch.setattr(sandbox, "LANDLOCK_MIN_ABI", value)
    with pytest.raises(ValueError, match=reason):
        tasks.infill(None, None, None, options(allow_code_execution=True))
    sandbox.check_isolation.cache_clear()


@isolated
def test_a_failed_test_of_the_isolation_refuses_all_code(monkeypatch):
    sandbox.check_isolation.cache_clear()
    monkeypatch.setattr(sandbox, "_run", lambda program: 1)
    with pytest.raises(sandbox.IsolationError, match="a test of its isolation failed"):
        sandbox.check_isolation()
    sandbox.check_isolation.cache_clear()
