"""Helper process: runs a stranger's work (a chat template, a pattern) where it can be stopped and has a memory limit.

    HelperProcess.call(message) -> [python -m MODULE: answer_calls(handle)] -> answer

A thread cannot be stopped, and Python code in one thread slows down all others, which wait for the interpreter's lock. A
process can be killed. Its time limit counts processor time: beside busy programs the same work takes longer by the clock.
It imports no PyTorch. Messages are bytes, sent through pipes with their length in front.
"""

import atexit
import ctypes
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

HEADER = struct.Struct("<q")  # the length of a message
READY = b"ready"  # the first message of a process: its imports are done
ANSWER, OUT_OF_MEMORY, FAULT = b"a", b"m", b"f"  # the first byte of every later one
POLL_SECONDS = 0.02  # how often a caller checks its stop event
COUNTS_PROCESSOR_TIME = hasattr(signal, "setitimer")  # not on Windows, where the clock limits a call
MEMORY_BYTES = 1 << 30  # of address space
LACK_OF_MEMORY = (signal.SIGABRT, signal.SIGSEGV)  # how libraries end a process that gets no memory
THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # each thread would take address space
PACKAGE = str(Path(__file__).parents[2])  # the folder that holds redraft


class HelperError(RuntimeError):
    """A helper process gave no answer."""


class HelperTimeoutError(HelperError):
    """The work took more processor time than its limit and was killed."""


class HelperStoppedError(HelperError):
    """The caller's stop event was set, and the work was killed."""


class HelperMemoryError(HelperError):
    """The work needed more memory than the process may use."""


class HelperProcess:
    """One process that answers one call at a time. It starts with the first call, and again after it was killed.

    `seconds` is the processor time that a call may take. `setup` is a message that a new process receives first and does
    not answer.
    """

    def __init__(self, module: str, *, seconds: float, setup: bytes | None = None) -> None:
        self.module = module
        self.seconds = seconds
        self.setup = setup
        self.starts = 0  # how many processes were started
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, message: bytes, stop: threading.Event | None = None) -> bytes:
        """Sends a message and waits for its answer. Kills the process when time is up or `stop` is set."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            _check_stop(stop)
        try:
            process = self._running_process(stop)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended: `_wait_for_answer` says why
                write_message(process.stdin, message)
            return self._read_answer(self._wait_for_answer(stop))
        except BaseException:
            self._kill()  # nobody waits for its answer
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ends the process and closes its pipes. A call in another thread raises HelperError."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if process := self._process:
                process.kill()  # its caller closes the pipes
        try:
            self._kill()
        finally:
            self._lock.release()

    def _running_process(self, stop: threading.Event | None) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self._kill()
            # -P: files in the working directory, which may be a downloaded folder, are not imported.
            paths = [path for path in sys.path if path and Path(path).resolve() != Path.cwd()]
            environment = {
                **os.environ,
                **dict.fromkeys(THREAD_COUNTS, "1"),
                "PYTHONPATH": os.pathsep.join([PACKAGE, *paths]),
            }
            command = [sys.executable, "-P", "-m", self.module, str(self.seconds)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            atexit.register(self._kill)
            self.starts += 1
            self._answers = queue.SimpleQueue()
            assert self._process.stdout is not None
            self._reader = threading.Thread(
                target=_read_answers, args=(self._process.stdout, self._answers), name="redraft-helper", daemon=True
            )
            self._reader.start()
            assert self._wait_for_answer(stop) == READY
            if self.setup is not None:
                assert self._process.stdin is not None
                write_message(self._process.stdin, self.setup)
        return self._process

    def _wait_for_answer(self, stop: threading.Event | None) -> bytes:
        began = time.monotonic()
        while True:
            _check_stop(stop)
            with suppress(queue.Empty):
                answer = self._answers.get(timeout=POLL_SECONDS)
                if answer is not None:
                    return answer
                assert self._process is not None
                code = self._process.wait()
                if COUNTS_PROCESSOR_TIME and code == -signal.SIGPROF:
                    raise self._timeout_error()
                if -code in LACK_OF_MEMORY:
                    raise HelperMemoryError(f"{self.module} was ended by signal {-code}")
                if code < 0:  # `close`, an operator, or the system, which needed memory for others
                    raise HelperError(f"{self.module} was killed by signal {-code}")
                raise HelperError(f"{self.module} has ended with exit code {code}")
            if not COUNTS_PROCESSOR_TIME and time.monotonic() - began > self.seconds:
                raise self._timeout_error()

    def _timeout_error(self) -> HelperTimeoutError:
        return HelperTimeoutError(f"{self.module} took longer than {self.seconds:g} s")

    def _read_answer(self, answer: bytes) -> bytes:
        kind = answer[:1]
        if kind == OUT_OF_MEMORY:
            raise HelperMemoryError(f"{self.module} has used all its memory")
        if kind == FAULT:  # a fault of our own code, with its trace
            raise HelperError(f"{self.module} failed: {answer[1:].decode()}")
        return answer[1:]

    def _kill(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            atexit.unregister(self._kill)
            assert self._reader is not None
            self._reader.join()  # it closes the other pipe


def _check_stop(stop: threading.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise HelperStoppedError("the caller has stopped waiting")


def _read_answers(pipe: IO[bytes], answers: "queue.SimpleQueue[bytes | None]") -> None:
    """Reads answers until the pipe ends, then adds None. A thread, because a pipe cannot be read with a time limit."""
    with pipe:
        while (answer := read_message(pipe)) is not None:
            answers.put(answer)
    answers.put(None)


def write_message(pipe: IO[bytes], message: bytes) -> None:
    """Writes a message with its length in front."""
    pipe.write(HEADER.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> bytes | None:
    """Reads a message; None at the end of the pipe."""
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    message = pipe.read(length)
    return message if len(message) == length else None


def answer_calls(handle: Callable[[bytes], bytes], set_up: Callable[[bytes], None] | None = None) -> None:
    """The main function of a helper process: answers messages until its parent closes the pipe or dies.

    `set_up` takes the first message, which has no answer. The first argument of the program is the processor time of a
    call, at whose end the operating system ends the process with SIGPROF.
    """
    _limit_memory()
    seconds = float(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    sys.stdout = sys.stderr  # a print of the work must not look like an answer
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while (message := read_message(sys.stdin.buffer)) is not None:
            messages.put(message)
        os._exit(0)  # the parent has gone: whatever the main thread does, nobody waits for it

    threading.Thread(target=read, daemon=True).start()
    with suppress(KeyboardInterrupt):  # Ctrl-C goes to the whole process group; the parent decides
        write_message(answers, READY)
        if set_up is not None:
            set_up(messages.get())
        while True:
            message = messages.get()
            _limit_processor_time(seconds)
            try:
                answer = ANSWER + handle(message)
            except MemoryError:
                answer = OUT_OF_MEMORY
            except Exception:
                answer = FAULT + traceback.format_exc().encode()
            _limit_processor_time(0)
            write_message(answers, answer)
            return_free_memory()


def return_free_memory() -> None:
    """Gives memory that was freed back to the operating system; the C library would keep much of it. glibc only."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _limit_processor_time(seconds: float) -> None:
    """Ends the process after so much processor time from now on; 0 lifts the limit."""
    if COUNTS_PROCESSOR_TIME:
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory() -> None:
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
