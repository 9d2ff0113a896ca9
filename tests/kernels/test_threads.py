"""Thread counts follow the load of the cores; the user's own choice is respected."""

import threading

import pytest
import torch

from redraft.cli import options
from redraft.kernels import threads
from redraft.kernels.threads import ThreadGovernor, free_cores


@pytest.mark.parametrize(
    ("busy", "own", "cores", "most", "expected"),
    [
        (2.0, 2.0, 2, 2, 2),  # alone on the machine
        (2.2, 2.0, 2, 2, 2),  # housekeeping
        (2.0, 1.3, 2, 2, 1),  # a busy neighbour
        (2.0, 0.7, 2, 2, 1),  # a busy neighbour on each core
        (2.0, 0.0, 2, 2, 1),  # never less than one
        (15.9, 14.9, 16, 16, 15),
        (9.0, 8.0, 16, 8, 8),  # 8 physical cores, 16 logical ones
        (0.9, 1.0, 2, 2, 2),  # the two clocks do not tick together
    ],
)
def test_threads_are_the_cores_that_others_leave_free(busy, own, cores, most, expected):
    assert free_cores((5.0, 100.0, 30.0), (6.0, 100.0 + busy, 30.0 + own), cores, most) == expected


@pytest.fixture(name="load")
def _load(monkeypatch):
    """A machine of four cores whose load the test decides, one second after another."""
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    counts = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(threads, "core_count", lambda: 4)
    reading = [0.0, 0.0, 0.0]
    monkeypatch.setattr(threads, "read_load", lambda: tuple(reading))
    monkeypatch.setattr(threads.time, "monotonic", lambda: reading[0])

    def second_passes(others: float, seconds: float = 1.0) -> None:
        reading[0] += seconds
        reading[1] += (2.0 + others) * seconds
        reading[2] += 2.0 * seconds

    return counts, second_passes


def test_threads_follow_the_load_down_and_up(load):
    counts, second_passes = load
    governor = ThreadGovernor()
    for others, expected in ((0.0, 4), (1.0, 3), (2.1, 2), (4.0, 1), (0.1, 4)):
        second_passes(others)
        assert governor.adapt() == expected
        assert counts[-1] == expected


def test_between_two_windows_nothing_changes(load):
    _, second_passes = load
    governor = ThreadGovernor()
    second_passes(4.0, seconds=threads.WINDOW / 2)
    assert governor.adapt() == 4
    second_passes(4.0, seconds=threads.WINDOW)
    assert governor.adapt() == 1


@pytest.mark.parametrize("variable", threads.VARIABLES)
def test_the_environment_is_respected(load, monkeypatch, variable):
    counts, second_passes = load
    monkeypatch.setenv(variable, "4")
    governor = ThreadGovernor()
    second_passes(4.0)
    assert governor.adapt() == 4
    assert counts == [4]


def test_a_fixed_count_and_a_call_of_torch_are_respected(load):
    counts, second_passes = load
    fixed = ThreadGovernor()
    fixed.fix(3)
    second_passes(4.0)
    assert fixed.adapt() == 3
    counts.append(4)
    governor = ThreadGovernor()
    counts.append(2)  # somebody called torch.set_num_threads(2)
    second_passes(4.0)
    assert governor.adapt() == 2
    assert counts[-1] == 2
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        governor.fix(0)


def test_threads_of_one_process_do_not_take_each_other_for_the_user(load, monkeypatch):
    """PyTorch keeps the count per thread, and a new thread starts with the count that was set last in any of them."""
    _, second_passes = load
    per_thread = threading.local()
    last = [4]

    def set_num_threads(count):
        per_thread.count = count
        last.append(count)

    monkeypatch.setattr(torch, "get_num_threads", lambda: getattr(per_thread, "count", last[-1]))
    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    governor = ThreadGovernor()
    second_passes(1.0)
    assert governor.adapt() == 3
    second_passes(2.0)
    other = threading.Thread(target=governor.adapt)
    other.start()
    other.join()
    assert governor.adapt() == 2
    assert not governor.is_fixed


def test_where_linux_does_not_tell_the_load_nothing_changes(load, monkeypatch):
    counts, second_passes = load
    monkeypatch.setattr(threads, "read_load", lambda: None)
    governor = ThreadGovernor()
    second_passes(4.0)
    assert governor.adapt() == 4
    assert counts == [4]


@pytest.mark.skipif(not threads.STAT.exists(), reason="needs /proc/stat")
def test_the_load_of_this_machine_can_be_read():
    before = threads.read_load()
    sum(number * number for number in range(3_000_000))
    after = threads.read_load()
    assert all(b >= a for a, b in zip(before, after, strict=True))
    assert after[2] > before[2]


def test_the_command_line_fixes_the_count(load, monkeypatch):
    governor = threads.ThreadGovernor()
    monkeypatch.setattr(threads, "GOVERNOR", governor)
    options._fix_threads(1)
    assert (torch.get_num_threads(), governor.is_fixed) == (1, True)
