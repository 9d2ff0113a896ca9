"""Batches on one machine: answers are those of the server, every line has one record, a killed batch resumes."""

import json
import random
import re
import sys

import pytest
import vision_models
from batches import CHAT, read_answers, request, write_batch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import make

import redraft
from redraft.cli import batch as cli_batch
from redraft.cluster import jobs
from redraft.cluster.batch_app import BatchProcessor
from redraft.cluster.batch_file import ENDPOINTS, BatchRequest, count_tokens, parse_lines, to_items
from redraft.cluster.ray_data import ClusterOptions, check_address, plan_workers
from redraft.server.app import ServerConfig, make_app

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
STRUCTURED = {**CHAT, "max_tokens": 24, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
EVERY_KIND = [
    request("chat", "/v1/chat/completions", **CHAT),
    request("text", "/v1/completions", prompt="one two", max_tokens=8, seed=2),
    request("several", "/v1/completions", prompt=["a", "b"], n=3, max_tokens=4, seed=3),
    request("schema", "/v1/chat/completions", **STRUCTURED),
    request("gap", "/v1/completions", prompt="one ", suffix=" three", max_tokens=4, seed=4),
    request("fim", "/v1/fim/completions", prompt="one ", suffix=" three", max_tokens=4, seed=4),
    request("infill", "/infill", input_prefix="one ", input_suffix=" three", n_predict=4, seed=5),
    request("infill 2", "/infill", input_prefix="two ", input_suffix=" four", n_predict=4, seed=5),
    request("canvas", "/v1/canvas", prompt="abc", max_tokens=8, seed=6),
    request("messages", "/v1/messages", messages=CHAT["messages"], max_tokens=4),
    request("responses", "/v1/responses", input="abc", max_output_tokens=4),
    request("completion", "/completion", prompt="abc", n_predict=4, seed=7),
]
MAYBE_EMPTY = {"gap", "fim", "infill", "infill 2"}  # a random model may put nothing between two words
CHANGING = {"id", "created", "created_at", "timings", "memory", "request_id", "completed_at", "seed", "ms", "seconds"}
CHANGING |= {"cached_tokens"}  # depends on which of several prompts with one prefix came first


@pytest.fixture(name="load")
def _load(monkeypatch):
    """Counts how often a model is loaded."""
    loaded = []

    def load(*args, **options):
        loaded.append(options)
        return make()

    monkeypatch.setattr("redraft.cluster.batch_app.load", load)
    return loaded


def run(source, out, **options):
    cli_batch.batch(str(source), str(out), **options)
    return read_answers(out)


def steady(value):
    """A response without what changes from run to run."""
    if isinstance(value, dict):
        return {key: steady(part) for key, part in value.items() if key not in CHANGING}
    return [steady(part) for part in value] if isinstance(value, list) else value


def check_equal(mine, theirs):
    """Equal but for the last digit of printed probabilities, which requests in one forward may change."""
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key, part in mine.items():
            check_equal(part, theirs[key])
    elif isinstance(mine, list):
        for part, other in zip(mine, theirs, strict=True):
            check_equal(part, other)
    else:
        assert mine == (pytest.approx(theirs, abs=1.1e-4) if isinstance(mine, float) else theirs)


def check_answers(lines, folder):
    """Answers these requests, and compares the answers with the server's."""
    answers = run(write_batch(folder / "in.jsonl", lines), folder / "out.jsonl")
    assert sorted(answer["custom_id"] for answer in answers) == sorted(line["custom_id"] for line in lines)
    with TestClient(make_app(make(), ServerConfig(name="tiny")), base_url="http://localhost") as client:
        for answer in answers:
            line = next(line for line in lines if line["custom_id"] == answer["custom_id"])
            response = client.post(line["url"], json={**line["body"], "stream": False})
            assert answer["error"] is None
            assert re.fullmatch("batch_req_[0-9a-f]{24}", answer["id"])
            assert answer["response"]["status_code"] == response.status_code == 200, response.text
            if "seed" in line["body"]:
                check_equal(steady(answer["response"]["body"]), steady(response.json()))
            assert count_tokens(answer["response"]["body"]) > 0 or line["custom_id"] in MAYBE_EMPTY, line
    return answers


def test_answers_are_those_of_the_server(load, tmp_path, capsys):
    check_answers([line for line in EVERY_KIND if line["custom_id"] in ("chat", "text", "several")], tmp_path)
    words = " ".join(capsys.readouterr().err.split())
    assert re.search(r"3 answers, 0 of them errors; .* s, .* answers/s, \d+ tokens/s", words)


@pytest.mark.soak
def test_answers_of_many_endpoints_are_those_of_the_server(load, tmp_path):
    answers = check_answers(EVERY_KIND, tmp_path)
    schema = next(answer for answer in answers if answer["custom_id"] == "schema")
    assert set(json.loads(schema["response"]["body"]["choices"][0]["message"]["content"])) == {"a"}


def test_a_batch_takes_images(tmp_path):
    folder = vision_models.published(tmp_path / "eyes")
    picture = vision_models.FILES["landscape"]()
    question = {"type": "text", "text": "What?"}
    content = [{"type": "image_url", "image_url": {"url": vision_models.data_url(picture)}}, question]
    source = {"type": "base64", "media_type": "image/png", "data": vision_models.data_url(picture).partition(",")[2]}
    blocks = [{"type": "image", "source": source}, question]
    lines = [
        request("chat", "/v1/chat/completions", messages=[{"role": "user", "content": content}], max_tokens=8, seed=1),
        request("messages", "/v1/messages", messages=[{"role": "user", "content": blocks}], max_tokens=8, seed=1),
    ]
    answers = run(write_batch(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", model=str(folder))
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    image = {"type": "image", "image": picture}
    expected = redraft.load(folder).chat([{"role": "user", "content": [image, question]}], max_tokens=8, seed=1)
    assert bodies["chat"]["choices"][0]["message"]["content"] == expected.text
    assert bodies["messages"]["content"][0]["text"] == expected.text


def test_endpoints_are_routes_of_the_server():
    paths = make_app(make()).openapi()["paths"]
    assert all("post" in paths[endpoint] for endpoint in ENDPOINTS)


def test_a_request_that_the_server_refuses_has_its_status_and_error(load, tmp_path):
    lines = [request("long", prompt="abc", max_tokens=-1), request("odd", "/v1/chat/completions", messages="hello")]
    answers = run(write_batch(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 400
        assert answer["response"]["body"]["error"]["type"] == "invalid_request_error"


BAD_LINES = [
    ('{"custom_id": ', "invalid_json_line", None),
    (b'{"custom_id": "\xff"}', "invalid_json_line", None),
    ("[" * 100_000, "invalid_json_line", None),
    ("[1]", "invalid_json_line", None),
    ({"method": "POST", "url": "/v1/completions", "body": {}}, "missing_required_parameter", "custom_id"),
    ({**request("x"), "custom_id": 7}, "invalid_type", "custom_id"),
    ({**request("x"), "custom_id": ""}, "missing_required_parameter", "custom_id"),
    (request("good"), "duplicate_custom_id", "custom_id"),
    ({**request("get"), "method": "GET"}, "invalid_method", "method"),
    ({**request("there"), "url": "/v1/embeddings"}, "invalid_url", "url"),
    ({**request("bodiless"), "body": None}, "missing_required_parameter", "body"),
    ({**request("list"), "body": [1]}, "invalid_type", "body"),
    (request("stream", prompt="a", stream=True), "unsupported_value", "body.stream"),
]


def test_a_line_that_is_no_request_has_an_error_record(load, tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request("good"), "", *(line for line, _, _ in BAD_LINES)])
    answers = run(source, tmp_path / "out.jsonl")
    assert len(answers) == len({answer["id"] for answer in answers}) == 1 + len(BAD_LINES)
    by_line = {answer["error"]["line"]: answer for answer in answers if answer["error"]}
    for number, (line, code, param) in enumerate(BAD_LINES, 3):
        error = by_line[number]["error"]
        assert (error["code"], error["param"]) == (code, param), error
        assert error["message"]
        assert by_line[number]["response"] is None
        is_named = isinstance(line, dict) and param != "custom_id"
        assert by_line[number]["custom_id"] == (line["custom_id"] if is_named else None)
    assert "line 1 has the custom_id 'good' already" in by_line[10]["error"]["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=8), part, max_size=3),
    max_leaves=8,
)
FIELDS = {
    "custom_id": st.sampled_from(["a", "b", "\ud800", ""]) | JSON,
    "method": st.just("POST") | JSON,
    "url": st.sampled_from(ENDPOINTS) | JSON,
    "body": st.fixed_dictionaries({}, optional={"prompt": JSON, "stream": JSON, "max_tokens": JSON}) | JSON,
}
LINES = st.lists(
    st.fixed_dictionaries({}, optional=FIELDS).map(lambda line: json.dumps(line).encode())
    | st.binary().map(lambda raw: raw.replace(b"\n", b""))
    | JSON.map(lambda value: json.dumps(value).encode()),
    max_size=8,
)


@settings(max_examples=40)
@given(lines=LINES)
def test_every_line_is_a_request_or_an_error(lines):
    parsed = list(parse_lines(b"\n".join(lines)))
    assert [line.number for line in parsed] == [number for number, line in enumerate(lines, 1) if line.strip()]
    assert len({line.id for line in parsed}) == len(parsed)
    named = [line.custom_id for line in parsed if line.custom_id is not None]
    assert len(set(named)) == len(named)
    for line in parsed:
        assert (line.request is None) != (line.error is None)
        if line.request is not None:
            assert BatchRequest.from_text(line.request.to_text()) == line.request
            jobs.to_line({"custom_id": line.custom_id}).encode()


def mutate(rng: random.Random, line: dict) -> bytes:
    """A request with a field replaced or a few bytes changed."""
    values = [None, -1, 1e400, "x", [], {}, True, [[[]]], "\ud800", {"type": "json_schema"}, 10**30, "POST"]
    if rng.random() < 0.7:
        part = rng.choice([line, line["body"]])
        part = {**part, rng.choice(sorted(part)): rng.choice(values)}
        line = part if "custom_id" in part else {**line, "body": part}
        return json.dumps(line).encode()
    raw = bytearray(json.dumps(line).encode())
    for _ in range(rng.randint(1, 3)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_malformed_lines_get_one_record_each(load, tmp_path, seed):
    rng = random.Random(seed)
    quick = [line for line in EVERY_KIND if line["custom_id"] not in ("schema", "several")]
    lines = [mutate(rng, {**rng.choice(quick), "custom_id": str(number)}) for number in range(150)]
    source = write_batch(tmp_path / "in.jsonl", lines)
    answers = run(source, tmp_path / "out.jsonl")
    expected = list(parse_lines(source.read_bytes()))
    assert sorted(answer["id"] for answer in answers) == sorted(line.id for line in expected)
    for answer in answers:
        assert (answer["response"] is None) != (answer["error"] is None)
        if answer["response"] is not None:
            assert answer["response"]["status_code"] in (200, 400, 413), answer


# Resuming


def test_a_resumed_batch_equals_the_unbroken_one(load, tmp_path):
    lines = [request(f"r{number}", prompt=f"p{number}", max_tokens=4, seed=number) for number in range(6)]
    source = write_batch(tmp_path / "in.jsonl", [*lines, "{", request("r0", prompt="again")])
    whole = run(source, tmp_path / "whole.jsonl")
    written = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    for cut, torn in ((0, b""), (0, b'{"id": "batch'), (3, b'{"id": "ba'), (7, b""), (8, b"{")):
        path = tmp_path / f"{cut}{len(torn)}.jsonl"
        path.write_bytes(b"".join(written[:cut]) + torn)
        answers = run(source, path, resume=True)
        assert path.read_bytes().startswith(b"".join(written[:cut]))
        assert sorted(answer["id"] for answer in answers) == sorted(answer["id"] for answer in whole)
        texts = {a["id"]: a["response"] and a["response"]["body"]["choices"] for a in answers}
        assert texts == {a["id"]: a["response"] and a["response"]["body"]["choices"] for a in whole}


def test_an_answered_batch_loads_no_model(load, tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])
    before = run(source, tmp_path / "out.jsonl")
    assert len(load) == 1
    assert run(source, tmp_path / "out.jsonl", resume=True) == before
    assert len(load) == 1


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ('{"text": "a"}\n', "was not written by redraft batch (line 1): name another output"),
        ("{\n", "was not written by redraft batch (line 1)"),
        ('{"id": "batch_req_0", "custom_id": "z", "response": null, "error": null}\n', "line 1 of"),
    ],
)
def test_outputs_of_other_origin_are_refused(load, tmp_path, written, words):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])
    out = tmp_path / "out.jsonl"
    out.write_text(written)
    with pytest.raises(ValueError, match=re.escape(words)):
        run(source, out, resume=True)
    with pytest.raises(ValueError, match="exists already: continue it with --resume"):
        run(source, out)
    assert out.read_text() == written


