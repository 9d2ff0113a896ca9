"""Checked and exact mode on all wires: the tokens of `generate_verified`, honoured samplers, counts, streams, bad input."""

import json

import anthropic
import httpx
import ollama
import openai
import pytest
import tiny
from serving import NO_END, keep, make, served, user

from redraft.config import CHECKS
from redraft.diffusion.generate import Committed, Draft, Finished
from redraft.diffusion.verified import generate_verified
from redraft.tasks import best_of

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries
CALL = "say: <|channel>thought\nhm<channel|>I look, I do.<|tool_call>call:find{n:2}<tool_call|>"
TOOL = {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}
PROMPT = "Hello"


def writer_with(check):
    writer = make()
    writer.sampler = writer.sampler.changed(check=check, draft_length=3, draft_steps=2)
    return writer


WRITER = writer_with("off")


@pytest.fixture(scope="module")
def url():
    with served(WRITER, name="small") as address:
        yield address


@pytest.fixture(
    scope="module", params=["checked", *(pytest.param(check, marks=pytest.mark.soak) for check in ("off", "exact"))]
)
def by_default(request):
    """The address of a server whose checkpoint has this mode, and the mode."""
    with served(writer_with(request.param), name="small") as address:
        yield address, request.param


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def post(url, path, **body):
    return httpx.post(f"{url}{path}", json=body, timeout=600)


def expected(check, prompt=PROMPT, seed=7, max_new_tokens=24, **changes):
    """The answer of the plain loop: token ids without the stop token, and stats."""
    cfg = WRITER.sampler.changed(check=check, max_new_tokens=max_new_tokens, **changes)
    ids = WRITER.encode_prompt(prompt)
    *events, end = generate_verified(WRITER.model, ids, cfg, seed=seed, policy=tiny.engine_policy(cfg))
    assert isinstance(end, Finished)
    tokens = [token for event in events if isinstance(event, Committed) for token in event.ids_BC[0].tolist()]
    return [token for token in tokens if token not in cfg.eos_token_ids], end.stats[0]


# 1. The same tokens on every wire


