"""Helper pool: helpers are lent to clients in a fair order."""

import threading
from contextlib import suppress

import pytest
from tiny import wait_until

from redraft.engine import StopEvent
from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import HelperStoppedError


class Helper:
    """Stands for a process."""

    def close(self):
        pass


def test_a_client_with_one_request_is_before_those_with_several():
    pool = HelperPool(Helper, 3, per_client=2)
    order = []
    released = threading.Event()

    def wait(client):
        with pool.lend(StopEvent(client)):
            order.append(client)
            released.wait(600)

    with pool.lend(StopEvent("a")):
        threads = [threading.Thread(target=wait, args=(client,)) for client in "abb"]
        for thread in threads:
            thread.start()
        assert wait_until(lambda: len(order) + len(pool._waiting) == 3)
        assert wait_until(lambda: len(order) == 2)
        for client in "ac":
            threads.append(threading.Thread(target=wait, args=(client,)))
            threads[-1].start()
        assert wait_until(lambda: len(pool._waiting) == 3)
    assert wait_until(lambda: len(order) == 3)
    assert order[-1] == "c"  # it came last, and has none
    released.set()
    for thread in threads:
        thread.join(600)
    assert len(order) == 5


def test_a_client_has_its_share_and_the_longest_waiting_one_is_next():
    pool = HelperPool(Helper, 2, per_client=1)
    order = []
    released = {name: threading.Event() for name in ("a", "b", "c", "d")}

    def wait(client):
        with pool.lend(StopEvent(client)):
            order.append(client)
            released[client].wait(600)

    threads = []
    for count, client in enumerate(("a", "a", "b", "c", "d"), 1):
        threads.append(threading.Thread(target=wait, args=(client,)))
        threads[-1].start()
        assert wait_until(lambda count=count: len(order) + len(pool._waiting) == count)
    assert sorted(order) == ["a", "b"]
    released["b"].set()
    assert wait_until(lambda: len(order) == 3)
    assert order[-1] == "c"  # the second request of a has waited longer, but a has a helper
    for event in released.values():
        event.set()
    for thread in threads:
        thread.join(600)
    assert sorted(order) == ["a", "a", "b", "c", "d"]
    stop = StopEvent("e")
    stop.set()
    with pool.lend(StopEvent("f")), pool.lend(None), pytest.raises(HelperStoppedError), pool.lend(stop):
        pass


def test_a_caller_that_stops_waiting_leaves_the_others_of_its_client_their_places():
    pool = HelperPool(Helper, 1)
    order = []
    stop = StopEvent("a")

    def wait(event):
        with suppress(HelperStoppedError), pool.lend(event):
            order.append(event.client)

    threads = []
    with pool.lend(None):
        for count, event in enumerate((StopEvent("a"), StopEvent("b"), stop), 1):
            threads.append(threading.Thread(target=wait, args=(event,)))
            threads[-1].start()
            assert wait_until(lambda count=count: len(pool._waiting) == count)
        stop.set()
        assert wait_until(lambda: len(pool._waiting) == 2)
    for thread in threads:
        thread.join(600)
    assert order == ["a", "b"]