def test_an_answer_of_a_changed_request_or_of_a_second_one_is_refused(load, tmp_path):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])
    out = tmp_path / "out.jsonl"
    run(source, out)
    changed = write_batch(tmp_path / "changed.jsonl", [request("a", prompt="other")])
    with pytest.raises(ValueError, match=r"line 1 of .* answers 'a', and .* has no such request, or has changed it"):
        run(changed, out, resume=True)
    out.write_bytes(2 * out.read_bytes())
    with pytest.raises(ValueError, match=r"line 2 of .* answers 'a' again: remove that line"):
        run(source, out, resume=True)


def test_two_processes_do_not_write_one_output(tmp_path):
    (tmp_path / "out.jsonl").write_text("")
    is_refused = pytest.raises(ValueError, match=r"another process is writing .*out\.jsonl")
    with jobs.OutputFile(tmp_path / "out.jsonl", resume=True), is_refused:
        jobs.OutputFile(tmp_path / "out.jsonl", resume=True)
    with jobs.OutputFile(tmp_path / "out.jsonl", resume=True):
        pass


@pytest.mark.soak
def test_a_batch_waits_for_slots_and_answers_no_429(load, tmp_path):
    """Sixteen requests of 8 completions are more than the server's 72 slots, and 16 patterns all that it compiles."""
    many = [request(f"n{number}", prompt="abc", n=8, max_tokens=2, seed=number) for number in range(16)]
    patterns = [
        request(f"p{number}", "/v1/canvas", prompt="a", regex=f"[a-z]{{{number + 1}}}", seed=1) for number in range(16)
    ]
    answers = run(write_batch(tmp_path / "in.jsonl", [*many, *patterns]), tmp_path / "out.jsonl")
    assert [answer["response"]["status_code"] for answer in answers] == 32 * [200]


