"""Settings of a served cluster, the session of a request, and refusals that need no Ray."""

import asyncio
import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from redraft.cli.main import app
from redraft.cluster import deploy, front, ray_connection
from redraft.cluster.cluster_config import ClusterConfig, ServedModel, config_from, read_config
from redraft.cluster.routing import Fields, read_fields, session_of
from redraft.config import ConfigError
from redraft.server.errors import UnknownModelError

TINY = {"name": "tiny"}


def test_a_config_is_read_from_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "port: 9000\nhosts: [models.example]\nimage_hosts: ['*.Images.example']\nmodels:\n"
        "  - {name: tiny, autoscaling: {min: 1, max: 3}}\n"
        "  - {name: a/b, replicas: 2, gpus: 1, adapters: {poet: runs/poet}}\n"
    )
    config = read_config(file)
    first, second = config.models
    assert (config.port, config.hosts, config.host) == (9000, ("models.example",), "127.0.0.1")
    assert deploy.server_config(first, config).image_hosts == ("*.images.example",)
    assert (first.most_replicas, second.most_replicas, config.slots) == (3, 2, 5 * 72)
    assert (second.names, second.deployment) == (("a/b", "poet"), "a_b")
    assert second.loading["adapters"] == {"poet": "runs/poet"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "models must be a list with at least one model, got None"),
        ([], "the config must be an object, got \\[\\]"),
        ({"models": []}, "a cluster serves at least one model: name it under models"),
        ({"models": [TINY], "ports": 1}, "the config has no setting 'ports'; it has models, aliases, host"),
        ({"models": [{"model": "tiny"}]}, "a model needs a name, got {'model': 'tiny'}"),
        ({"models": [{**TINY, "gpu": 1}]}, "the model 'tiny' has no setting 'gpu'; it has name, model, replicas"),
        ({"models": [{**TINY, "replicas": 0}]}, "replicas of tiny must be a whole number from 1 to 10000, got 0"),
        ({"models": [{**TINY, "dtype": 32}]}, "dtype of tiny must be a text, got 32"),
        ({"models": [{**TINY, "replicas": 2, "autoscaling": {}}]}, "tiny has replicas 2 and autoscaling: leave one of them"),
        ({"models": [{**TINY, "autoscaling": {"min": 3, "max": 2}}]}, "autoscaling.min 3 is above autoscaling.max 2"),
        ({"models": [{**TINY, "autoscaling": {"target": 0}}]}, "autoscaling.target must be a number above 0, got 0"),
        ({"models": [TINY, TINY]}, "two models or adapters have the name 'tiny': choose another name for one of them"),
        ({"models": [{**TINY, "adapters": {"tiny": "x"}}]}, "two models or adapters have the name 'tiny'"),
        ({"models": [{"name": "front"}]}, "two deployments would have the name 'front'"),
        ({"models": [{"name": "a:latest"}]}, "the model a:latest: leave out :latest, which clients add to any name"),
        ({"models": [TINY], "hosts": "example"}, "hosts must be a list of texts, got 'example'"),
        ({"models": [TINY], "image_hosts": ["http://a"]}, "image_hosts takes a host, .* got 'http://a'"),
        ({"models": [TINY], "aliases": {"a": "b"}}, "'a' is for 'b', a model that is not served: choose one of tiny"),
        ({"models": [TINY], "aliases": ["gpt"]}, "aliases must be an object"),
        ({"models": [TINY], "port": 0}, "port must be a whole number from 1 to 65535, got 0"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(content, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_from(content)


def test_a_file_that_is_no_yaml_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("models: [")
    with pytest.raises(ConfigError, match=r"config\.yaml is not YAML: "):
        read_config(tmp_path / "config.yaml")


def test_an_address_of_the_network_needs_a_key(monkeypatch):
    config = ClusterConfig(models=(ServedModel(name="tiny"),), host="0.0.0.0")
    monkeypatch.delenv("REDRAFT_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^0\.0\.0\.0 can be reached from other machines: set REDRAFT_API_KEY to"):
        deploy.check_access(config)
    monkeypatch.setenv("REDRAFT_API_KEY", "secret")
    deploy.check_access(config)


def test_args_of_a_serve_config_have_no_address():
    with pytest.raises(ConfigError, match="args has port: a Serve config says it in http_options"):
        deploy.build_app({"models": [TINY], "port": 1})


def test_without_ray_the_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # restored at the end of the test, with what the command sets
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for command in (["serve", "--replicas", "2"], ["cluster", "status"], ["cluster", "down"]):
        error = CliRunner().invoke(app, command).exception
        assert str(error) == "replicas need Ray: pip install 'redraft[cluster]'"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--replicas", "0"], "--replicas is from 1 to 64, got 0"),
        (["--replicas", "2", "--connections", "9"], "--connections 9 cannot hold with --replicas"),
        (["--replicas", "2", "--keep-alive", "9m"], "--keep-alive and --max-models cannot hold with --replicas"),
        (["--replicas", "2", "--device", "cuda:1"], "--device cuda:1 names one device, and each replica gets its own"),
        (["--replicas", "2", "--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines: set --api-key"),
        (["--replicas", "2", "-m", "nowhere"], "nowhere"),
    ],
)
def test_flags_that_cannot_hold_with_replicas_are_refused(flags, sentence):
    error = CliRunner().invoke(app, ["serve", *flags]).exception
    assert isinstance(error, ValueError)
    assert sentence in str(error)


def test_an_address_where_nothing_listens_is_refused():
    with pytest.raises(ValueError, match=r"no Ray cluster answers at 127\.0\.0\.1:1 \("):
        ray_connection.check_reachable("127.0.0.1:1")
    with pytest.raises(ValueError, match=r"no Ray cluster answers at 127\.0\.0\.1:99999 \("):
        ray_connection.check_reachable("127.0.0.1:99999")
    ray_connection.check_reachable("auto")


def test_a_client_address_of_ray_is_refused():
    error = CliRunner().invoke(app, ["cluster", "status", "--address", "ray://head:10001"]).exception
    assert "ray://head:10001 is an address of Ray Client, which cannot stream" in str(error)


# Routing


def fields(**body):
    return read_fields(json.dumps(body).encode())


def test_a_conversation_keeps_its_session_while_it_grows():
    first = {"role": "user", "content": "Hi"}
    system = {"role": "system", "content": "Be kind."}
    grown = [first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"}]
    of = lambda **body: session_of({}, fields(**body))  # noqa: E731
    assert of(messages=[first]) == of(messages=grown) != ""
    assert of(messages=[system, first]) == of(messages=[system, *grown]) == of(system="Be kind.", messages=grown)
    assert of(messages=[first]) != of(messages=[system, first])
    assert of(input="Hi") == of(input=grown) == of(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    assert of(prompt="Hi") == of(messages=[]) == of(messages="") == ""


def test_images_tell_conversations_apart():
    def of(url, *later):
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [image, {"type": "text", "text": "What?"}]
        return session_of({}, fields(messages=[{"role": "user", "content": content}, *later]))

    long = "data:image/png;base64," + "A" * 1_000_000
    assert of(long) == of(long, {"role": "user", "content": "More"})
    assert len({of(long), of(long + "A"), of(long + "B"), of("data:image/png;base64,BB")}) == 4


def test_a_session_that_the_client_gives_comes_first():
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt_cache_key": "key"}
    assert session_of({b"x-session-id": b"header"}, fields(**body)) == "header"
    assert session_of({}, fields(**body)) == "key"
    assert len(session_of({b"x-session-id": b"x" * 9999}, fields(**body))) == 256


@given(st.binary(max_size=64))
def test_any_body_has_a_session_and_a_model_name(body):
    found = read_fields(body)
    assert isinstance(session_of({}, found), str)
    assert isinstance(found.model_name("/api/show"), str)


VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=4), lambda part: st.lists(part, max_size=3), max_leaves=5)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "text"]), VALUES | st.just("user"), max_size=3), max_size=3
)


