"""Limits of the server: connections, bodies, slots, patterns. Each refusal is one sentence, and others are not disturbed."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
from adversary import head
from serving import make, served, wait_until

from redraft.server import fim
from redraft.server.api import ollama, openai, openai_requests
from redraft.server.bodies import BodyCounter, BodyLimits, check_json_size, count_json_values
from redraft.server.connections import ConnectionLimits, name_client
from redraft.server.errors import BadRequestError, ServerBusyError, TooManyBytesError
from redraft.server.middleware import Limits
from redraft.server.worker import MAX_QUEUED, Slots, Worker

PLAIN = {"prompt": "ab", "max_tokens": 4, "seed": 1}


def raw_socket(url: str) -> socket.socket:
    parts = httpx.URL(url)
    return socket.create_connection((parts.host, parts.port), timeout=600)


def exchange(url: str, *pieces: bytes) -> bytes:
    """Sends bytes; returns everything that comes until the server closes."""
    with raw_socket(url) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        try:
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
        return answer


@pytest.fixture(scope="module")
def strict():
    """A server with small limits on what can be counted."""
    bodies = BodyLimits(body_bytes=200_000, received_bytes=300_000, free_bytes=1000, json_values=2000)
    connections = ConnectionLimits(connections=40, connections_per_client=20, head_seconds=60)
    with served(make(), limits=Limits(bodies=bodies, connections=connections)) as url:
        yield url


@pytest.fixture(scope="module")
def hurried():
    """A server that does not wait for its clients."""
    bodies = BodyLimits(body_seconds=0.5)
    connections = ConnectionLimits(head_seconds=0.5, reader_seconds=0.5)
    writer = make()
    with served(writer, send_buffer=4096, limits=Limits(bodies=bodies, connections=connections)) as url:
        yield url, writer


# 1. Connections


@pytest.mark.parametrize(
    "lines",
    [
        ("Host: evil.com@127.0.0.1",),
        ("Host: localhost:abc",),
        ("Host: localhost:123456",),
        ("Host: localhost/",),
        ("Host: [::1",),
        ("Host: localhost, evil.com",),
        ("Host: localhost", "Origin: http://localhost", "Origin: http://evil.com"),
        ("Host: localhost", "Origin: http://localhost", "Origin: http://localhost"),
        ("Host: localhost", "Origin: http://localhost/path"),
        ("Host: localhost", "Origin: http://user@localhost"),
        ("Host: localhost", "Origin: localhost"),
        ("Host: localhost", "Origin: ftp://localhost"),
    ],
)
def test_hosts_and_origins_are_read_strictly(strict, lines):
    answer = exchange(strict, head("/v1/completions", *lines, "Connection: close", "Content-Length: 0"))
    assert answer.split()[1] in (b"400", b"403")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:65535", "[::1]", "[::1]:80"])
def test_names_of_this_machine_are_accepted(strict, host):
    answer = exchange(strict, f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.split()[1] == b"200"


@pytest.mark.parametrize("piece", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: local"])
def test_a_head_that_does_not_come_is_not_waited_for(hurried, piece):
    assert exchange(hurried[0], piece) == b""


@pytest.mark.soak
def test_a_head_that_stops_behind_a_whole_request_is_not_waited_for(hurried):
    answer = exchange(hurried[0], b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTT")
    assert answer.count(b"HTTP/1.1 200") == 1


def test_a_client_has_a_limited_number_of_connections(strict):
    connections = [raw_socket(strict) for _ in range(25)]
    try:
        answers = []
        for connection in connections[20:]:
            connection.settimeout(60)
            answers.append(connection.recv(1000))
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        assert b"too many connections" in answers[0]
        other = httpx.HTTPTransport(local_address="127.0.0.9")
        with httpx.Client(base_url=strict, transport=other) as client:
            assert client.get("/health").status_code == 200
    finally:
        for connection in connections:
            connection.close()


def test_a_body_in_tiny_chunks_is_cut_off(strict):
    start = head("/v1/completions", "Host: localhost", "Transfer-Encoding: chunked")
    assert exchange(strict, start, b"1\r\n \r\n" * 5000) == b""
    assert exchange(strict, start + b"1\r\n \r\n" * 5000) == b""
    body = json.dumps(PLAIN).encode()
    pieces = (
        b"".join(b"%x\r\n%s\r\n" % (len(body[n : n + 9]), body[n : n + 9]) for n in range(0, len(body), 9)) + b"0\r\n\r\n"
    )
    start = head("/v1/completions", "Host: localhost", "Transfer-Encoding: chunked", "Connection: close")
    assert b"HTTP/1.1 200" in exchange(strict, start, pieces)


def test_a_client_that_does_not_read_is_let_go(hurried):
    url, writer = hurried
    body = {"prompt": "ab", "max_tokens": 480, "canvas_length": 4, "candidates": 20, "forbidden": [1, 5]}
    content = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((httpx.URL(url).host, httpx.URL(url).port))
        connection.sendall(head("/v1/canvas", "Host: localhost", f"Content-Length: {len(content)}") + content)
        assert wait_until(lambda: not writer.engine.is_idle)
        assert wait_until(lambda: writer.engine.is_idle)
        connection.settimeout(60)
        received = b""
        with suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
        assert b'"type":"end"' not in received


def test_a_body_with_line_breaks_in_one_chunk_is_whole(strict):
    body = json.dumps(PLAIN, indent=1).replace("\n", "\r\n").encode() + b"\r\n" * 5000
    start = head("/v1/completions", "Host: localhost", "Transfer-Encoding: chunked", "Connection: close")
    assert b"HTTP/1.1 200" in exchange(strict, start, b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n")


def test_clients_are_told_apart_by_address_and_network():
    assert name_client("127.0.0.1") == name_client("::ffff:127.0.0.1") == "127.0.0.1"
    assert name_client("2001:db8::1") == name_client("2001:db8::ffff%eth0") != name_client("2001:db8:0:1::1")
    assert name_client(None) == ""
    assert name_client("not an address") == "not an address"


def test_a_client_cannot_name_itself(strict):
    """X-Forwarded-For counts only from a trusted proxy."""
    url = strict
    with httpx.Client(base_url=url, headers={"X-Forwarded-For": "9.9.9.9", "X-Forwarded-Proto": "https"}) as client:
        assert client.get("/health").status_code == 200
    connections = [raw_socket(url) for _ in range(20)]
    try:
        assert wait_until(lambda: is_refused(url))
    finally:
        for connection in connections:
            connection.close()


def is_refused(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", headers={"X-Forwarded-For": "9.9.9.9"}).status_code == 503
    except httpx.TransportError:
        return True


# 2. Bodies


def test_a_body_that_does_not_come_is_not_waited_for(hurried):
    answer = exchange(hurried[0], head("/v1/completions", "Host: localhost", "Content-Length: 100"), b"{")
    assert b"HTTP/1.1 408" in answer
    assert b"did not come within 0.5 s" in answer


def test_a_body_that_is_announced_too_large_is_not_received(strict):
    answer = exchange(strict, head("/api/chat", "Host: localhost", "Content-Length: 999999999"))
    assert b"HTTP/1.1 413" in answer
    assert b"200,000 bytes at most" in answer


def test_bytes_that_are_being_received_are_limited_by_client(strict):
    first = raw_socket(strict)
    try:
        first.sendall(head("/v1/completions", "Host: localhost", "Content-Length: 150000"))
        assert wait_until(lambda: post(strict, b" " * 150_000).status_code == 429)
        refused = post(strict, b" " * 150_000)
        assert refused.headers["retry-after"] == "1"
        assert "as many bytes as it accepts" in refused.text
        assert post(strict, json.dumps(PLAIN).encode()).status_code == 200  # a small body goes through
    finally:
        first.close()
    assert wait_until(lambda: post(strict, b" " * 150_000).status_code == 400)


def post(url: str, content: bytes) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", content=content, timeout=600)


def test_bytes_are_counted_while_a_body_is_received_and_not_longer():
    counter = BodyCounter(BodyLimits(body_bytes=100, received_bytes=100, free_bytes=10))

    async def pieces():
        for size, more in ((20, True), (20, False)):
            yield {"type": "http.request", "body": b"x" * size, "more_body": more}

    async def receive_all(announced: int) -> list[int]:
        source = pieces()
        counts = []
        with counter.count(lambda: anext(source), "a", announced) as body:
            counts.append(counter.by_client.total())
            for _ in range(2):
                await body.receive()
                counts.append(counter.by_client.total())
            body.release()
            counts.append(counter.by_client.total())
        return counts

    assert asyncio.run(receive_all(40)) == [40, 40, 40, 0]
    assert asyncio.run(receive_all(0)) == [0, 20, 40, 0]
    with counter.count(None, "a", 40), counter.count(None, "a", 10), pytest.raises(TooManyBytesError):
        counter.count(None, "a", 11)
    with counter.count(None, "a", 50), counter.count(None, "b", 50), pytest.raises(TooManyBytesError):
        counter.count(None, "c", 11)
    assert not counter.by_client


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        (b'{"a": [1, 2, {"b": "c"}]}', 7),
        (b'{"a": "[,,,:{"}', 2),
        (rb'{"a": "\"[,,,:{\\"}', 2),
        (rb'{"a\\": "\\\\\"", "b": ",,"}', 4),
        (b"", 0),
        (b'"', 0),
    ],
)
def test_values_are_counted_outside_of_strings(raw, values):
    assert count_json_values(raw) == values


def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(strict, monkeypatch):
    check_json_size(b'{"prompt": "' + b"," * 5000 + b'"}', 2000)
    with pytest.raises(BadRequestError, match=r"about 3,00\d JSON values, at most 2,000"):
        check_json_size(b"[" + b"1," * 3000 + b"1]", 2000)
    refused = post(strict, b'{"prompt": "a", "guided_choice": [' + b"1," * 3000 + b"1]}")
    assert (refused.status_code, "JSON values" in refused.text) == (400, True)
    refused = post(strict, b'{"prompt": "a", "guided_choice": [' + b"1," * 500 + b"1]}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_choice.0")


@pytest.mark.parametrize(
    "fields",
    [
        b'"seed": ' + b"9" * 5000,
        b'"logit_bias": {"' + b"9" * 5000 + b'": -100}',
        b'"logit_bias": {"1": "x"}',
        b'"logit_bias": {"1": true}',
        b'"frequency_penalty": NaN',
        b'"presence_penalty": 1e999',
        b'"vllm_xargs": {"' + b"x" * 5000 + b'": 1}',
        b'"guided_json": {"type": "integer", "minimum": ' + b"9" * 5000 + b"}",
    ],
)
def test_odd_numbers_are_a_sentence(strict, fields):
    refused = post(strict, b'{"prompt": "a", ' + fields + b"}")
    assert refused.status_code == 400
    assert len(refused.json()["error"]["message"]) < 300


# 3. Slots


def test_slots_leave_room_for_other_clients():
    slots = Slots(18, "running")
    for _ in range(16):
        slots.take("greedy")
    with pytest.raises(ServerBusyError, match="this client already has 16 requests running"):
        slots.take("greedy")
    slots.take("honest")
    slots.take("another")
    with pytest.raises(ServerBusyError, match="the server already has 18 requests running"):
        slots.take("a third")
    slots.release("greedy")
    slots.take("a third")
    assert slots.taken == 18


@pytest.mark.parametrize(("count", "share"), [(1, 1), (2, 1), (3, 2), (8, 7), (9, 8), (72, 64)])
def test_of_a_few_slots_one_is_left_for_others(count, share):
    slots = Slots(count, "running")
    assert slots.per_client == share
    for _ in range(share):
        slots.take("greedy")
    with pytest.raises(ServerBusyError):
        slots.take("greedy")
    if count > 1:
        slots.take("honest")


def test_a_slow_listener_holds_its_work_up():
    produced = []
    ended = threading.Event()

    def work(stop):
        try:
            for number in range(10_000):
                produced.append(number)
                yield number
        finally:
            ended.set()

    async def listen_slowly():
        worker = Worker(make(), 2)
        worker.start()
        stream = worker.run(work)
        assert await anext(stream) == 0
        await asyncio.sleep(0.3)
        assert len(produced) <= MAX_QUEUED + 3
        assert await anext(stream) == 1
        await stream.aclose()
        assert await asyncio.to_thread(ended.wait, 60)
        assert len(produced) <= MAX_QUEUED + 5
        await worker.close(0)
        assert worker.slots.taken == worker.compile_slots.taken == 0

    asyncio.run(listen_slowly())


def test_a_slot_is_free_when_the_client_has_its_answer():
    def answer(stop):
        yield "text"

    def fail(stop):
        yield "text"
        raise LookupError

    async def ask(worker: Worker, work) -> None:
        with suppress(LookupError):
            async for _ in worker.run(work):
                pass
        assert worker.slots.taken == 0

    async def ask_one_after_another():
        worker = Worker(make(), 1)
        worker.start()
        loop = asyncio.get_running_loop()
        call_soon = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: (time.sleep(0.01), call_soon(*call))  # a thread that is slow to report
        for work in (answer, fail) * 3:
            await ask(worker, work)
        await worker.close(0)

    asyncio.run(ask_one_after_another())


def test_requests_that_compile_have_slots_of_their_own():
    async def compile_many():
        worker = Worker(make(), 40)
        worker.start()
        gate = threading.Event()

        def work(stop):
            gate.wait(600)
            yield "started"
            yield "text"

        waiting = [asyncio.ensure_future(anext(worker.run(work, client="greedy", compiles=True))) for _ in range(15)]
        await asyncio.sleep(0.1)
        with pytest.raises(ServerBusyError, match="15 requests whose patterns are being compiled"):
            await anext(worker.run(work, client="greedy", compiles=True))
        honest = asyncio.ensure_future(anext(worker.run(work, client="honest", compiles=True)))
        plain = asyncio.ensure_future(anext(worker.run(work, client="greedy")))
        gate.set()
        assert await honest == await plain == "started"
        await asyncio.gather(*waiting)
        await worker.close(0)
        assert worker.compile_slots.taken == 0

    asyncio.run(compile_many())


# 4. Work that a small body can ask for


def canvas_error(url: str, **body) -> str:
    refused = httpx.post(f"{url}/v1/canvas", json={"prompt": "a", "stream": False, "max_tokens": 64, **body}, timeout=600)
    assert refused.status_code == 400
    return refused.json()["error"]["message"]


def test_pins_and_gaps_are_bounded():
    with served(make()) as url:
        pins = [{"position": 0, "text": "x" * 200}] * 100
        assert "pins have more than 4,096 tokens" in canvas_error(url, pins=pins)
        interventions = [{"block": 0, "step": 0, "bans": pins}]
        assert "bans have more than 4,096 tokens" in canvas_error(url, interventions=interventions)
        assert "more than 256 gaps" in canvas_error(url, prompt=None, max_tokens=None, text="a [[ ]] " * 300)
        assert "does not fit" in canvas_error(url, prompt=None, max_tokens=None, text=f"a [[ {'9' * 5000} ]]")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/canvas", {"prompt": "a", "max_tokens": 8, "canvas_length": 8, "draft": "z1" * 1_000_000, "stream": False}),
        ("/v1/chat/completions", {"prediction": {"content": "z1" * 1_000_000}, "max_tokens": 8}),
    ],
)
def test_of_a_long_draft_only_the_canvas_is_tokenized(path, body, monkeypatch):
    writer = make()
    lengths = []
    real = writer.tokenizer.encode
    monkeypatch.setattr(writer.tokenizer, "encode", lambda text, limit=None: lengths.append(len(text)) or real(text, limit))
    with served(writer) as url:
        messages = {} if "canvas" in path else {"messages": [{"role": "user", "content": "a"}]}
        assert httpx.post(url + path, json={**messages, **body}, timeout=600).status_code == 200
    assert max(lengths) < 10_000


def test_json_inside_of_json_is_counted_too():
    arguments = '{"a": [' + "[]," * 20_000 + "[]]}"
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "a", "tool_calls": [call]}
    with served(make()) as url:
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": [message]}, timeout=600)
        assert (refused.status_code, "at most 10,000 are accepted" in refused.text) == (400, True)


def test_a_region_that_almost_matches_takes_linear_time():
    """Each line of the file is the beginning of the region."""
    file = "a\n" * 50_000
    region = "a\n" * 20_000 + "b"
    prompt = f"<|current_file_content|>{file}<|/current_file_content|><|code_to_edit|>{region}<|/code_to_edit|>"
    found = fim.find_region(prompt)
    assert (found.text, found.prefix, found.suffix) == (region, file, "")
    prompt = "<|current_file_content|>a\nbc\nb\nc<|/current_file_content|><|code_to_edit|>b<|/code_to_edit|>"
    found = fim.find_region(prompt)
    assert (found.prefix, found.suffix) == ("a\nbc\n", "\nc")


def test_gaps_and_regions_are_searched_in_threads(monkeypatch):
    """Sentinels are removed one by one, each in linear time, and never on the event loop."""

    class CountedText(str):
        def replace(self, old, new):
            removed.append(old)
            return CountedText(super().replace(old, new))

    removed = []
    assert fim._without_sentinels(CountedText("a<PRE>b[MIDDLE]c")) == "abc"
    assert removed == [sentinel for family in fim.SENTINELS for sentinel in family]

    threads = []
    for module, name in ((openai_requests, "find_gap"), (openai, "find_gap"), (openai, "find_region"), (ollama, "find_gap")):
        real = getattr(module, name)
        note = lambda *args, real=real: threads.append(threading.current_thread().name) or real(*args)  # noqa: E731
        monkeypatch.setattr(module, name, note)
    gap = {"prompt": "<fim_prefix>a<fim_suffix>b<fim_middle>", "max_tokens": 1, "stream": False}
    edit = {"messages": [{"role": "user", "content": "<|code_to_edit|>a<|/code_to_edit|>"}]}
    bodies = {"/v1/completions": gap, "/v1/fim/completions": gap, "/api/generate": gap, "/v1/edit/completions": edit}
    with served(make()) as url, httpx.Client(base_url=url, timeout=600) as client:
        for path, body in bodies.items():
            assert client.post(path, json=body).status_code == 200, path
    assert len(threads) == 4
    assert {name.rpartition("_")[0] for name in threads} <= {"asyncio", "uvloop"}  # their pools; the loop's is a Thread-N


def test_a_prompt_of_seven_megabytes_is_refused_untouched_and_others_are_tokenized_in_threads():
    """Its size is checked before a template is rendered and a token is made. The event loop tokenizes nothing."""
    writer = make()
    tokenizer = writer.tokenizer
    tokenizing = []
    usual_encode, usual_render, usual_long = tokenizer.encode, tokenizer.render, tokenizer._encode_long
    threads = set()
    tokenizer.encode = lambda *args: (threads.add(threading.current_thread().name), usual_encode(*args))[1]
    tokenizer.render = lambda *args, **more: (tokenizing.append("render"), usual_render(*args, **more))[1]
    tokenizer._encode_long = lambda text: (tokenizing.append(len(text)), usual_long(text))[1]
    text = "Once upon a time " * 420_000
    messages = [{"role": "user", "content": text}]
    bodies = {
        "/v1/completions": {"prompt": text},
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": messages},
        "/api/generate": {"prompt": text},
        "/v1/canvas": {"prompt": text},
        "/v1/canvas/edit": {"text": text},
    }
    with served(writer) as url, httpx.Client(base_url=url, timeout=600) as client:
        for path, body in bodies.items():
            refused = client.post(path, json=body)
            assert (refused.status_code, "has more than 512 tokens" in refused.text) == (400, True), path
        infilled = client.post("/infill", json={"input_suffix": text, "n_predict": 1}).json()
        assert infilled["timings"]["prompt_n"] == 512  # what the context holds, not what was sent
        assert client.post("/v1/completions", json=PLAIN).status_code == 200
    assert tokenizing == []
    assert {name.rpartition("_")[0] for name in threads} == {"redraft-request"}
