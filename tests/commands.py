"""Starts `redraft ...` as a fork of a process that has imported everything: in a fraction of a second instead of seconds.

    subprocess.Popen([*commands.redraft(), "write", "Hello"], ...)

Three processes take part. The test starts the caller, a Python without modules, which the test talks to as to any process.
The caller hands its arguments, folder, environment, stdin, stdout and stderr to the parent; the parent forks the command,
which has all that as if it had been started so. The command's exit code, or the signal that killed it, is the caller's.
SIGINT and SIGTERM go on to the command, and a caller that is killed takes the command with it. `KILL` is kill -9 of the
command: when the caller has ended, the command has too. Variables that libraries read when they are loaded are the parent's.
"""

import functools
import json
import os
import select
import signal
import socket
import sys

KILL = signal.SIGUSR1
FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, KILL: signal.SIGKILL}
MAX_BYTES = 2**16  # of arguments and environment: a socket takes so many at once


@functools.cache
def redraft() -> list[str]:
    """The words that stand for `redraft`. The first call starts the parent, which ends with this process."""
    import atexit
    import subprocess
    import tempfile

    folder = tempfile.TemporaryDirectory(prefix="redraft-commands-")
    path = os.path.join(folder.name, "socket")
    parent = subprocess.Popen([sys.executable, __file__, "parent", path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"ready\n"

    def end() -> None:
        parent.communicate()
        folder.cleanup()

    atexit.register(end)
    return [sys.executable, "-IS", __file__, path]


def call(path: str, arguments: list[str]) -> None:
    """The caller: waits for a command of these arguments and ends as it does."""
    waiting = {*FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, waiting)  # until the command's process is known
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    message = json.dumps([arguments, os.getcwd(), dict(os.environ), ignored]).encode()
    assert len(message) <= MAX_BYTES
    socket.send_fds(connection, [message], [0, 1, 2])
    replies = connection.makefile()
    pid = int(replies.readline())
    for number, forwarded in FORWARDED.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, forwarded=forwarded: os.kill(pid, forwarded))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, waiting)
    code = os.waitstatus_to_exitcode(int(replies.readline()))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def become(message: bytes, files: list[int]) -> None:
    """A fork takes over what the caller was started with."""
    arguments, folder, environment, ignored = json.loads(message)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    sys.argv = ["redraft", *arguments]
    sys.stdin = open(0, errors="surrogateescape")  # noqa: SIM115 - as Python's own
    sys.stdout = open(1, "w", errors="surrogateescape")  # noqa: SIM115
    sys.stderr = open(2, "w", errors="backslashreplace", buffering=1)  # noqa: SIM115


def fork_commands(path: str) -> None:
    """The parent: forks a command for each caller and tells the caller how it ended. Returns in the commands alone."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    callers = {}  # process of a command: its caller
    own_stdin = os.dup(0)  # open as long as the process of the tests
    print("ready", flush=True)
    while True:
        readable = select.select([listener, woken, own_stdin, *callers.values()], [], [])[0]
        if own_stdin in readable:
            for pid in callers:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if woken in readable:
            os.read(woken, 4096)
        for pid, caller in callers.items():
            if caller in readable:  # it was killed, for it sends nothing
                os.kill(pid, signal.SIGKILL)
        for pid in [*callers]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with callers.pop(pid) as caller:
                    tell(caller, status)
        if listener in readable:
            caller = listener.accept()[0]
            message, files, _, _ = socket.recv_fds(caller, MAX_BYTES, 3)
            pid = os.fork()
            if not pid:
                for other in (caller, listener, *callers.values()):
                    other.close()
                for file in (woken, wake, own_stdin):
                    os.close(file)
                become(message, files)
                return
            for file in files:
                os.close(file)
            callers[pid] = caller
            tell(caller, pid)


def tell(caller: socket.socket, number: int) -> None:
    """Sends a number to a caller, which may have been killed."""
    try:
        caller.sendall(b"%d\n" % number)
    except OSError:
        return


def run() -> None:
    """Runs the command and ends the process, without the interpreter's own end: that would copy the parent's memory."""
    import atexit
    import threading

    from redraft.cli.start import start

    code = 0
    try:
        start()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] != "parent":
        call(sys.argv[1], sys.argv[2:])
    sys.path[0] = os.path.dirname(sys.path[0])  # the checkout instead of its tests
    import gc
    import importlib
    import pkgutil

    import redraft as package

    for module in pkgutil.walk_packages(package.__path__, "redraft."):
        if not module.name.startswith(
            ("redraft.__main__", "redraft.kernels.triton", "redraft.cluster", "redraft.train.recipes")
        ):
            importlib.import_module(module.name)
    gc.freeze()
    fork_commands(sys.argv[2])
    run()
