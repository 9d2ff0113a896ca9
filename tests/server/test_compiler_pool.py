"""Patterns are compiled in helper processes: the same automata, the same errors, one process for each client."""

import asyncio
import gc
import json
import signal
import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import tiny
from serving import make, served

from redraft.constraints.errors import BudgetError, PatternError
from redraft.constraints.pattern_compiler import CompilerProcess, LocalCompiler, Pattern, pack_patterns, pack_vocabulary
from redraft.engine import StopEvent
from redraft.server.compiler_pool import CompilerPool
from redraft.server.middleware import Metrics
from redraft.server.service import Service
from redraft.server.worker import Worker
from redraft.tokenizer import helper_process
from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import HelperError, HelperProcess, HelperStoppedError
from redraft.tokenizer.tokenizer import TokenizerError

PLAIN = {"prompt": "ab", "max_tokens": 4, "seed": 1}


def post(url: str, content: bytes) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", content=content, timeout=600)


SLOW = Pattern(regex=r"(?:\w|\d|\s|[^a]){1,400}")


@contextmanager
def pool(size: int = 2, seconds: float = 60):
    writer = make()
    created = CompilerPool(lambda: CompilerProcess(writer.token_bytes, writer.sampler.eos_token_ids, seconds), size)
    try:
        yield created, LocalCompiler(lambda: writer.automaton_compiler)
    finally:
        created.close()


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern(regex="[a-z]{2,5}x?"),
        Pattern(choices=["yes", "no", "it (depends)"]),
        Pattern(schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        Pattern(schema='{"enum": ["a", 1]}'),
    ],
)
def test_a_helper_process_compiles_the_same_automaton(pattern):
    with pool() as (created, local):
        (ours,) = created.compile([pattern])
        (expected,) = local.compile([pattern])
    assert (ours.pattern, ours.stops) == (expected.pattern, expected.stops)
    for name, array in expected.to_arrays().items():
        assert np.array_equal(ours.to_arrays()[name], array), name


def test_errors_of_a_pattern_come_back_as_they_are():
    with pool() as (created, local):
        for pattern in (Pattern(regex="("), Pattern(regex="a{99999999}"), Pattern(schema={"type": "x"}), Pattern(regex=5)):
            with pytest.raises(PatternError) as expected:
                local.compile([pattern])
            with pytest.raises(type(expected.value)) as error:
                created.compile([pattern])
            assert str(error.value) == str(expected.value)
        with pytest.raises(PatternError, match="a schema is a JSON object"):
            created.compile([Pattern(schema={"a": object()})])


def test_a_compiled_pattern_is_kept_and_costs_no_process(monkeypatch):
    with pool() as (created, _):
        (first,) = created.compile([Pattern(regex="ab+")])
        monkeypatch.setattr(created, "_acquire", None)
        assert created.compile([Pattern(regex="ab+")]) == [first]


