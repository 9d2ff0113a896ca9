"""Runs a program that a model wrote, isolated from the machine.

The program runs in a Python process of its own that first gives up these rights, for good:
    network      seccomp: no socket can be created, no io_uring
    files        Landlock: no file outside the process's temporary folder can be created, changed or removed;
                 seccomp: no mode, owner, time or extended attribute can be changed
    processes    seccomp: no fork, no thread, no exec, no signal (also not by fcntl), no ptrace
    resources    rlimits: CPU time, memory, file size, open files; the parent enforces a wall-clock limit
The environment is empty, and root's capabilities are dropped. Reading files is allowed: nothing that was read can leave the
process, which answers with an exit code only.

Landlock and seccomp need no privileges and also work inside containers, where namespaces are often forbidden. Where one of
them is missing, nothing is run: `check_isolation` raises an error that says why. It tests the isolation itself with a
program that tries to break out. This file runs as a script in the child process and imports the standard library only.
"""

import ctypes
import os
import platform
import struct
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

CPU_SECONDS = 5
WALL_SECONDS = 10.0
MEMORY_BYTES = 1 << 30
EXIT_PASSED = 42  # the child's exit code if the program ran to its end; an ordinary early exit (0 or 1) is no success

# Denied system calls: (x86_64, aarch64) numbers; None where the architecture has no such call.
DENIED_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "clone": (56, 220), "clone3": (435, 435), "fork": (57, None), "vfork": (58, None),
    "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "prlimit64": (302, 261), "setrlimit": (160, 164), "setpriority": (141, 140),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "reboot": (169, 142), "kexec_load": (246, 104),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
}  # fmt: skip
FCNTL = (72, 25)
FCNTL_DENIED = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel would send signals on behalf of the program
FIRST_UNKNOWN_CALL = 452  # this and every newer system call is denied: what it can do is not known here
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH constant

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
SIGKILL, EPERM, ENOSYS = 9, 1, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_MIN_ABI = 3  # Linux 6.2; older versions let a program truncate any file
LANDLOCK_WRITE = (1 << 1) | sum(1 << bit for bit in range(4, 15))  # write, remove, make, rename, truncate
LANDLOCK_MAKE_DIR = 1 << 7  # denied in the folder too: a deep tree could not be removed any more
LANDLOCK_IOCTL_DEV = 1 << 15  # from ABI 5 on
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION_3 = 0x20080522


class IsolationError(RuntimeError):
    """Programs cannot be isolated on this machine."""


# 1. The parent process


def passes(program: str) -> bool:
    """Whether the program runs to its end without an error, isolated and within the limits."""
    return _run(program) == EXIT_PASSED


def _run(program: str) -> int | None:
    """Returns the exit code of the isolated program; None if it ran out of time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            ended = subprocess.run(
                [sys.executable, "-I", "-B", str(Path(__file__)), folder],
                input=program.encode("utf-8", "surrogateescape"),
                cwd=folder,
                env={},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=WALL_SECONDS,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return None
    return ended.returncode


@cache
def check_isolation() -> None:
    """Raises IsolationError with the reason if programs cannot be isolated on this machine."""
    reason = _missing_feature()
    if reason:
        raise IsolationError(f"code that a model wrote is not run, because it cannot be isolated here: {reason}")
    with tempfile.TemporaryDirectory() as outside:
        target = Path(outside) / "target"
        target.write_text("unchanged")
        if _run("pass") != EXIT_PASSED or _run(BREAK_OUT.format(target=str(target))) != EXIT_PASSED:
            raise IsolationError(
                "code that a model wrote is not run, because a test of its isolation failed on this machine"
            )


# Runs to its end only if every attempt is denied.
BREAK_OUT = """
import fcntl, os, socket
def is_denied(action):
    try:
        action()
    except OSError:
        return True
    return False