def test_an_interrupted_batch_ends_its_threads(tmp_path):
    lines = [request(f"r{number}", prompt=f"p{number}", max_tokens=8, seed=number) for number in range(40)]
    items = to_items(list(parse_lines(write_batch(tmp_path / "in.jsonl", lines).read_bytes())))
    processor = BatchProcessor(make(), "tiny")

    def interrupt():
        with jobs.process_here(processor, items) as results:
            next(results)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not processor._thread.is_alive()


# Mistakes


def test_mistakes_are_named(load, tmp_path, monkeypatch):
    source = write_batch(tmp_path / "in.jsonl", [request("a")])
    out = tmp_path / "out.jsonl"
    empty = write_batch(tmp_path / "empty.jsonl", [""])
    for options, words in [
        ({"source": empty}, "has no requests"),
        ({"out": tmp_path / "no" / "out.jsonl"}, "there is no folder"),
        ({"workers": 2}, "--workers 2 needs --ray"),
        ({"workers": 0, "ray": "local"}, "--workers must be above 0, got 0"),
        ({"ray": "somewhere"}, "--ray is local or the HOST:PORT of a running cluster's head, got 'somewhere'"),
        ({"ray": "ray://head:10001"}, "--ray is local or the HOST:PORT"),
        ({"ray": "127.0.0.1:1"}, "no Ray cluster answers at 127.0.0.1:1"),
        ({"ray": "local", "device": "cuda:1"}, "--device cuda:1 cannot be had with --ray"),
        ({"ray": "local", "model": str(tmp_path / "none")}, "none"),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            run(**{"source": source, "out": out, **options})
    assert not out.exists()
    monkeypatch.setitem(sys.modules, "redraft.cluster.batch_app", None)
    with pytest.raises(ValueError, match=r"redraft batch needs .*pip install 'redraft\[server\]'"):
        run(source, out)


def test_without_ray_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--ray needs Ray with Ray Data: pip install 'redraft\[cluster\]'"):
        check_address("local")


def test_workers_are_planned_for_the_machines_of_a_cluster():
    two = [{"CPU": 8.0}, {"CPU": 4.0}]
    assert plan_workers(two, None, None) == (2, {"num_cpus": 4})
    assert plan_workers(two, 4, "cpu") == (4, {"num_cpus": 2})
    assert plan_workers([{"CPU": 2.0}], 4, None) == (4, {"num_cpus": 0.5})
    gpus = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}]
    assert plan_workers(gpus, None, None) == (2, {"num_gpus": 1, "num_cpus": 0})
    assert plan_workers(gpus, 1, "cuda") == (1, {"num_gpus": 1, "num_cpus": 0})
    assert plan_workers(gpus, None, "cpu") == (2, {"num_cpus": 8})
    with pytest.raises(ValueError, match="--workers 3 needs as many GPUs, and the Ray cluster has 2"):
        plan_workers(gpus, 3, None)
    with pytest.raises(ValueError, match="--device cuda needs a GPU"):
        plan_workers(two, None, "cuda")
    with pytest.raises(ValueError, match="no machine"):
        plan_workers([{}], None, None)
    assert ClusterOptions(address="head:6379").workers is None


def test_a_job_drops_second_results_and_misses_none(tmp_path):
    results = [jobs.Result(1, "a\n", {"n": 1}), jobs.Result(1, "b\n", {"n": 1}), jobs.Result(2, "c\n", {"n": 1})]
    options = {"kept_bytes": 0, "done": 0, "what": "items", "console": cli_batch.Console(stderr=True)}
    with jobs.OutputFile(tmp_path / "o", resume=False) as output:
        assert jobs.run_job(results, output, [1, 2], **options) == {"n": 2}
    assert (tmp_path / "o").read_text() == "a\nc\n"
    with (
        jobs.OutputFile(tmp_path / "p", resume=False) as output,
        pytest.raises(RuntimeError, match="without 1 of its items"),
    ):
        jobs.run_job(results, output, [1, 2, 3], **options)
