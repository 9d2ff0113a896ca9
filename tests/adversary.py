"""A catalogue of hostile requests, and honest clients beside them.

Every attack returns what became of it: a refusal with one sentence, a right answer, a connection that the server closed, or
a client that left. `is_promised` says whether the server promises that end. Attackers and honest clients have addresses of
their own in 127/8, so the server tells them apart.
"""

import json
import re
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from hostile import doubling_references, optional_properties

ATTACKER = "127.0.0.66"
ATTACKERS = (ATTACKER, "127.0.0.67")
HONEST = ("127.0.0.11", "127.0.0.12")
MAY_CLOSE = ("60 bodies that stop", "a head that stops", "a body in tiny chunks")  # the server closes these
TOO_LARGE = "too large"  # in a name: the server answers 413 and closes, which a client that still sends may not read
MAY_LEAVE = ("a stream that nobody reads", "a hard board", "a long text, token by token", "16 completions", "a long replay")
SMALL = {"prompt": "a", "max_tokens": 8, "diffusion_canvas_length": 8, "diffusion_max_steps": 2}
MIB = 2**20


def is_promised(name: str, outcome: str) -> bool:
    """Whether an attack may end so. A client that waits in vain, or a server that hangs up without a word, is wrong."""
    return (
        outcome in ("refused", "answered")
        or (outcome == "closed" and (name in MAY_CLOSE or TOO_LARGE in name))
        or (outcome == "left" and name.startswith((*MAY_LEAVE, "impatient")))
    )


class WrongEnd(AssertionError):
    """An attack that ended in none of the promised ways."""


def client(address: str, url: str, seconds: float = 600) -> httpx.Client:
    """A client with this address."""
    transport = httpx.HTTPTransport(local_address=address, verify=False)  # certificates are not read for every request
    return httpx.Client(base_url=url, timeout=seconds, transport=transport)


def judge(response: httpx.Response, is_right: Callable[[Any], bool] = lambda body: True) -> str:
    """The outcome of a response: refused with a sentence, or answered rightly. Anything else is a WrongEnd."""
    body = response.json()
    if response.status_code in (400, 403, 408, 413, 429, 503):
        error = body["error"]
        sentence = error if isinstance(error, str) else error["message"]
        if len(sentence) > 600 or "Traceback" in sentence:
            raise WrongEnd(f"{response.status_code} with {sentence[:700]}")
        return "refused"
    if response.status_code == 200 and is_right(body):
        return "answered"
    raise WrongEnd(f"{response.status_code} {response.text[:300]}")