@pytest.mark.parametrize("check", ["checked", "exact"])
def test_every_wire_gives_the_tokens_of_the_plain_loop(url, check):
    ids, stats = expected(check, temperature=0.8)
    text = WRITER.tokenizer.decode(ids)
    body = {"prompt": PROMPT, "seed": 7, "temperature": 0.8, "check": check}
    answer = post(url, "/v1/completions", **body, max_tokens=24).json()
    counts = {name: getattr(stats, name) for name in ("check", "rounds", "drafted", "accepted", "corrected")}
    assert answer["choices"][0]["text"] == text
    assert {name: answer["timings"][name] for name in counts} == counts
    assert answer["timings"]["diffusion_forwards"] == stats.forwards
    assert answer["timings"]["tokens_per_forward"] == pytest.approx(stats.tokens_per_forward, abs=1e-3)
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == stats.accepted
    assert details["rejected_prediction_tokens"] == stats.drafted - stats.accepted
    options = {"num_predict": 24, "seed": 7, "temperature": 0.8, "check": check}
    found = post(url, "/api/generate", prompt=PROMPT, raw=True, stream=False, options=options).json()
    assert found["response"] == text
    assert {name: found[name] for name in counts} == counts
    end = post(url, "/v1/canvas", **body, max_tokens=24, stream=False).json()["events"][-1]
    assert end["text"] == text
    assert {name: end["timings"][name] for name in counts} == counts
    messages = {"messages": user("x"), "max_tokens": 24, "seed": 7, "temperature": 0.8, "check": check}
    said = post(url, "/v1/messages", **messages).json()
    chat = post(url, "/v1/chat/completions", **messages).json()
    assert said["usage"]["check"] == chat["timings"]["check"] == check
    assert said["usage"]["drafted"] == chat["timings"]["drafted"] > 0
    assert said["content"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.soak
def test_the_checkpoints_mode_is_the_default_and_every_endpoint_works_under_it(by_default):
    url, check = by_default
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 24, "temperature": 0.5}
    answer = post(url, "/v1/completions", **body).json()
    assert answer["timings"]["check"] == check
    for other in CHECKS:
        assert post(url, "/v1/completions", **body, check=other).json()["timings"]["check"] == other
    if check != "off":
        assert answer["choices"][0]["text"] == WRITER.tokenizer.decode(expected(check, temperature=0.5)[0])
    chat = {"messages": user("say: ok then"), "max_tokens": 24}
    assert post(url, "/v1/chat/completions", **chat).json()["choices"][0]["message"]["content"] == "ok then"
    assert post(url, "/v1/messages", **chat).json()["content"][0]["text"] == "ok then"
    assert post(url, "/api/chat", messages=chat["messages"], stream=False).json()["message"]["content"] == "ok then"
    predicted = {"messages": user("x"), "prediction": {"type": "content", "content": "hello"}}
    assert post(url, "/v1/chat/completions", **predicted).status_code == 200
    for path, infill in (
        ("/infill", {"input_prefix": "a = ", "input_suffix": "\n"}),
        ("/v1/completions", {"prompt": "a = ", "suffix": "\n", "max_tokens": 4, "temperature": 0.5}),
        ("/v1/fim/completions", {"prompt": "a = ", "suffix": "\n", "max_tokens": 4}),
        ("/api/generate", {"prompt": "a = ", "suffix": "\n", "stream": False}),
    ):
        assert post(url, path, **infill).status_code == 200
        refused = post(url, path, **infill, **({"options": {"check": "exact"}} if "api" in path else {"check": "exact"}))
        assert (refused.status_code, "leave check out" in refused.text) == (400, True)
    for path, watched in (
        ("", {"prompt": "a", "seed": 1}),
        ("", {"prompt": "a", "seed": 1, "draft": "hello"}),
        ("", {"text": "ab [[ 3 ]] cd", "seed": 1, "temperature": 0.5}),
        ("", {"text": "ab [[ ]] cd", "seed": 1, "temperature": 0.5}),
        ("", {"prompt": "a", "seed": 1, "max_tokens": 32, "canvases": [[70] * 16]}),
        ("", {"prompt": "a", "seed": 1, "interventions": [{"block": 0, "step": 0, "pins": [{"position": 2, "text": "x"}]}]}),
        ("/edit", {"text": "some text that stays", "seed": 4, "temperature": 0.5}),
        ("/decide", {"prompt": "x", "choices": ["a", "b"]}),
        ("/autoregressive", {"prompt": "x", "max_tokens": 6}),
    ):
        found = post(url, f"/v1/canvas{path}", **watched, stream=False)
        assert found.status_code == 200, (path, watched, found.text)
        assert found.json()["events"][-1]["type"] == "end"


