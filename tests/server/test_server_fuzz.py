"""Fuzzing: malformed bodies, and every body that the OpenAPI description allows, cause no fault of the server."""

import asyncio
import json
import random
from collections import Counter

import httpx
import pytest
import schemathesis
import tiny
import vision_models
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance
from serving import served

import redraft
from redraft.server import infill
from redraft.server.app import ServerConfig, make_app
from redraft.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # from the libraries that test

TAGS = "<|current_file_content|>\n<|code_to_edit|>\na\n<|/code_to_edit|>\n<|/current_file_content|>"
USER, TEXT = {"role": "user", "content": "x"}, {"type": "text", "text": "x"}
PUZZLE = "534678912672195348198342567859761423426853791713924856961537284287419635345286.7."
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
INPUT_IMAGE = {"type": "input_image", "image_url": "http://127.0.0.1/a.png", "detail": "low"}
BODIES = {
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4, "stop": ["a"], "n": 1, "tools": []},
    "/v1/completions": {
        "prompt": ["x", "y"],
        "max_tokens": 4,
        "logit_bias": {"7": -100},
        "response_format": {"type": "text"},
    },
    "/v1/completions?": {
        "prompt": "x",
        "max_tokens": 4,
        "check": "exact",
        "logit_bias": {"7": 2.5},
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "best_of": 2,
    },
    "/v1/fim/completions": {"prompt": "x", "suffix": "y", "max_tokens": 2},
    "/v1/edit/completions": {"messages": [{"role": "user", "content": TAGS}]},
    "/v1/messages": {"messages": [{"role": "user", "content": [TEXT]}], "max_tokens": 4, "system": "s", "check": "checked"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/canvas": {
        "prompt": "x",
        "max_tokens": 4,
        "pins": [{"position": 0, "id": 70}],
        "interventions": [{"block": 0, "step": 1, "bans": [{"position": 1, "text": "y"}], "free": [0]}],
        "canvases": [],
        "resume_at": {"block": 0, "step": 1},
    },
    "/v1/canvas/edit": {
        "text": "some text",
        "strength": 0.5,
        "keep": [[0, 2]],
        "interventions": [{"block": 0, "step": 0, "pins": [{"position": 4, "text": "y"}]}],
        "stream": False,
    },
    "/v1/canvas/decide": {"messages": [USER], "choices": ["a", "b"], "stream": False},
    "/v1/canvas/sudoku": {"puzzle": PUZZLE, "canvases": 1, "stream": False},
    "/v1/canvas/autoregressive": {"prompt": "x", "max_tokens": 3, "top_k": 4, "check": "off", "stream": False},
    "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 2, "input_extra": [TEXT]},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 4, "stop": ["a"]}, "stream": False},
    "/api/generate?": {
        "prompt": "x",
        "options": {"num_predict": 4, "check": "checked", "tolerance": 1.5, "repeat_penalty": 1.1},
        "stream": False,
    },
    "/api/chat": {"messages": [USER], "format": "json", "options": {"num_predict": 24}, "stream": False},
    "/api/show": {"model": "redraft"},
    "/v1/chat/completions?": {"messages": [{"role": "user", "content": [PART, TEXT]}], "max_tokens": 4},
    "/v1/messages?": {"messages": [{"role": "user", "content": [BLOCK, TEXT]}], "max_tokens": 4},
    "/v1/responses": {"input": [{"role": "user", "content": [INPUT_IMAGE]}], "max_output_tokens": 4},
    "/api/chat?": {"messages": [{**USER, "images": ["aGk="]}], "options": {"num_predict": 4}, "stream": False},
}
AT_ONCE = 16
ANY_NAME = {"*": "redraft"}  # a random name of a model is not the mistake that is looked for
NUMBERS = [-1, 0, 0.5, 1e308, -1e308, 10**400, 2**63]
ODD = [None, True, *NUMBERS, "", "\x00", "é\u2028", "x" * 5000, "1e999", [], {}, [[]], [{}], {"": {}}]