def post(
    url: str,
    path: str,
    body: Any,
    is_right: Callable[[Any], bool] = lambda body: True,
    seconds: float = 600,
    address: str = ATTACKER,
) -> str:
    """Sends one request; a client that waits longer than `seconds` leaves."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with client(address, url, seconds) as attacker:
            return judge(attacker.post(path, content=content, headers={"content-type": "application/json"}), is_right)
    except httpx.TimeoutException:
        return "left"
    except httpx.TransportError:
        return "closed"


# 1. Patterns


def with_pattern(url: str, pattern: dict[str, Any], is_right: Callable[[Any], bool] = lambda body: True) -> str:
    """A completion under a pattern."""
    return post(url, "/v1/completions", {**SMALL, **pattern}, is_right)


def text_of(body: Any) -> str:
    """The text of a completion."""
    return body["choices"][0]["text"]


def pattern_attacks() -> dict[str, Callable[[str], str]]:
    """Attacks 1, 2, 3, 4 and 6."""
    attacks: dict[str, Callable[[str], str]] = {}
    for levels in (14, 18, 40):
        schema = doubling_references(levels)
        attacks[f"references doubled {levels} times"] = lambda url, schema=schema: with_pattern(
            url, {"guided_json": schema}, lambda body: isinstance(json.loads(text_of(body)), str)
        )
    long_canvas = {"max_tokens": 3900, "diffusion_canvas_length": 3900, "guided_regex": "[a-z ]{0,4500}"}
    attacks["a canvas of 3,900 under 4,500 states"] = lambda url: with_pattern(url, long_canvas)
    attacks["3.9 million choices"] = lambda url: post(
        url, "/v1/completions", b'{"prompt": "a", "guided_choice": [' + b"1," * 3_900_000 + b"1]}"
    )
    attacks["4,000 long choices"] = lambda url: with_pattern(url, {"guided_choice": [f"{n}" * 500 for n in range(4000)]})
    attacks["450 optional properties"] = lambda url: with_pattern(url, {"guided_json": optional_properties(450, 2000)})
    attacks["60 optional properties"] = lambda url: with_pattern(url, {"guided_json": optional_properties(60, 8)})
    for name, regex in {
        "ranges without case": "(?i)" + "[\u0100-\u10ff]" * 40,
        "a megabyte of pattern": "ab?" * 350_000,
        "nested repeats": "((((a{0,30}){0,30}){0,30}){0,30}){0,30}",
        "an exponential subset": "[ab]*a[ab]{18}",
        "deep brackets": "(" * 40_000 + "a" + ")" * 40_000,
        "many alternatives": "|".join(f"w{n}x*y" for n in range(20_000)),
        "all of Unicode, often": r"(?:\w|\d|\s|[^a]){1,400}",
        "a huge repeat": "a{1000000000}",
    }.items():
        attacks[name] = lambda url, regex=regex: with_pattern(url, {"guided_regex": regex})
    properties = {f"p{n}": {"type": "string", "pattern": f"^(?i:[a-z]{{1,{20 + n}}})$"} for n in range(200)}
    attacks["a pattern for each property"] = lambda url: with_pattern(
        url, {"guided_json": {"type": "object", "properties": properties, "required": list(properties)}}
    )
    attacks["32 long choices to decide"] = lambda url: post(
        url, "/v1/canvas/decide", {"prompt": "a", "choices": [f"{n:03}" + "x" * 90 for n in range(32)], "stream": False}
    )
    return attacks


# 2. Bodies


def body_attacks() -> dict[str, Callable[[str], str]]:
    """Attacks 5 and 11, and other bodies that cost more than they look."""
    megabytes = {
        "a prompt of 8M characters": ("/v1/completions", {"prompt": "ab " * 2_700_000}),
        "a conversation of 8M characters": ("/v1/messages", {"messages": [{"role": "user", "content": "a " * 4_000_000}]}),
        "8M characters to count": (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": "a" * 8_000_000}]},
        ),
        "a prefix of 8M characters": ("/infill", {"input_prefix": "x = 1\n" * 1_300_000, "input_suffix": "y"}),
        "a text of 8M characters to edit": ("/v1/canvas/edit", {"text": "word " * 1_600_000, "stream": False}),
        "100,000 gaps": ("/v1/canvas", {"text": "a [[ ]] " * 100_000, "stream": False}),
        "4,096 spans to keep": (
            "/v1/canvas/edit",
            {"text": "word " * 700, "strength": 0, "stream": False, "keep": [[0, 3000]] * 4096},
        ),
        "a region that almost matches": (
            "/v1/edit/completions",
            {"messages": [{"role": "user", "content": "<|current_file_content|>" + "a\n" * 900_000
             + "<|/current_file_content|><|code_to_edit|>" + "a\n" * 400_000 + "b<|/code_to_edit|>"}]},
        ),
        "a word of 8,000 letters to mend": (
            "/v1/edit/completions",
            {"messages": [{"role": "user", "content": f"<|code_to_edit|>{'z' * 8000}<|/code_to_edit|>"}]},
        ),
        "512 pins": ("/v1/canvas", {"prompt": "a", "stream": False, "max_tokens": 8,
                                    "pins": [{"position": n, "text": "x" * 200} for n in range(512)]}),
        "a wide tool": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1,
                                                 "tools": [{"type": "function", "function": {"name": "f" * 100_000}}] * 40}),
        "8M characters that are no base64": ("/api/generate", {"prompt": "a", "images": ["%" * 8_000_000]}),
        "an image part with a long name": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url" * 800_000}]}]}),
        "4,000 links into the local network": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{n}/"}} for n in range(1, 4001)]}]}),
        "64 lists of 64 images": ("/api/chat", {"messages": [
            {"role": "user", "content": "a", "images": ["iVBORw0KGgo="] * 64}] * 64}),
        "64 long stop strings": ("/v1/completions", {**SMALL, "stop": ["x" * 2000] * 64}),
    }  # fmt: skip
    attacks: dict[str, Callable[[str], str]] = {
        name: lambda url, path=path, body=body: post(url, path, body) for name, (path, body) in megabytes.items()
    }
    for name, raw in {
        "millions of empty lists": b'{"prompt": "a", "x": [' + b"[]," * 2_500_000 + b"[]]}",
        "millions of unknown fields": b"{" + b",".join(b'"%x":1' % n for n in range(600_000)) + b"}",
        "a million biases": b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d":"x"' % n for n in range(500_000)) + b"}}",
        "deep lists": b'{"prompt": ' + b"[" * 1_000_000,
        "an integer of 5,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        "escapes": b'{"prompt": "' + b"\\u0000" * 1_300_000 + b'"}',
    }.items():
        attacks[name] = lambda url, raw=raw: post(url, "/v1/completions", raw)
    return attacks


# 3. Connections


def open_socket(url: str) -> socket.socket:
    """A connection of the attacker's."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=600, source_address=(ATTACKER, 0))