def test_a_chat_is_parsed_the_same_in_every_mode(by_default):
    """Reasoning, text and a tool call, whole and streamed, with the clients' own libraries."""
    url, check = by_default
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    body = {"model": "", "messages": user(CALL), "max_tokens": 96, "tools": [{"type": "function", "function": TOOL}]}
    whole = client.chat.completions.create(**body).choices[0]
    assert (whole.message.content, whole.message.reasoning_content) == ("I look, I do.", "hm")
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"n": 2}
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)]
    texts = [delta.content for delta in deltas if delta.content]
    assert "".join(texts) == "I look, I do."
    assert len(texts) >= (4 if check == "exact" else 1)  # exact mode sends the tokens of every round
    claude = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    tools = [{"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}]
    with claude.messages.stream(model="", max_tokens=96, messages=user(CALL), tools=tools) as stream:
        events = list(stream)
        last = stream.get_final_message()
    pieces = [event.delta.text for event in events if getattr(getattr(event, "delta", None), "type", "") == "text_delta"]
    assert [block.type for block in last.content] == ["thinking", "text", "tool_use"]
    assert "".join(pieces) == last.content[1].text == "I look, I do."
    assert len(pieces) >= (4 if check == "exact" else 1)
    assert [event.usage.check for event in events if event.type == "message_delta"] == [check]
    lines = list(keep(ollama.Client(host=url)).chat("small", user("say: one, two, three"), stream=True))
    assert "".join(line.message.content for line in lines) == "one, two, three"
    assert len(lines) >= (5 if check == "exact" else 2)


def test_a_stop_string_ends_the_stream_with_the_counts_so_far(by_default):
    url, check = by_default
    body = {"messages": user("say: one. two. three. four. five. six."), "max_tokens": 64, "stop": "ee."}
    whole = post(url, "/v1/chat/completions", **body).json()
    assert whole["choices"][0]["message"]["content"] == "one. two. thr"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 13
    timings = whole["timings"]
    assert timings["check"] == check
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=600) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "one. two. thr"
    if check == "off":
        assert (timings["rounds"], timings["drafted"]) == (0, 0)
        return
    unstopped = post(url, "/v1/chat/completions", **{**body, "stop": None}).json()["timings"]
    assert 0 < timings["rounds"] < unstopped["rounds"]
    assert 0 < timings["accepted"] <= timings["drafted"] < unstopped["drafted"]
    assert timings["diffusion_steps"] == (2 if check == "checked" else 0)


# 2. Samplers of the causal half


@pytest.mark.parametrize(
    ("field", "value", "setting"),
    [
        ("top_k", 3, {"top_k": 3}),
        ("top_k", -1, {}),
        ("top_p", 0.4, {"top_p": 0.4}),
        ("top_p", 0, {"temperature": 0}),
        ("min_p", 0.2, {"min_p": 0.2}),
        ("repetition_penalty", 1.8, {"repetition_penalty": 1.8}),
        ("repeat_penalty", 1.8, {"repetition_penalty": 1.8}),
        ("logit_bias", {"80": 9.0}, {"logit_bias": ((80, 9.0),)}),
        ("temperature", 0, {"temperature": 0}),
        ("tolerance", 0, {"tolerance": 0}),
    ],
)
def test_samplers_are_honoured_in_checked_and_exact_mode(url, field, value, setting):
    for check in ("checked", "exact"):
        body = {"prompt": PROMPT, "seed": 7, "max_tokens": 24, "temperature": 1.5, "check": check, field: value}
        answer = post(url, "/v1/completions", **body).json()
        ids, _ = expected(check, **{"temperature": 1.5, **setting})
        assert answer["choices"][0]["text"] == WRITER.tokenizer.decode(ids)
        has_warning = field == "tolerance" and check == "exact"
        assert ("warnings" in answer) == has_warning
    if field not in ("logit_bias", "temperature") and value != -1:
        warnings = post(url, "/v1/completions", **{**body, "check": "off"}).json()["warnings"]
        assert warnings == [f"{field} has no meaning for a canvas and was not applied"]


def test_other_wires_honour_samplers_too_and_name_what_they_ignore(url):
    ids, _ = expected("exact", temperature=1.5, top_k=3, repetition_penalty=1.5)
    text = WRITER.tokenizer.decode(ids)
    options = {"num_predict": 24, "seed": 7, "temperature": 1.5, "top_k": 3, "repeat_penalty": 1.5}
    body = {"prompt": PROMPT, "raw": True, "stream": False}
    found = post(url, "/api/generate", **body, options={**options, "check": "exact"})
    assert found.json()["response"] == text
    assert "x-redraft-unknown-fields" not in found.headers
    header = post(url, "/api/generate", **body, options=options).headers["x-redraft-unknown-fields"]
    assert header == "options.top_k, options.repeat_penalty"
    canvas = {"prompt": PROMPT, "seed": 7, "max_tokens": 24, "temperature": 1.5, "top_k": 3, "repetition_penalty": 1.5}
    assert post(url, "/v1/canvas", **canvas, check="exact", stream=False).json()["events"][-1]["text"] == text
    greedy = {"messages": user("x"), "max_tokens": 24, "top_k": 1, "check": "exact", "temperature": 1.5}
    one, two = (post(url, "/v1/messages", **greedy, seed=seed).json()["content"][0]["text"] for seed in (1, 2))
    assert one == two
    penalty = {**canvas, "check": "exact", "frequency_penalty": 0.5}
    assert "frequency_penalty" in post(url, "/v1/completions", **penalty).json()["warnings"][0]


def test_steps_of_checked_mode_draft_the_canvas(url):
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 16, "check": "checked", "temperature": 1.0}
    for steps in (1, 3):
        _, stats = expected("checked", max_new_tokens=16, draft_steps=steps, temperature=1.0)
        found = post(url, "/v1/completions", **body, diffusion_max_steps=steps).json()["timings"]
        assert found["diffusion_steps"] == stats.steps
        frames = post(url, "/v1/canvas", **body, max_steps=steps, stream=False).json()["events"]
        assert frames[-1]["timings"]["diffusion_steps"] == stats.steps