def make() -> Writer:
    sampler = tiny.sampler(canvas_length=8, max_steps=1, max_new_tokens=8)
    return Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), sampler)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def paths_in(value, path=()):
    """The paths of all values inside a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths_in(inner, (*path, key))


def malform(rng: random.Random, body: dict) -> bytes:
    """A malformed version of a body."""
    kind = rng.randrange(7)
    if kind < 3:  # a value of a wrong type or size somewhere
        body = json.loads(json.dumps(body))
        path = rng.choice([path for path in paths_in(body) if path])
        *upto, last = path
        target = body
        for key in upto:
            target = target[key]
        target[last] = rng.choice(ODD)
        return json.dumps(body).encode()
    raw = json.dumps(body).encode()
    if kind == 3:
        return raw[: rng.randrange(len(raw))]
    if kind == 4:
        at = rng.randrange(len(raw))
        return raw[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 4))) + raw[at + 1 :]
    if kind == 5:
        key = rng.choice(list(body))
        deep = nested(rng.choice([50, 300, 5000]))
        return (json.dumps({k: v for k, v in body.items() if k != key})[:-1] + f', "{key}": {deep}}}').encode()
    nothing = [b"", b"null", b"[]", b'"x"', b"{", b"\xff\xfe", b"NaN", b"1" * 5000]
    return rng.choice([*nothing, nested(20_000).encode(), raw.replace(b'"', b"'")])


async def posted(app, path: str, body: bytes, address: str = "127.0.0.1") -> tuple[int, bytes]:
    """Sends one request to the app, without a network."""
    sent, given = [], iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        if (message := next(given, None)) is None:
            await asyncio.sleep(3600)
        return message

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    scope |= {"query_string": b"", "client": (address, 1), "server": ("localhost", 80), "scheme": "http"}
    scope |= {"http_version": "1.1", "root_path": ""}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Short gaps: the requests matter here, not the length of the result."""
    monkeypatch.setattr(infill, "MAX_GAP_TOKENS", 4)


async def send_malformed(count: int, seed: int, writer: Writer | None = None, bodies: dict = BODIES) -> Counter[int]:
    """Sends malformed bodies to all paths, AT_ONCE at a time, and returns how often each status came back."""
    app = make_app(writer or make(), ServerConfig(requests=4 * AT_ONCE, aliases=ANY_NAME))
    rng = random.Random(seed)
    paths = (list(bodies)[number % len(bodies)] for number in range(count))
    malformed = ((path, malform(rng, bodies[path])) for path in paths)
    statuses: Counter[int] = Counter()

    async def send_from(address: str) -> None:
        for path, body in malformed:
            status, answer = await posted(app, path.rstrip("?"), body, address)  # "?" tells two bodies of a path apart
            assert status in (200, 400), (status, path, body[:300], answer[:300])
            if status == 400:
                assert json.loads(answer)["error"], (path, body[:300])
            statuses[status] += 1

    async with app.router.lifespan_context(app):
        await asyncio.gather(*(send_from(f"127.0.0.{number + 1}") for number in range(AT_ONCE)))
        assert statuses.total() == count
        assert app.state.models.active == 0
        status, _ = await posted(app, "/v1/completions", b'{"prompt": "ab", "max_tokens": 4, "seed": 1}')
        assert status == 200
    return statuses


@pytest.mark.soak
def test_ten_thousand_malformed_bodies_are_a_400_with_a_sentence():
    assert asyncio.run(send_malformed(10_000, seed=0))[400] > 7000


def test_malformed_images_are_a_400_with_a_sentence(tmp_path):
    """A model that takes images: what is not refused is a picture, with the same limits for all wires."""
    writer = redraft.load(vision_models.published(tmp_path / "eyes"), device="cpu")
    writer.sampler = writer.sampler.changed(max_steps=1, canvas_length=8, max_new_tokens=8)
    url = vision_models.data_url(vision_models.FILES["three pixels"]())
    data = url.partition(",")[2]
    image = {"type": "image", "source": {**BLOCK["source"], "data": data}}
    content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}, TEXT]
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": content}], "max_tokens": 4},
        "/v1/responses": {"input": [{"role": "user", "content": [{**INPUT_IMAGE, "image_url": url}]}]},
        "/v1/messages": {"messages": [{"role": "user", "content": [image, TEXT]}], "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": [image, TEXT]}]},
        "/api/chat": {"messages": [{**USER, "images": [data]}], "options": {"num_predict": 4}, "stream": False},
        "/api/generate": {"prompt": "x", "images": [data], "options": {"num_predict": 4}, "stream": False},
    }
    statuses = asyncio.run(send_malformed(600, 2, writer, bodies))
    assert statuses[400] > 300
    assert statuses[200] > 10


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
SURE = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


@pytest.mark.soak
def test_everything_the_description_allows_is_answered_as_described():
    """No 5xx, and no status or content type that the OpenAPI description does not name."""
    sent = 0
    operations = 0
    with served(make(), aliases=ANY_NAME) as url:
        for operation in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
            operations += 1

            @settings(max_examples=12, **SURE)
            @given(operation.ok().as_strategy())
            def send(case):
                nonlocal sent
                sent += 1
                case.call_and_validate(checks=CHECKS, timeout=600)

            send()
        assert httpx.get(f"{url}/health").status_code == 200
    assert operations > 15
    assert sent > 100