target = {target!r}
assert is_denied(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
assert is_denied(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
assert is_denied(lambda: open(target, "a"))
assert is_denied(lambda: open(target + ".new", "w"))
assert is_denied(lambda: os.remove(target))
assert is_denied(lambda: os.chmod(target, 0o777))
assert is_denied(lambda: os.truncate(target, 0))
assert is_denied(os.fork)
assert is_denied(lambda: os.kill(os.getppid(), 0))
assert is_denied(lambda: fcntl.fcntl(os.pipe()[0], 8, os.getppid()))
assert is_denied(lambda: os.mkdir("folder"))
open("file", "w").close()
"""


def _missing_feature() -> str | None:
    if sys.platform != "linux":
        return f"isolation needs Linux, this is {sys.platform}"
    if platform.machine() not in ARCHITECTURES:
        return f"system call numbers are known for {' and '.join(ARCHITECTURES)}, not for {platform.machine()}"
    version = ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < LANDLOCK_MIN_ABI:
        return f"the kernel needs Landlock version {LANDLOCK_MIN_ABI} (Linux 6.2 or newer), it has {max(0, version)}"
    return None


# 2. The child process


def isolate(folder: str) -> None:
    """Gives up all rights that the module docstring lists, except for files in `folder`. Raises OSError if that fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "prctl")
    _check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _limit_resources()
    _restrict_files(libc, folder)
    _drop_capabilities(libc)
    _deny_system_calls(libc)


def _limit_resources() -> None:
    import resource

    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,  # files in the folder can be created, but not filled
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def _restrict_files(libc: ctypes.CDLL, folder: str) -> None:
    """Landlock: denies every kind of writing except in `folder`."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    rights = LANDLOCK_WRITE | (LANDLOCK_IOCTL_DEV if version >= 5 else 0)
    attributes = struct.pack("Q", rights)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(ruleset, "landlock_create_ruleset")
    folder_fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    rule = struct.pack("=Qi", LANDLOCK_WRITE & ~LANDLOCK_MAKE_DIR, folder_fd)  # packed, as the kernel's struct is
    _check(libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), "landlock_add_rule")
    _check(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(folder_fd)
    os.close(ruleset)


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    """Removes the capabilities of root, which could otherwise raise its own resource limits."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    _check(libc.syscall(CAPSET[platform.machine()], header, bytes(24)), "capset")


def _deny_system_calls(libc: ctypes.CDLL) -> None:
    """seccomp: a filter that denies the calls of DENIED_CALLS and all calls that are newer than this table."""
    column, audit_arch = ARCHITECTURES[platform.machine()]
    denied = sorted(number for numbers in DENIED_CALLS.values() if (number := numbers[column]) is not None)
    load, jump_equal, jump_greater_equal, give = 0x20, 0x15, 0x35, 0x06  # classic BPF
    kill_process, errno, allow = 0x80000000, 0x00050000, 0x7FFF0000
    program = [
        (load, 0, 0, 4),  # the architecture
        (jump_equal, 1, 0, audit_arch),
        (give, 0, 0, kill_process),
        (load, 0, 0, 0),  # the number of the call
        (jump_greater_equal, 0, 1, FIRST_UNKNOWN_CALL),
        (give, 0, 0, errno | ENOSYS),
    ]
    program += [(jump_equal, 0, 2 + 2 * len(FCNTL_DENIED), FCNTL[column]), (load, 0, 0, 24)]  # the command of fcntl
    for command in FCNTL_DENIED:
        program += [(jump_equal, 0, 1, command), (give, 0, 0, errno | EPERM)]
    program.append((give, 0, 0, allow))
    for number in denied:
        program += [(jump_equal, 0, 1, number), (give, 0, 0, errno | EPERM)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    _check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp")


def _check(result: int, call: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    """Reads a program from standard input, isolates this process, and runs the program."""
    source = sys.stdin.buffer.read()
    isolate(sys.argv[1])
    scope = {"__name__": "__main__"}
    exec(compile(source, "program", "exec"), scope)
    os._exit(EXIT_PASSED)


if __name__ == "__main__":
    main()