# 3. Best of


@pytest.mark.soak
def test_best_of_returns_the_likeliest_as_python_does(by_default):
    url, check = by_default
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    writer = writer_with(check)
    body = {"model": "", "prompt": PROMPT, "seed": 7, "max_tokens": 24, "temperature": 1.5}
    best = client.completions.create(**body, best_of=4)
    assert best.choices[0].text == writer.write(PROMPT, seed=7, max_tokens=24, temperature=1.5, best_of=4).text
    ranked = client.completions.create(**body, best_of=4, n=4).choices
    assert [choice.index for choice in ranked] == [0, 1, 2, 3]
    assert ranked[0].text == best.choices[0].text
    texts = {choice.text for choice in ranked}
    alone = {writer.write(PROMPT, seed=7 + at * 1_000_003, max_tokens=24, temperature=1.5).text for at in range(4)}
    assert texts == alone
    assert len(client.completions.create(**body, best_of=4, n=2).choices) == 2
    chat = post(url, "/v1/chat/completions", messages=user("x"), seed=7, max_tokens=16, best_of=3)
    assert len(chat.json()["choices"]) == 1
    stopped = post(url, "/v1/completions", **body, best_of=3, stop=best.choices[0].text[3])
    assert stopped.status_code == 200


def test_best_of_above_the_memory_budget_gets_a_sentence():
    writer = writer_with("exact")
    with served(writer) as url:
        fitting = best_of.count_fitting(writer.engine, len(PROMPT) + 1 + 24)
        writer.engine.scheduler.budget = writer.engine.scheduler.budget * 3 // max(fitting, 1)
        refused = post(url, "/v1/completions", prompt=PROMPT, max_tokens=24, best_of=16)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "best_of"
    assert "best_of is 16, but only" in refused.json()["error"]["message"]


# 4. Logprobs


@pytest.mark.parametrize("check", ["checked", "exact"])
def test_logprobs_are_those_of_the_causal_half(url, client, check):
    cfg = WRITER.sampler.changed(check=check, max_new_tokens=24, temperature=1.5)
    events = list(generate_verified(WRITER.model, WRITER.encode_prompt(PROMPT), cfg, seed=7))
    committed = [event for event in events if isinstance(event, Committed)]
    pairs = [pair for event in committed for pair in zip(event.ids_BC[0].tolist(), event.logprobs, strict=True)]
    pairs = [(token, logprob) for token, logprob in pairs if WRITER.tokenizer.bytes_of(token)]
    body = {"model": "", "prompt": PROMPT, "seed": 7, "max_tokens": 24, "temperature": 1.5, "logprobs": 3}
    for stream in (False, True):
        found = client.completions.create(**body, stream=stream, extra_body={"check": check})
        parts = [chunk.choices[0] for chunk in found] if stream else found.choices
        tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens]
        logprobs = [logprob for part in parts if part.logprobs for logprob in part.logprobs.token_logprobs]
        assert tokens == [WRITER.tokenizer.token_text(token) for token, _ in pairs]
        assert logprobs == pytest.approx([logprob for _, logprob in pairs], abs=1e-3)
        tops = [top for part in parts if part.logprobs for top in part.logprobs.top_logprobs]
        assert all(1 <= len(top) <= 3 for top in tops)
    options = {"num_predict": 24, "seed": 7, "temperature": 1.5, "check": check}
    told = keep(ollama.Client(host=url)).generate("small", PROMPT, raw=True, logprobs=True, top_logprobs=2, options=options)
    assert [entry.logprob for entry in told.logprobs] == pytest.approx([logprob for _, logprob in pairs], abs=1e-3)