@given(st.dictionaries(st.sampled_from(list(Fields.model_fields)), VALUES | MESSAGES))
def test_fields_of_any_type_have_a_session_and_a_model_name(body):
    found = read_fields(json.dumps(body).encode())
    assert isinstance(session_of({}, found), str)
    assert isinstance(found.model_name("/api/show"), str)


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/v1/chat/completions", b'data: {"error": {"message": "gone"'),
        ("/completion", b'data: {"error": {"code": 503'),
        ("/v1/messages", b'event: error\ndata: {"type": "error"'),
        ("/v1/responses", b'event: error\ndata: {"type": "error"'),
        ("/v1/canvas", b'data: {"type": "error"'),
    ],
)
def test_a_lost_stream_ends_with_an_error_of_its_wire_format(path, start):
    stream = {"headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
    assert front.error_event(path, stream, "gone").startswith(start)
    lines = {"headers": [(b"content-type", b"application/x-ndjson")]}
    assert front.error_event("/api/chat", lines, "gone") == b'{"error": "gone"}\n'
    with pytest.raises(RuntimeError, match="gone"):
        front.error_event(path, {"headers": [(b"content-type", b"application/json")]}, "gone")


# The front, without replicas


def ask_front(monkeypatch, url, path="/v1/models", **settings):
    """The status and the message of a GET request at a front that Ray's proxy reaches at this address."""
    monkeypatch.setattr(front, "listen_on_loopback", lambda: None)
    monkeypatch.delenv("REDRAFT_API_KEY", raising=False)
    subject = front.Front(ClusterConfig(models=(ServedModel(name="tiny"),), **settings), None)

    async def ask():
        transport = httpx.ASGITransport(app=front.build_app(subject))
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            return await client.get(path)

    response = asyncio.run(ask())
    return response.status_code, response.json()["error"]["message"]


def test_a_front_without_a_key_answers_this_machine_only(monkeypatch):
    """Ray's own config may listen anywhere, and KubeRay's does."""
    asked = ask_front(monkeypatch, "http://10.0.0.7:8000", hosts=("10.0.0.7",))
    assert asked == (403, front.NEEDS_KEY)


def test_a_front_checks_key_and_host(monkeypatch):
    assert ask_front(monkeypatch, "http://10.0.0.7:8000", hosts=("10.0.0.7",), key="secret")[0] == 401
    assert ask_front(monkeypatch, "http://10.0.0.7:8000", key="secret")[0] == 403


def test_a_front_knows_models_adapters_and_aliases(monkeypatch):
    unknown = ask_front(monkeypatch, "http://127.0.0.1:8000", "/v1/models/gpt-9")
    assert unknown == (404, str(UnknownModelError("gpt-9", ["tiny"])))
    models = (ServedModel(name="tiny", adapters={"poet": "runs/poet"}), ServedModel(name="b"))
    config = ClusterConfig(models=models, aliases={"gpt-4o": "poet", "*": "b"})
    subject = front.Front(config, None, None)
    assert [subject.find_model(name) for name in ("", "tiny", "poet:latest", "gpt-4o", "gpt-9")] == [*["tiny"] * 4, "b"]
    assert config.aliases_of(models[0]) == {"*": "tiny", "gpt-4o": "poet"}
    assert deploy.server_config(models[1], config).aliases == {"*": "b"}