def send_raw(url: str, *pieces: bytes) -> str:
    """Sends bytes and reads the status of the answer, if one comes."""
    with open_socket(url) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            answer = connection.recv(MIB)
        except OSError:
            return "closed"
    if not answer:
        return "closed"
    status = int(re.match(rb"HTTP/1.1 (\d+)", answer)[1])  # type: ignore[index]
    return "refused" if 400 <= status < 500 or status == 503 else "answered"


def head(path: str, *lines: str) -> bytes:
    """The head of a request."""
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode()


def stall_bodies(url: str, count: int = 60) -> str:
    """Opens connections that send almost a whole body, and waits until the server has refused or closed each."""
    announced = head("/v1/completions", "Host: 127.0.0.1", f"Content-Length: {8 * MIB}")
    connections = []
    refused = 0
    for _ in range(count):
        connection = open_socket(url)
        connections.append(connection)
        try:
            connection.sendall(announced)
            for _ in range(8):
                connection.sendall(b" " * (MIB - 512))
        except OSError:
            refused += 1
    try:
        for connection in connections:
            with suppress(ConnectionError):
                connection.recv(1024)  # blocks until the server answers or closes
    finally:
        for connection in connections:
            connection.close()
    return "refused"


def stall_head(url: str) -> str:
    """Sends half a head and waits until the server closes."""
    with open_socket(url) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127")
        with suppress(ConnectionError):
            return "closed" if not connection.recv(1024) else "refused"
    return "closed"


def never_read(url: str) -> str:
    """Asks for a long stream of frames and reads none of it, until the server closes."""
    body = json.dumps({"prompt": "a", "max_tokens": 4000, "diffusing": True, "stream": True, "logit_bias": {"1": -100}})
    with open_socket(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head("/v1/completions", "Host: 127.0.0.1", f"Content-Length: {len(body)}") + body.encode())
        threading.Event().wait(3)
    return "left"


def connection_attacks() -> dict[str, Callable[[str], str]]:
    """Attacks 7, 8 and 11."""
    tiny_chunks = b"1\r\n \r\n" * 200_000
    attacks: dict[str, Callable[[str], str]] = {
        "60 bodies that stop": stall_bodies,
        "a head that stops": stall_head,
        "a stream that nobody reads": never_read,
        "a body in tiny chunks": lambda url: send_raw(
            url, head("/v1/completions", "Host: 127.0.0.1", "Transfer-Encoding: chunked"), tiny_chunks
        ),
    }
    for host in ("evil.com@127.0.0.1", "localhost:abc", "127.0.0.1:99999999", "127.0.0.1/x", "[::1", "localhost,evil.com"):
        attacks[f"the host {host}"] = lambda url, host=host: send_raw(url, head("/v1/completions", f"Host: {host}"))
    local = ("Host: localhost", "Origin: http://localhost")
    two_origins = head("/v1/completions", *local, "Origin: http://evil.com", "Content-Length: 0")
    attacks["two origins"] = lambda url: send_raw(url, two_origins)
    attacks["a path in the origin"] = lambda url: send_raw(
        url, head("/v1/completions", "Host: localhost", "Origin: http://localhost/evil", "Content-Length: 0")
    )
    return attacks