def test_logprobs_spell_the_text_behind_reasoning_and_before_a_stop_string(by_default):
    url, _ = by_default
    for said, text in {
        "say: <|channel>thought\nho ok<channel|>o, ok then": "o, ok then",
        "say: <|channel>thought\n<channel|>thus": "thus",
        "say: abcdefgh opqr": "abcdefgh ",
    }.items():
        for stream in (False, True):
            body = {
                "messages": user(said),
                "seed": 1,
                "logprobs": True,
                "stop": ["opqr"],
                "max_tokens": 48,
                "stream": stream,
            }
            lines = post(url, "/v1/chat/completions", **body).text.removeprefix("data: ").split("\n\ndata: ")
            choices = [json.loads(line)["choices"][0] for line in lines if line.startswith("{")]
            spelled = [entry["token"] for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])]
            assert "".join(spelled) == text, (said, stream)


# 5. The canvas


def test_frames_of_checked_mode_carry_the_cursor(url):
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 32, "temperature": 1.0, "check": "checked", "forbidden": [1, 5]}
    begin, *events = post(url, "/v1/canvas", **body, stream=False).json()["events"]
    assert (begin["check"], begin["max_steps"], begin["canvas_length"]) == ("checked", 2, 16)
    frames = [event for event in events if event["type"] == "frame" and event["block"] == 0]
    assert [frame["verified"] for frame in frames[:2]] == [None, None]
    cursors = [frame["verified"] for frame in frames[2:]]
    assert cursors == sorted(cursors)
    assert cursors[-1] == 16
    tokens = {}
    for frame in frames:
        tokens |= {token["i"]: token for token in frame["tokens"]}
        if frame["verified"] is not None:
            assert [tokens[at]["s"] for at in range(16)] == ["v"] * frame["verified"] + ["d"] * (16 - frame["verified"])
            assert all(tokens[at]["c"][0][0] == tokens[at]["id"] for at in range(16))
    canvas = next(event for event in events if event["type"] == "canvas")
    assert [tokens[at]["id"] for at in range(16)] == canvas["ids"]
    assert all(0 <= p <= 1 for p in canvas["probabilities"])
    assert [len(candidates) for candidates in canvas["candidates"]] == [5] * 16
    chunks = post(url, "/v1/completions", **{**body, "logit_bias": NO_END}, stream=True, diffusing=True).text.split("\n\n")
    shown = [json.loads(chunk[6:]) for chunk in chunks if "diffusion_frame" in chunk]
    assert [frame["verified"] for frame in shown if frame["block"] == 0] == [None, None, *cursors]
    drafts = WRITER.stream(
        PROMPT, seed=7, max_tokens=32, temperature=1.0, check="checked", logit_bias=((1, -100), (5, -100))
    )
    assert len([event for event in drafts if isinstance(event, Draft)]) == len([e for e in events if e["type"] == "frame"])


def test_frames_of_exact_mode_add_up_to_canvases_that_can_be_resumed(url):
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 40, "temperature": 1.0, "forbidden": [1, 5]}
    begin, *events, end = post(url, "/v1/canvas", **body, check="exact", stream=False).json()["events"]
    assert begin["check"] == "exact"
    canvases = [event for event in events if event["type"] == "canvas"]
    assert [len(canvas["ids"]) for canvas in canvases] == [16, 16, 8]
    assert "".join(canvas["text"] for canvas in canvases) == end["text"]
    tokens = {}
    for frame in events:
        if frame["type"] == "frame":
            tokens |= {(frame["block"], token["i"]): token for token in frame["tokens"]}
            assert all(token["s"] == "v" and 0 <= token["p"] <= 1 and len(token["c"]) == 5 for token in frame["tokens"])
    assert [tokens[place]["id"] for place in sorted(tokens)] == [token for canvas in canvases for token in canvas["ids"]]
    pins = [{"position": 17, "text": "Q"}]
    steered = {**body, "canvases": [canvases[0]["ids"]], "interventions": [{"block": 1, "step": 0, "pins": pins}]}
    begin, *events, end = post(url, "/v1/canvas", **steered, check="off", stream=False).json()["events"]
    assert begin["check"] == "off"
    assert next(event for event in events if event["type"] == "canvas")["texts"][1] == "Q"


