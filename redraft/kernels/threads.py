"""CPU threads: as many as there are free cores now.

PyTorch splits every operation into one part per thread and waits for the slowest. A step of a small model has thousands of
such operations. When another program takes one of the cores, the thread on that core is preempted, and every operation waits
for it: a story that takes 7 s on two idle cores took 102 s beside a busy program, and 12 s with one thread. So the thread
count follows the load: `adapt_threads` compares how long the cores were busy with how long this process used them, and
leaves the cores that other programs use to those programs. Programs of a lower priority (`nice`) do not count: they give
the core back at once.

The user's own choice wins: OMP_NUM_THREADS, MKL_NUM_THREADS, `--threads`, or a call of torch.set_num_threads with a count
that redraft has not set itself.
"""

import os
import threading
import time
from pathlib import Path

import torch

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # PyTorch reads these; set, they are the user's choice
WINDOW = 0.1  # seconds: the kernel counts busy time in hundredths of a second
SLACK = 0.3  # of a core: less than this is housekeeping, not a neighbour
STAT = Path("/proc/stat")


class ThreadGovernor:
    """Sets the thread count of PyTorch from the load of the cores that this process may use."""

    def __init__(self) -> None:
        self.is_fixed = any(os.environ.get(name) for name in VARIABLES)
        self.most = torch.get_num_threads()
        self._target = self.most
        self._lock = threading.Lock()
        self._own_counts = {self.most}  # PyTorch keeps the count per thread: another thread may still have an older one
        self._last = None if self.is_fixed else read_load()

    def fix(self, threads: int) -> None:
        """Uses this many threads from now on."""
        if threads < 1:
            raise ValueError(f"the number of threads must be 1 or more, got {threads}")
        self.is_fixed = True
        torch.set_num_threads(threads)

    def adapt(self) -> int:
        """Sets the thread count for the next step, if enough time has passed to know the load; returns the count."""
        threads = torch.get_num_threads()
        if self.is_fixed or self.most == 1:
            return threads
        if threads not in self._own_counts:  # a call of torch.set_num_threads
            self.is_fixed = True
            return threads
        with self._lock:
            if self._last is None or time.monotonic() - self._last[0] >= WINDOW:
                now = read_load()
                if now is None:
                    self.is_fixed = True
                    return threads
                if self._last is not None:
                    self._target = free_cores(self._last, now, core_count(), self.most)
                self._last = now
            target = self._target
            self._own_counts.add(target)
        if threads != target:
            torch.set_num_threads(target)
        return target


def free_cores(before: tuple[float, float, float], after: tuple[float, float, float], cores: int, most: int) -> int:
    """How many threads to use: the cores that other programs left free between two readings, from 1 to `most`."""
    elapsed, busy, own = (b - a for a, b in zip(before, after, strict=True))
    others = max(0.0, busy - own) / elapsed
    return max(1, min(most, int(cores - others + SLACK)))


def core_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_load() -> tuple[float, float, float] | None:
    """Clock, busy seconds of the cores this process may use, CPU seconds of this process; None where Linux does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    try:
        lines = STAT.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    has_lower_priority = os.getpriority(os.PRIO_PROCESS, 0) > 0
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in lines:
        name, *fields = line.split()
        if name in mine and len(fields) >= 8:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + system + irq + softirq + steal
            if has_lower_priority:  # then other niced programs do not give way to this one
                ticks += nice
    return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


GOVERNOR = ThreadGovernor()


def adapt_threads() -> int:
    """Called before a step on the CPU."""
    return GOVERNOR.adapt()


def fix_threads(threads: int) -> None:
    """The user's choice."""
    GOVERNOR.fix(threads)