def test_a_client_has_one_process_and_leaves_the_others():
    """While one client's pattern waits for ever, another client's is compiled; stopping kills the first process."""
    with pool() as (created, _):
        stop = StopEvent("greedy")
        results = []

        def compile_slowly():
            try:
                created.compile([Pattern(regex="a")], stop)
            except HelperStoppedError:
                results.append("stopped")

        held = created._acquire("greedy", None)  # as if a compilation of this client was under way
        threads = [threading.Thread(target=compile_slowly) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert created.compile([Pattern(regex="b")], StopEvent("honest"))
        assert results == []
        stop.set()
        for thread in threads:
            thread.join(600)
        assert results == ["stopped"] * 3
        assert held not in created._free


def test_a_process_that_cannot_be_made_does_not_block_its_client():
    def fail():
        raise TokenizerError("no bytes")

    created = CompilerPool(fail)
    for _ in range(2):
        with pytest.raises(TokenizerError):
            created.compile([Pattern(regex="a")], StopEvent("client"))


def test_sixteen_completions_share_one_compilation():
    with served(make()) as url:
        body = {**PLAIN, "n": 16, "guided_choice": ["yes", "no"]}
        answer = post(url, json.dumps(body).encode())
        assert answer.status_code == 200
        assert {choice["text"] for choice in answer.json()["choices"]} <= {"yes", "no"}
        refused = post(url, json.dumps({**PLAIN, "prompt": ["a"] * 5, "n": 16}).encode())
        assert (refused.status_code, "limit of 64 for one client" in refused.text) == (400, True)


def test_processor_time_ends_a_compilation():
    with pool(seconds=0.01) as (created, _), pytest.raises(BudgetError, match=r"longer to compile than the 0\.01 s"):
        created.compile([SLOW])


LACK_OF_MEMORY = (("SIGABRT", BudgetError), ("SIGSEGV", BudgetError))


@pytest.mark.parametrize(("sent", "error"), [("SIGKILL", HelperError), ("SIGTERM", HelperError), *LACK_OF_MEMORY])
def test_a_process_that_is_killed_from_outside_is_no_mistake_in_the_pattern(sent, error, monkeypatch):
    """SIGABRT and SIGSEGV are how libraries end the process when it gets no memory."""
    writer = make()
    compiler = CompilerProcess(writer.token_bytes, writer.sampler.eos_token_ids)
    assert compiler.compile([Pattern(regex="b")])
    process = compiler.process._process

    def end(*_):
        process.send_signal(getattr(signal, sent))
        process.wait()
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(helper_process, "write_message", end)
        with pytest.raises(error) as raised:
            compiler.compile([Pattern(regex="a")])
    assert type(raised.value) is error
    assert compiler.compile([Pattern(regex="a")])
    compiler.close()


def test_a_closed_pool_compiles_nothing():
    with pool(size=1) as (created, _):
        created.close()
        with pytest.raises(HelperStoppedError):
            created.compile([Pattern(regex="a")], StopEvent("late"))


def test_the_server_compiles_in_helper_processes_and_ends_them():
    writer = make()
    usual = writer.pattern_compiler
    with served(writer) as url:
        answer = post(url, json.dumps({**PLAIN, "guided_choice": ["yes", "no"]}).encode()).json()
        assert answer["choices"][0]["text"] in ("yes", "no")
        created = writer.pattern_compiler
        assert isinstance(created, CompilerPool)
        process = created._processes[0].process._process
        assert process.poll() is None
    assert process.returncode is not None  # without `wait`: it is no zombie
    assert writer.pattern_compiler is usual


def test_nothing_is_left_of_a_closed_process():
    """No child process, no pipe, and no vocabulary, which the list of what is done at exit would keep."""
    helper = HelperProcess("redraft.constraints.pattern_compiler", seconds=60, setup=pack_vocabulary([b"a"], [0]))
    helper.call(pack_patterns([Pattern(regex="a")]).encode())
    process, kept = helper._process, weakref.ref(helper)
    helper.close()
    assert process.returncode == -signal.SIGKILL
    assert (process.stdin.closed, process.stdout.closed) == (True, True)
    del helper
    gc.collect()
    assert kept() is None


def test_a_process_that_its_caller_starts_after_the_pool_was_closed_is_ended_with_the_loan():
    closed = []
    pool = HelperPool(lambda: SimpleNamespace(close=lambda: closed.append(1)), 1)
    with pool.lend(None):
        pool.close()
        assert len(closed) == 1
    assert len(closed) == 2


def test_a_closed_service_gives_each_writer_its_own_compiler_back():
    writer = make()
    writer.adapters = {"pirate": tiny.trained(tiny.BASE, seed=1)}
    service = Service(writer, Worker(writer), Metrics(), "base")
    usual = {name: each.pattern_compiler for name, each in service.writers.items()}
    assert set(usual) == {"base", "pirate"}
    service.open()
    assert all(each.pattern_compiler is service.pool for each in service.writers.values())
    asyncio.run(service.close(0.0))
    assert {name: each.pattern_compiler for name, each in service.writers.items()} == usual