def test_pins_hold_in_every_mode(by_default):
    url, check = by_default
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 16, "pins": [{"position": 3, "text": "xyz"}], "stream": False}
    begin, *events = post(url, "/v1/canvas", **body).json()["events"]
    canvas = next(event for event in events if event["type"] == "canvas")
    assert (begin["check"], canvas["texts"][3:6]) == (check, ["x", "y", "z"])


def test_autoregressive_equals_exact_mode_without_drafts(by_default):
    url, check = by_default
    literal = 0.5 if check != "off" else 0.5 * WRITER.sampler.t_min
    ids, stats = expected("exact", temperature=literal, draft_length=0)
    body = {"prompt": PROMPT, "seed": 7, "max_tokens": 24, "temperature": 0.5, "stream": False}
    *events, end = post(url, "/v1/canvas/autoregressive", **body).json()["events"]
    tokens = [event["id"] for event in events if event["type"] == "token"]
    assert tokens[: len(ids)] == ids
    assert len(tokens) == stats.new_tokens == end["timings"]["diffusion_forwards"]
    assert end["text"] == WRITER.tokenizer.decode(ids)
    long = {**body, "prompt": "a" * 400, "max_tokens": 105}  # together they fill the context, which canvases would exceed
    assert post(url, "/v1/canvas/autoregressive", **long).status_code == 200


# 6. Bad input


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a", "check": "maybe"}, "check", "'off', 'checked' or 'exact'"),
        ("/v1/completions", {"prompt": "a", "tolerance": -1}, "tolerance", "greater than or equal to 0"),
        ("/v1/chat/completions", {"messages": user("a"), "check": 1}, "check", "'exact'"),
        ("/v1/chat/completions", {"messages": user("a"), "top_p": 1.5}, "top_p", "less than or equal to 1"),
        ("/v1/chat/completions", {"messages": user("a"), "min_p": -0.1}, "min_p", "greater than or equal to 0"),
        ("/v1/chat/completions", {"messages": user("a"), "repetition_penalty": 0}, "repetition_penalty", "0.01"),
        ("/v1/completions", {"prompt": "a", "check": "exact", "logit_bias": {"9999": 1}}, None, "outside the vocabulary"),
        ("/v1/completions", {"prompt": "a", "check": "exact", "logit_bias": {"7": 101}}, "logit_bias", "from -100 to 100"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"7": -100, "07": -100}}, "logit_bias", "token 7 twice"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"7": 5}}, "logit_bias", "only forbid a token"),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "n": 3}, "best_of", "at least n"),
        ("/v1/completions", {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ("/v1/completions", {"prompt": "a", "best_of": 65}, "best_of", "less than or equal to 64"),
        (
            "/v1/chat/completions",
            {"messages": user("a"), "check": "exact", "prediction": {"content": "b"}},
            None,
            "takes no draft",
        ),
        (
            "/v1/canvas",
            {"prompt": "a", "check": "checked", "interventions": [{"block": 0, "step": 0}]},
            None,
            "needs check 'off'",
        ),
        (
            "/v1/canvas",
            {"prompt": "a", "max_tokens": 32, "check": "exact", "canvases": [[70] * 16]},
            None,
            "needs check 'off'",
        ),
        ("/v1/canvas", {"text": "a [[ 2 ]]", "check": "exact"}, "check", "leave check out"),
        ("/v1/canvas", {"prompt": "a", "tolerance": "x"}, "tolerance", "valid number"),
    ],
)
def test_bad_values_get_one_sentence_that_names_the_field(url, path, body, param, words):
    refused = post(url, path, **body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


def test_bad_values_on_the_wires_without_a_param(url):
    assert "options.check" in post(url, "/api/generate", prompt="a", options={"check": "maybe"}).json()["error"]
    refused = post(url, "/v1/messages", messages=user("a"), max_tokens=4, check="maybe").json()["error"]["message"]
    assert refused.startswith("check: ")
    assert "leave check out" in post(url, "/infill", input_prefix="a", check="checked").text
