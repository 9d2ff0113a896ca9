"""Access control, disconnected clients, shutdown, errors of the server, and requests that run side by side."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager

import httpx
import pytest
from serving import NO_END, make, served, user, wait_until

from redraft.cli import serve
from redraft.server import service
from redraft.server.api import openai
from redraft.server.completion import Started
from redraft.server.errors import BadRequestError, ServerClosingError
from redraft.server.images import text_of_content
from redraft.server.middleware import BodyLimits, Limits
from redraft.server.streams import merge_streams
from redraft.server.worker import Worker
from redraft.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients' own libraries


def test_requests_without_the_key_or_from_other_hosts_are_refused():
    limits = Limits(key="secret", bodies=BodyLimits(body_bytes=2000), hosts=("box.lan",))
    with served(make(), limits=limits) as url, httpx.Client(base_url=url) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        known = {"Authorization": "Bearer secret"}
        assert client.get("/v1/models", headers=known).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "secret", "Host": "box.lan:80"}).status_code == 200
        odd = ("https://evil.example", "null", "http://[", "http://localhost.evil.example", "file://")
        for headers in ({"Host": "evil.example"}, *({"Origin": origin} for origin in odd)):
            refused = client.get("/v1/models", headers={**known, **headers})
            assert (refused.status_code, "error" in refused.json()) == (403, True)
        assert client.get("/v1/models", headers={**known, "Origin": "http://localhost:3000"}).status_code == 200
        assert client.get("/api/tags").json() == {"error": client.get("/v1/models").json()["error"]["message"]}
        large = client.post("/v1/completions", headers=known, content=b"x" * 3000)
        assert (large.status_code, "2,000 bytes" in large.text) == (413, True)
        pieces = client.post("/v1/completions", headers=known, content=iter([b"x" * 1500] * 2))
        assert pieces.status_code == 413


@pytest.mark.parametrize("key", ["secret", "clé", "clà", "密钥"])
def test_a_key_is_any_text_and_its_scheme_has_letters_of_any_case(key):
    with served(make(), limits=Limits(key=key)) as url, httpx.Client(base_url=url) as client:
        encodings = ["utf-8", "latin-1"] if key in ("clé", "clà") else ["utf-8"]
        for sent in [key.encode(encoding) for encoding in encodings]:
            for name, value in [(b"x-api-key", sent), *((b"authorization", way + sent) for way in (b"Bearer ", b"bearer "))]:
                assert client.get("/v1/models", headers=[(name, value)]).status_code == 200
        for wrong in (b"Bearer ?", b"Basic " + key.encode(), b"Bearer ??", b"cl?", b"Bearer " + key.encode()[:-1]):
            for name in (b"authorization", b"x-api-key"):
                assert client.get("/v1/models", headers=[(name, wrong)]).status_code == 401


@contextmanager
def slow(writer: Writer, seconds: float = 0.05):
    """Makes every step take longer."""
    usual = writer.engine.runner.step
    writer.engine.runner.step = lambda requests: (time.sleep(seconds), usual(requests))[1]
    yield
    writer.engine.runner.step = usual


def in_threads(tasks) -> list:
    """Runs tasks in threads and returns their results."""
    found = [None] * len(tasks)
    threads = []
    for number, task in enumerate(tasks):
        threads.append(threading.Thread(target=lambda n=number, t=task: found.__setitem__(n, t())))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


def test_disconnected_clients_are_dropped():
    writer = make()
    body = {"prompt": "ab", "max_tokens": 400, "logit_bias": NO_END}
    with slow(writer), served(writer, requests=3) as url, httpx.Client(base_url=url, timeout=600) as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body, timeout=0.4)
        assert wait_until(lambda: writer.engine.is_idle)
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            assert next(response.iter_lines()).startswith("data: ")
            assert not writer.engine.is_idle
        assert wait_until(lambda: writer.engine.is_idle)
        ask = lambda: httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 64}, timeout=600)  # noqa: E731
        found = in_threads([ask] * 6)
        codes = sorted(one.status_code for one in found)
        assert codes[0] == 200
        assert codes[-1] == 429
        assert next(one for one in found if one.status_code == 429).headers["retry-after"] == "1"


REGION = "<|current_file_content|>\n<|code_to_edit|>\na\n<|/code_to_edit|>\n<|/current_file_content|>"


def test_editors_at_one_address_do_not_stop_each_other(monkeypatch):
    """As in an office, whose people have the same address and the same editor."""
    both_run = threading.Barrier(2)

    def wait_for_both(work):
        return lambda *args, **options: (both_run.wait(600), work(*args, **options))[1]

    monkeypatch.setattr(service, "infill_gap", wait_for_both(service.infill_gap))
    monkeypatch.setattr(openai, "rewrite_region", wait_for_both(openai.rewrite_region))
    bodies = {"/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4}}
    bodies["/v1/edit/completions"] = {"messages": user(REGION)}
    with served(make()) as url:
        for path, body in bodies.items():
            post = lambda path=path, body=body: httpx.post(f"{url}{path}", json=body, timeout=600)  # noqa: E731
            assert [answer.status_code for answer in in_threads([post] * 2)] == [200, 200]


def test_running_requests_finish_when_the_server_shuts_down():
    writer, found = make(), []
    with slow(writer), served(writer) as url:
        body = {"prompt": "ab", "max_tokens": 64, "logit_bias": NO_END}
        thread = threading.Thread(target=lambda: found.append(httpx.post(f"{url}/v1/completions", json=body, timeout=600)))
        thread.start()
        assert wait_until(lambda: not writer.engine.is_idle)
    thread.join()
    assert found[0].status_code == 200
    assert len(found[0].json()["choices"][0]["text"]) > 10


@pytest.mark.parametrize("part", ["runner.step", "_grant_turns", "scheduler.admit"])
def test_health_reports_a_fault_of_the_engines_thread(monkeypatch, part):
    writer = make()
    with served(writer) as url, httpx.Client(base_url=url, timeout=600) as client:
        asked = {"prompt": "ab", "max_tokens": 4, "seed": 1}
        good = client.post("/v1/completions", json=asked).json()["choices"]
        with monkeypatch.context() as broken:
            place, _, name = part.rpartition(".")
            broken.setattr(getattr(writer.engine, place) if place else writer.engine, name, lambda *_: 1 / 0)
            assert client.post("/v1/completions", json=asked).status_code == 500
            sick = client.get("/health")
            assert (sick.status_code, "division by zero" in sick.text) == (503, True)
        assert client.post("/v1/completions", json=asked).json()["choices"] == good
        assert client.get("/health").json() == {"status": "ok"}


def test_concurrent_requests_give_the_same_text_as_alone():
    with served(make()) as url, httpx.Client(base_url=url, timeout=600) as http:

        def ask(seed: int):
            body = {"prompt": "ab", "max_tokens": 24, "seed": seed}
            return http.post("/v1/completions", json=body).json()["choices"]

        alone = [ask(seed) for seed in range(6)]
        assert in_threads([lambda n=seed: ask(n) for seed in range(6)]) == alone


def test_closing_drains_and_then_stops_requests():
    async def closed(seconds: float) -> tuple[list[int], bool]:
        worker, found = Worker(make(), 4), []
        worker.start()

        def work(stop):
            for number in range(20):
                if stop.is_set():
                    return
                time.sleep(0.02)
                yield number

        async def listen() -> None:
            async for item in worker.run(work):
                found.append(item)

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(0.05)
        await worker.close(seconds)
        await listening
        with pytest.raises(ServerClosingError):
            await anext(worker.run(work))
        return found, worker.active == 0

    assert asyncio.run(closed(30.0)) == (list(range(20)), True)
    cut, empty = asyncio.run(closed(0.0))
    assert len(cut) < 20
    assert empty


def test_bad_addresses_raise_before_the_model_is_loaded():
    for port in (0, 99999):
        with pytest.raises(ValueError, match=f"between 1 and 65535, got {port}"):
            serve.serve(port=port)
    with pytest.raises(ValueError, match="--requests must be above 0, got 0"):
        serve.serve(requests=0)
    for host in ("0.0.0.0", "::", "192.168.1.7", "box.lan"):
        with pytest.raises(ValueError, match="set --api-key to listen there"):
            serve.serve(host=host)


def test_merged_streams_keep_items_that_came_before_the_last_stream_started():
    """Two of three streams end before the third has started."""

    async def quick(number):
        for item in (Started(), f"{number} text", f"{number} end"):
            yield item

    async def late(number):
        await asyncio.sleep(0.05)
        async for item in quick(number):
            yield item

    async def merged():
        return [item async for item in merge_streams([quick(0), late(1), quick(2)])]

    first, *rest = asyncio.run(merged())
    assert isinstance(first[1], Started)
    assert sorted(rest) == [(number, f"{number} {what}") for number in range(3) for what in ("end", "text")]
    for number in range(3):
        assert [item for index, item in rest if index == number] == [f"{number} text", f"{number} end"]


@pytest.fixture(scope="module")
def one_slot():
    """A writer whose server accepts one request at a time, and a client."""
    writer = make()
    with served(writer, requests=1) as url, httpx.Client(base_url=url) as client:
        yield writer, client


def test_metrics_show_the_gpu_memory(one_slot):
    """Nothing is used and nothing is limited without a GPU."""
    _, client = one_slot
    lines = client.get("/metrics").text.splitlines()
    assert "redraft_gpu_limit_bytes 0.0" in lines
    assert any(line.startswith("redraft_gpu_peak_bytes ") for line in lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/canvas/decide", {"prompt": "a", "choices": ["b", "c"]}),
        ("/v1/canvas/sudoku", {"puzzle": "." * 81}),
    ],
)
def test_a_client_that_leaves_while_it_waits_for_its_turn_frees_its_slot(one_slot, path, body, stream):
    writer, client = one_slot

    def has_slot_free() -> bool:
        return "redraft_active_requests 0.0" in client.get("/metrics").text

    assert wait_until(has_slot_free)
    with writer.engine.take_turn(1):
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json={**body, "stream": stream}, timeout=0.3)
        assert wait_until(has_slot_free)
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


COMPLETIONS = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ("/api/generate", {"prompt": "a"}),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/canvas", {"prompt": "a"}),
]
TASKS = [
    ("/v1/fim/completions", {"prompt": "a", "suffix": "b"}),
    ("/v1/edit/completions", {"messages": [{"role": "user", "content": "<|code_to_edit|>\nabcd\n<|/code_to_edit|>"}]}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("/v1/canvas/edit", {"text": "abcdefgh", "strength": 1}),
    ("/v1/canvas", {"text": "a [[ ]] b"}),
]


@pytest.fixture(scope="module")
def failing():
    """A server whose engine fails at every step, and a function that sets the exception."""
    writer = make()
    with served(writer) as url, httpx.Client(base_url=url, timeout=600) as client:

        def fail_with(kind):
            def step(*_):
                raise kind("a shape is wrong")

            writer.engine.runner.step = step
            writer.model.encode = step  # mending needs no denoising step
            return client

        yield fail_with


def error_message(body):
    error = body["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize(("path", "body"), COMPLETIONS + TASKS)
def test_a_fault_during_generation_is_a_500_with_a_trace(failing, caplog, path, body, kind):
    answer = failing(kind).post(path, json={**body, "stream": False})
    assert answer.status_code == 500
    assert "a shape is wrong" in error_message(answer.json())
    logged = [record for record in caplog.records if record.name == "redraft.server" and record.exc_info]
    assert "a shape is wrong" in str(logged[-1].exc_info[1])


@pytest.mark.parametrize("kind", [ValueError, RuntimeError])
@pytest.mark.parametrize(("path", "body"), COMPLETIONS)
def test_a_fault_in_a_stream_is_an_error_event(failing, caplog, path, body, kind):
    """Every wire format: the stream ends with an error in the shape that its clients read."""
    answer = failing(kind).post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith(("data: ", "{"))]
    (error,) = [json.loads(line) for line in lines if '"error"' in line]
    assert "a shape is wrong" in error_message(error)
    assert any(record.exc_info for record in caplog.records if record.name == "redraft.server")
    if path == "/v1/messages":
        assert (error["type"], error["error"]["type"]) == ("error", "api_error")
        assert "message_stop" not in answer.text


def test_a_mistake_of_the_user_in_a_stream_is_not_logged_as_a_fault(caplog):
    """A run that settles before the step of an intervention: known only while it runs."""
    late = {"block": 0, "step": 5, "pins": []}
    body = {"prompt": "a", "max_tokens": 4, "canvas_length": 4, "max_steps": 6, "seed": 1, "interventions": [late]}
    body |= {"pins": [{"position": position, "text": "x"} for position in range(4)]}  # nothing is open: one step is enough
    with served(make()) as url:
        whole = httpx.post(f"{url}/v1/canvas", json={**body, "stream": False}, timeout=600)
        streamed = httpx.post(f"{url}/v1/canvas", json=body, timeout=600)
    assert whole.status_code == 400, whole.text
    assert streamed.status_code == 200
    assert '"code":400' in streamed.text
    assert [record for record in caplog.records if record.exc_info] == []


def test_content_is_text_or_a_bad_request():
    part = {"type": "text", "text": "Hello"}
    for content in ("Hello", part, [part]):
        assert text_of_content(content, "messages") == "Hello"
    for content in (["text"], [3], 7, [{"type": "image"}], [{"type": "text", "text": 3}], [{"type": "x" * 10**6}]):
        with pytest.raises(BadRequestError, match=r"^only text input is supported here, got a part of type .{1,99}$"):
            text_of_content(content, "messages")
