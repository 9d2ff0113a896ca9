"""Serving on a Ray cluster of two nodes: the answers of a single process, sessions, several models, replicas that end."""

import functools
import json
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
import serving
import tiny
import yaml
from ray_cluster import KEY

import redraft

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore"),  # from the clients' own libraries
]

HEADERS = {"Authorization": f"Bearer {KEY}"}
LOST = "the replica that worked on this request has ended before its answer was complete: send the request again"
STORY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24}
NO_END = {"1": -100, "5": -100}  # forbids the stop tokens of the random model
AUTO = {"min": 1, "max": 2, "target": 1, "up_seconds": 0, "down_seconds": 0}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Deployed:
    """What the tests know of the cluster."""

    def __init__(self, cluster, settings, folder):
        self.cluster = cluster
        self.settings = settings
        self.file = folder / "config.yaml"
        self.url = f"http://127.0.0.1:{settings['port']}"
        self.http = httpx.Client(base_url=self.url, headers=HEADERS, timeout=600)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=600)

    def deploy(self, **tiny_settings):
        """Deploys, with other settings of the model tiny."""
        first, *others = self.settings["models"]
        self.file.write_text(yaml.safe_dump({**self.settings, "models": [{**first, **tiny_settings}, *others]}))
        self.cluster.redraft("cluster", "deploy", str(self.file), "--address", self.cluster.address)

    def state(self):
        return json.loads(self.cluster.redraft("cluster", "status", "--json", "--address", self.cluster.address).stdout)

    def replicas(self, model):
        """The running replicas of a model, by name, as /health has them."""
        rows = self.http.get("/health").json()["replicas"]
        return {row["replica"]: row for row in rows if row["model"] == model}

    def metric(self, name, **labels):
        """The sum of a metric over all rows that have these labels."""
        rows = re.findall(rf"^{name}{{(.*)}} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(float(value) for found, value in rows if wanted <= set(found.split(",")))

    def is_quiet(self):
        """Whether no request runs or waits, twice, with more than the second between for which /metrics stays as it is."""
        return (
            self.metric("redraft_active_requests") == 0 and not time.sleep(2) and self.metric("redraft_active_requests") == 0
        )

    def stream(self, session, **body):
        """Starts a stream; returns the replica that answers, and the stream."""
        headers = {"x-session-id": session}
        raw = self.client.completions.with_raw_response.create(**body, stream=True, extra_headers=headers)
        return raw.headers["x-redraft-replica"], raw.parse()


@pytest.fixture(scope="module")
def deployed(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    story = {
        "name": "tiny",
        "replicas": 2,
        "cpus": 2,
        "threads": 1,
        "dtype": "float32",
        "adapters": {"numbers": "tiny-sudoku"},
    }
    random = {"name": "b", "model": str(tiny.save_folder(folder / "b")), "cpus": 0, "threads": 1, "autoscaling": AUTO}
    settings = {"port": free_port(), "requests": 9, "drain_seconds": 300, "models": [story, random]}
    settings["aliases"] = {"gpt-4o": "b", "gpt-4o-mini": "numbers"}
    subject = Deployed(cluster, settings, folder)
    subject.deploy()
    assert tiny.wait_until(lambda: subject.http.get("/health").status_code == 200)  # the proxy may hear of it later
    yield subject
    subject.http.close()
    subject.client.close()
    cluster.redraft("cluster", "down", "--address", cluster.address)


@pytest.fixture(scope="module")
def alone():
    """The answer of a single process to a request."""
    with serving.served(redraft.load("tiny", dtype="float32"), name="tiny") as url, httpx.Client(timeout=600) as http:

        @functools.cache
        def ask(body):
            return http.post(f"{url}/v1/completions", content=body).json()["choices"][0]["text"]

        yield lambda body: ask(json.dumps(body))


@pytest.fixture(scope="module")
def endless():
    """A logit bias that lets a story go on until its last token."""
    return {str(token): -100 for token in redraft.load("tiny").sampler.eos_token_ids}


def collect(stream):
    """The text of a stream and its finish reasons."""
    texts = []
    reasons = []
    for chunk in stream:
        texts.append(chunk.choices[0].text)
        reasons.append(chunk.choices[0].finish_reason)
    return "".join(texts), [reason for reason in reasons if reason]


def test_sixteen_clients_get_the_answers_of_a_single_process(deployed, alone):
    bodies = [{**STORY, "seed": seed} for seed in range(8)]

    def ask(number):
        body = bodies[number % 8]
        if number < 8:
            return deployed.client.completions.create(**body).choices[0].text
        return collect(deployed.client.completions.create(**body, stream=True))[0]

    with ThreadPoolExecutor(16) as clients:
        texts = list(clients.map(ask, range(16)))
    assert texts == [alone(body) for body in bodies] * 2
    rows = deployed.state()["health"]["replicas"]
    assert len({row["node"] for row in rows if row["model"] == "tiny"}) == 2
    tokens = [deployed.metric("redraft_tokens_total", kind="completion", replica=name) for name in deployed.replicas("tiny")]
    assert sum(tokens) == 16 * STORY["max_tokens"]
    assert deployed.metric("redraft_active_requests", deployment="front") == 0


def test_requests_of_one_conversation_reach_one_replica(deployed):
    def ask(messages, headers=None, **fields):
        body = {"model": "tiny", "max_tokens": 1, "messages": messages, **fields}
        return deployed.http.post("/v1/messages/count_tokens", json=body, headers=headers).headers["x-redraft-replica"]

    by_conversation = []
    for number in range(24):
        turns = serving.user(f"conversation {number}")
        grown = [*turns, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        by_conversation.append({ask(turns), ask(grown), ask(grown)})
        assert len({ask(turns, {"x-session-id": f"s{number}"}), ask(grown[2:], {"x-session-id": f"s{number}"})}) == 1
        assert len({ask(turns, prompt_cache_key=f"k{number}"), ask(grown[2:], prompt_cache_key=f"k{number}")}) == 1
    assert all(len(names) == 1 for names in by_conversation)
    assert set.union(*by_conversation) == set(deployed.replicas("tiny"))


def test_a_model_an_adapter_and_an_alias_are_answered_by_their_deployments(deployed):
    aliases = (("gpt-4o", "b", "b"), ("gpt-4o-mini", "numbers", "tiny"))
    for name, answered_by, deployment in (("b", "b", "b"), ("numbers", "numbers", "tiny"), ("", "tiny", "tiny"), *aliases):
        body = {"model": name, "prompt": "ab", "max_tokens": 4, "seed": 1}
        whole = deployed.client.completions.with_raw_response.create(**body)
        assert whole.headers["x-redraft-replica"] in deployed.replicas(deployment)
        assert whole.parse().model == answered_by
        assert collect(deployed.client.completions.create(**body, stream=True))[0] == whole.parse().choices[0].text
    names = [row["id"] for row in deployed.http.get("/v1/models").json()["data"]]
    assert names == ["tiny", "numbers", "b"]
    assert [row["name"] for row in deployed.http.get("/api/tags").json()["models"]] == ["tiny", "numbers", "b"]
    assert [deployed.http.get(f"/v1/models/{name}").json()["id"] for name in ("b", "gpt-4o")] == ["b", "b"]
    with pytest.raises(openai.NotFoundError, match="there is no model 'unknown' here; this server has tiny, numbers, b"):
        deployed.client.completions.create(model="unknown", prompt="ab")


def test_access_is_checked_as_on_one_machine_and_all_ports_are_local(deployed):
    with httpx.Client(base_url=deployed.url, timeout=600) as stranger:
        assert stranger.get("/v1/models").status_code == 401
        assert stranger.get("/metrics").status_code == 401
        assert stranger.get("/health").json()["replicas"][0].keys() == {"model", "replica", "status", "active"}
        assert stranger.get("/v1/models", headers={**HEADERS, "Host": "example.org"}).status_code == 403
        assert stranger.get("/v1/models", headers={**HEADERS, "Origin": "https://example.org"}).status_code == 403
        large = {**HEADERS, "Content-Length": str(9 * 2**20)}
        assert stranger.post("/v1/completions", headers=large, content=b"{" * 9 * 2**20).status_code == 413
    assert deployed.http.post("/v1/completions", content=b"\x80\x04pickle").status_code == 400
    listening = {
        connection.laddr.ip
        for process in [psutil.Process(deployed.cluster.pid), *psutil.Process(deployed.cluster.pid).children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}, listening


def test_too_many_requests_are_answered_429(deployed):
    """Nine for each of four replicas, two of tiny and at most two of b: 36, of which one client gets eight ninths."""
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 2000, "stream": True}
    refused = []
    done = threading.Event()

    def ask(seed):
        with deployed.http.stream("POST", "/v1/completions", json={**body, "seed": seed}) as response:
            if response.status_code == 429:
                response.read()
                refused.append((response.headers["retry-after"], response.json()["error"]["message"]))
            done.wait(600) if not refused else done.set()

    with ThreadPoolExecutor(40) as clients:
        list(clients.map(ask, range(40)))
    assert refused[0] == ("1", "this client already has 32 requests running or waiting: try again in 1 s")
    assert tiny.wait_until(deployed.is_quiet)


def test_a_client_that_leaves_frees_its_engine(deployed, endless):
    before = deployed.metric("redraft_tokens_total", kind="completion", deployment="tiny")
    for refuses_cancel in ({}, {"x-request-disconnect-disabled": "?1"}):
        body = {**STORY, "max_tokens": 3000, "stream": True, "seed": 5, "logit_bias": endless}
        with deployed.http.stream("POST", "/v1/completions", json=body, headers=refuses_cancel) as response:
            lines = response.iter_lines()  # kept: the connection ends with it
            assert '"finish_reason":null' in next(lines)
            assert tiny.wait_until(lambda: deployed.metric("redraft_active_requests", deployment="tiny") == 1)
        assert tiny.wait_until(deployed.is_quiet)
    assert deployed.metric("redraft_tokens_total", kind="completion", deployment="tiny") == before  # none has finished


def streams_on_both(deployed, body):
    """A stream on each replica of tiny, and no other request there: by replica, its session and itself."""
    streams = {}
    for number in range(64):
        if len(streams) == 2:
            assert tiny.wait_until(lambda: all(row["active"] <= 1 for row in deployed.replicas("tiny").values()))
            return streams
        name, stream = deployed.stream(f"both {number}", **body)
        if name in streams:
            stream.close()
        else:
            streams[name] = (f"both {number}", stream)
    raise AssertionError("all sessions have reached one replica")


def test_a_killed_replica_ends_its_answers_with_an_error_and_is_replaced(deployed, alone, endless):
    body = {**STORY, "seed": 3, "max_tokens": 700, "logit_bias": endless}
    pids = {row["replica"]: row["pid"] for row in deployed.state()["health"]["replicas"]}
    (victim, (session, lost)), (_, (_, kept)) = streams_on_both(deployed, body).items()
    whole = {**body, "max_tokens": 3000}  # must still run when the replica is killed
    with ThreadPoolExecutor(1) as other:
        running = other.submit(deployed.http.post, "/v1/completions", json=whole, headers={"x-session-id": session})
        assert tiny.wait_until(lambda: deployed.replicas("tiny")[victim]["active"] == 2)
        os.kill(pids[victim], signal.SIGKILL)
        reasons = []
        with pytest.raises(openai.APIError, match=LOST):
            reasons.extend(chunk.choices[0].finish_reason for chunk in lost)
        assert set(reasons) <= {None}
        answer = running.result()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, LOST)
    for name in (session, "a", "b", "c"):
        completion = deployed.http.post("/v1/completions", json=STORY, headers={"x-session-id": name})
        assert completion.status_code == 200
    assert collect(kept) == (alone(body), ["length"])
    assert tiny.wait_until(lambda: len(deployed.replicas("tiny")) == 2 and victim not in deployed.replicas("tiny"), 12_000)


def test_a_killed_front_cuts_its_answers_and_is_replaced(deployed, endless):
    _, stream = deployed.stream("front", **{**STORY, "max_tokens": 700, "logit_bias": endless})
    children = psutil.Process(deployed.cluster.pid).children(recursive=True)
    (front,) = [child.pid for child in children if "".join(child.cmdline()).startswith("ray::ServeReplica:redraft:front")]
    os.kill(front, signal.SIGKILL)
    reasons = []
    with pytest.raises((openai.OpenAIError, httpx.HTTPError)):
        reasons.extend(chunk.choices[0].finish_reason for chunk in stream)
    assert set(reasons) <= {None}
    assert tiny.wait_until(lambda: deployed.http.get("/health").status_code == 200)
    assert deployed.client.completions.create(**STORY).choices[0].finish_reason == "length"


def test_replicas_that_are_removed_finish_their_answers(deployed, alone, endless):
    for tokens in (700, 3000):  # on a fast machine short answers end before a replica is removed
        assert tiny.wait_until(lambda: len(deployed.replicas("tiny")) == 2)
        body = {**STORY, "seed": 3, "max_tokens": tokens, "logit_bias": endless}
        streams = [stream for _, stream in streams_on_both(deployed, body).values()]
        with ThreadPoolExecutor(3) as others:
            reading = [others.submit(collect, stream) for stream in streams]
            deploying = others.submit(deployed.deploy, replicas=1)
            assert tiny.wait_until(lambda: len(deployed.replicas("tiny")) == 1)
            were_writing = not any(each.done() for each in reading)  # one replica gets no more requests, and still writes
            texts = [each.result() for each in reading]
            deploying.result()
        assert texts == [(alone(body), ["length"])] * 2
        if were_writing:
            return
        deployed.deploy(replicas=2)
    raise AssertionError("both answers had ended when a replica was removed")


def test_replicas_follow_the_queue_and_no_request_is_cut(deployed):
    body = {"model": "b", "prompt": "ab", "max_tokens": 64, "seed": 3, "logit_bias": NO_END, "diffusion_max_steps": 24}
    enough = threading.Event()
    statuses = []

    def ask_again_and_again():
        while not enough.is_set():
            statuses.append(deployed.http.post("/v1/completions", json=body).status_code)

    clients = [threading.Thread(target=ask_again_and_again) for _ in range(6)]
    for client in clients:
        client.start()
    grown = tiny.wait_until(lambda: len(deployed.replicas("b")) == 2 or time.sleep(0.2), 600)
    enough.set()
    for client in clients:
        client.join()
    assert grown
    shrunk = False
    while not shrunk:  # a trickle of requests, while one replica leaves
        statuses.append(deployed.http.post("/v1/completions", json={**body, "max_tokens": 4}).status_code)
        shrunk = len(deployed.replicas("b")) == 1
        time.sleep(0.2)
    assert set(statuses) == {200}