def work_attacks() -> dict[str, Callable[[str], str]]:
    """Requests that ask for much work, which is allowed, and must not take more than the client's share."""
    empty_board = {"puzzle": "." * 81, "canvases": 256, "stream": False}
    replay = {
        "prompt": "a",
        "canvas_length": 1,
        "max_tokens": 400,
        "max_steps": 1,
        "canvases": [[40]] * 390,
        "stream": False,
    }
    bans = [{"position": n % 60, "text": "x" * 200} for n in range(512)]
    interventions = [{"block": 0, "step": n, "bans": bans, "free": list(range(4096))} for n in range(8)]
    pinned = {"regex": "[a-z ]{0,3900}", "canvas_length": 1, "max_steps": 1, "pins": [{"position": 3899, "text": "a"}]}
    arguments = {"function": {"name": "f", "arguments": '{"a": [' + "[]," * 2_400_000 + "[]]}"}}
    call = {"role": "assistant", "content": "a", "tool_calls": [arguments]}
    draft = {"prediction": {"content": "z1" * 3_500_000}, "n": 3, "max_tokens": 8, "diffusion_max_steps": 2}
    many = {"n": 4, "max_tokens": 400, "logprobs": 20, "diffusion_max_steps": 1, "logit_bias": {"1": -100}}
    chat = "/v1/chat/completions"
    user = [{"role": "user", "content": "a"}]
    return {
        "a long replay": lambda url: post(url, "/v1/canvas", replay, seconds=20),
        "8 x 512 bans": lambda url: post(
            url, "/v1/canvas", {"prompt": "a", "stream": False, "interventions": interventions}
        ),
        "a pin at the end of a long pattern": lambda url: post(
            url, "/v1/canvas", {"prompt": "a", "stream": False, "max_tokens": 3900, **pinned}
        ),
        "JSON inside of JSON": lambda url: post(url, chat, {"messages": [call], "max_tokens": 1}),
        "a long draft": lambda url: post(url, chat, {"messages": user, **draft}),
        "many logprobs": lambda url: post(url, "/v1/completions", {"prompt": "a", **many}),
        "a number of 5,000 digits in a pattern": lambda url: with_pattern(url, {"guided_regex": "x{" + "9" * 5000 + "}"}),
        "a hard board": lambda url: post(url, "/v1/canvas/sudoku", empty_board, seconds=4),
        "a long text, token by token": lambda url: post(
            url, "/v1/canvas/autoregressive", {"prompt": "a", "max_tokens": 3000, "stream": False}, seconds=4
        ),
        "16 completions": lambda url: post(url, "/v1/completions", {**SMALL, "n": 16, "max_tokens": 400}, seconds=4),
    }


def catalogue() -> dict[str, Callable[[str], str]]:
    """All attacks by name."""
    return {**pattern_attacks(), **body_attacks(), **connection_attacks(), **work_attacks()}


# 4. Beside them


@dataclass
class HonestClient:
    """Asks for the same completions again and again."""

    url: str
    address: str
    body: dict[str, Any]
    pause: float = 0.5  # seconds in which a person reads an answer; a client that asks without a pause is a load test
    answers: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def ask(self, seed: int) -> str:
        """One completion."""
        try:
            with client(self.address, self.url, 600) as honest:
                response = honest.post("/v1/completions", json={**self.body, "seed": seed})
        except httpx.HTTPError as error:
            self.errors.append(repr(error))
            return ""
        if response.status_code != 200:
            self.errors.append(f"{response.status_code} {response.text[:300]}")
            return ""
        return text_of(response.json())

    def ask_until(self, is_over: threading.Event, seeds: Sequence[int]) -> None:
        """Asks with one seed after another, until the attack is over; each seed at least once."""
        number = 0
        while number < len(seeds) or not is_over.is_set():
            self.answers.append(self.ask(seeds[number % len(seeds)]))
            number += 1
            is_over.wait(self.pause)


def run_all(url: str, attacks: dict[str, Callable[[str], str]], at_once: int = 4) -> tuple[dict[str, str], list[str]]:
    """Runs attacks, some at the same time. Returns the outcome of each, and a line for each that ended wrongly."""
    waiting = list(attacks.items())
    outcomes: dict[str, str] = {}
    wrong: list[str] = []

    def work() -> None:
        while waiting:
            with suppress(IndexError):
                name, attack = waiting.pop(0)
                try:
                    outcomes[name] = attack(url)
                    if not is_promised(name, outcomes[name]):
                        wrong.append(f"{name}: {outcomes[name]}")
                except Exception as error:
                    wrong.append(f"{name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, wrong
