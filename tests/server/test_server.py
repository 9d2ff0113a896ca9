"""The server with the clients people use: their own libraries, and requests as editors send them."""

import json

import anthropic
import httpx
import ollama
import openai
import pytest
import tiny
from serving import NO_END, keep, make, served, user

from redraft.model.quant import quantize_fp8
from redraft.server import fim, infill
from redraft.server.infill import trim_infill
from redraft.server.model_card import parameter_count
from redraft.server.stop_strings import StopStringFilter

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}}, "required": ["n", "ok"]}
TOOL = {"name": "find", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def url():
    with served(make(), name="small", aliases={"mercury-coder-local": "small"}) as address:
        yield address


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=600) as client:
        yield client


# 1. Libraries


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_chats_whole_and_streamed(client):
    asked = {
        "model": "",
        "messages": user("say: Hi there, who are you?"),
        "seed": 3,
        "max_tokens": 64,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "Hi there, who are you?"
    assert (whole.choices[0].finish_reason, whole.model, whole.object) == ("stop", "small", "chat.completion")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    parts = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(bool(text) for text in texts) == 2  # canvases of 16 tokens
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "stop"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_gets_reasoning_and_tool_calls(client):
    said = 'say: <|channel>thought\nhm<channel|>I look.<|tool_call>call:find{what:<|"|>ö<|"|>}<tool_call|>'
    asked = {
        "model": "",
        "messages": user(said),
        "max_tokens": 96,
        "tools": [{"type": "function", "function": TOOL}],
    }
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"what": "ö"})
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("I look.", "tool_calls")
    assert whole.choices[0].message.reasoning_content == "hm"
    parts = [part.choices[0].delta for part in client.chat.completions.create(**asked, stream=True)]
    (call,) = [call for part in parts for call in part.tool_calls or ()]
    assert (call.index, call.function.name) == (0, "find")
    assert "".join(getattr(part, "reasoning_content", "") or "" for part in parts) == "hm"
    told = [
        {"role": "user", "content": "say: ok"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
        {"role": "user", "content": "say: well"},
    ]
    assert client.chat.completions.create(model="", messages=told).choices[0].message.content == "well"


def test_openai_response_formats_are_matched(client):
    ask = lambda wanted, **more: client.chat.completions.create(  # noqa: E731
        model="", messages=user("x"), max_tokens=48, response_format=wanted, **more
    )
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    found = json.loads(ask(wanted).choices[0].message.content)
    assert set(found) == {"n", "ok"}
    assert isinstance(json.loads(ask({"type": "json_object"}).choices[0].message.content), dict)
    several = ask({"type": "choice", "choices": ["yes", "no"]}, n=3, seed=1)
    assert {choice.message.content for choice in several.choices} <= {"yes", "no"}
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert ask({"type": "regex", "regex": "[0-9]{3}"}).choices[0].message.content.isdigit()


def test_openai_completes_and_infills(client):
    whole = client.completions.create(model="", prompt=["ab", "cd"], max_tokens=4, seed=1, echo=True)
    assert [choice.text[:2] for choice in whole.choices] == ["ab", "cd"]
    again = client.completions.create(model="", prompt="ab", max_tokens=4, seed=1)
    assert whole.choices[0].text == "ab" + again.choices[0].text  # the same alone
    filled = client.completions.create(model="", prompt="ab", suffix="yz", max_tokens=4, seed=1)
    assert filled.usage.prompt_tokens == 4
    assert filled.choices[0].finish_reason == "stop"


def test_openai_raises_on_unsupported_options(client):
    with pytest.raises(openai.BadRequestError, match="top_logprobs come with logprobs"):
        client.chat.completions.create(model="", messages=user("x"), top_logprobs=3)
    with pytest.raises(openai.BadRequestError, match="leave tools and thinking out"):
        client.chat.completions.create(model="", messages=user("x"), logprobs=True, reasoning_effort="high")
    with pytest.raises(openai.BadRequestError, match="leave echo out"):
        client.completions.create(model="", prompt="x", logprobs=1, echo=True)
    with pytest.raises(openai.BadRequestError, match="infill does not support logprobs"):
        client.completions.create(model="", prompt="x", suffix="y", logprobs=0)
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        client.chat.completions.create(model="", messages=user("x"), tool_choice="required")
    with pytest.raises(openai.BadRequestError, match=r"does not fit|max_tokens|context"):
        client.chat.completions.create(model="", messages=user("x"), max_tokens=100_000, stream=True)
    picture = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="takes no images: send text only"):
        client.chat.completions.create(model="", messages=user(picture))
    with pytest.raises(openai.NotFoundError, match="there is no /v1/embeddings here"):
        client.embeddings.create(model="", input="x")


def test_logit_bias_temperature_stop_and_prediction(http):
    body = {"prompt": "ab", "max_tokens": 16, "seed": 1, "temperature": 0}
    cold = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == cold
    warm = http.post("/v1/completions", json={**body, "temperature": 2}).json()["choices"][0]["text"]
    assert warm != cold
    letter = next(one for one in cold if one.isalnum() and one.isascii())
    (token,) = tiny.byte_tokenizer().encode(letter)
    banned = http.post("/v1/completions", json={**body, "logit_bias": {str(token): -100}}).json()
    assert letter not in banned["choices"][0]["text"]
    refused = http.post("/v1/completions", json={**body, "logit_bias": {str(token): 5}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
    said = {"messages": user("say: one. two. three. four."), "max_tokens": 64, "stop": "ee."}
    stopped = http.post("/v1/chat/completions", json=said).json()
    assert stopped["choices"][0]["message"]["content"] == "one. two. thr"
    assert stopped["usage"]["completion_tokens"] == 13
    drafted = {
        "messages": user("x"),
        "prediction": {"type": "content", "content": "hello"},
        "top_p": 0.5,
    }
    found = http.post("/v1/chat/completions", json={**drafted, "seed": 5}).json()
    plain = http.post("/v1/chat/completions", json={"messages": user("x"), "seed": 5}).json()
    assert found["choices"][0]["message"] != plain["choices"][0]["message"]
    assert found["warnings"] == ["top_p has no meaning for a canvas and was not applied"]


def test_canvas_options_under_vllms_names(http):
    """A seeded and pinned canvas; the same options inside vllm_xargs; unsupported options are a bad request."""
    ids = tiny.byte_tokenizer().encode("hello world")
    canvas = {"diffusion_canvas_length": 11, "diffusion_seed_canvas": ids, "diffusion_pinned": [0, 1, 2, 3, 4]}
    asked = {"prompt": "x", "max_tokens": 40, "seed": 1, "diffusion_read_only": True}
    found = http.post("/v1/completions", json={**asked, **canvas}).json()["choices"][0]
    assert (found["text"][:5], found["finish_reason"]) == ("hello", "length")
    assert http.post("/v1/completions", json={**asked, **canvas}).json()["usage"]["completion_tokens"] == 11
    assert http.post("/v1/completions", json={**asked, "vllm_xargs": canvas}).json()["choices"][0] == found
    for odd in (
        {"diffusion_pinned": [40]},
        {"diffusion_constrained": 1},
        {"diffusion_seed_canvas": [10**9] * 11},
        {"diffusion_seed_canvas": [7]},
    ):
        assert http.post("/v1/completions", json={**asked, **canvas, **odd}).status_code == 400
    odd = http.post("/v1/completions", json={**asked, "vllm_xargs": {"diffusion_max_steps": 0}})
    assert odd.json()["error"]["param"] == "vllm_xargs.diffusion_max_steps"


def test_frames_hold_the_tokens_that_changed(http):
    body = {"messages": user("say: abcdefgh"), "stream": True, "diffusing": True, "seed": 2}
    lines = [line for line in http.post("/v1/chat/completions", json=body).text.split("\n") if line]
    assert lines[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    frames = [part for part in parts if part.get("type") == "diffusion_frame"]
    assert [frame["step"] for frame in frames] == list(range(1, len(frames) + 1))
    canvas: dict[int, str] = {}
    for frame in frames:
        assert frame["choices"][0]["delta"] == {}
        canvas |= {token["i"]: token["t"] for token in frame["tokens"]}
    assert "".join(canvas[at] for at in range(8)) == "abcdefgh"
    assert len(frames[0]["tokens"]) == 16 > len(frames[-1]["tokens"])


def test_anthropic_messages_whole_and_streamed(url):
    client = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    said = "say: <|channel>thought\nhm<channel|>I look.<|tool_call>call:find{n:2}<tool_call|>"
    tools = [{"name": "find", "description": "Finds.", "input_schema": {"type": "object"}}]
    asked = {
        "model": "",
        "max_tokens": 96,
        "system": "Be brief.",
        "messages": user(said),
        "tools": tools,
    }
    whole = client.messages.create(**asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert (whole.content[1].text, whole.content[2].input, whole.stop_reason) == ("I look.", {"n": 2}, "tool_use")
    assert (whole.type, whole.role, whole.usage.output_tokens > 0) == ("message", "assistant", True)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in last.content] == ["thinking", "text", "tool_use"]
    assert (last.content[1].text, last.content[2].input) == ("I look.", {"n": 2})
    results = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "find", "input": {}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "3"},
                {"type": "text", "text": "say: three."},
            ],
        },
    ]
    found = client.messages.create(model="", max_tokens=32, messages=[*asked["messages"], *results], stop_sequences=["e."])
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("thre", "stop_sequence", "e.")
    assert client.messages.count_tokens(model="", messages=asked["messages"]).input_tokens > 10
    with pytest.raises(anthropic.BadRequestError, match="an image of type 'image' needs its file"):
        client.messages.create(model="", max_tokens=1, messages=[{"role": "user", "content": [{"type": "image"}]}])


def test_ollama_generates_and_chats(url):
    client = keep(ollama.Client(host=url))
    said = user("say: Hi there, who are you?")
    whole = client.chat(model="small", messages=said, options={"num_predict": 64})
    assert (whole.message.content, whole.done, whole.done_reason) == ("Hi there, who are you?", True, "stop")
    parts = list(client.chat(model="small", messages=said, stream=True, options={"num_predict": 64}))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts][-2:] == [False, True]
    call = "say: I look.<|tool_call>call:find{n:2}<tool_call|>"
    found = client.chat(
        model="small",
        messages=user(call),
        tools=[{"type": "function", "function": TOOL}],
        options={"num_predict": 64},
    )
    assert found.message.tool_calls[0].function.arguments == {"n": 2}
    record = client.chat(model="small", messages=user("x"), format=SCHEMA, options={"num_predict": 48})
    assert set(json.loads(record.message.content)) == {"n", "ok"}
    assert client.generate(model="small", prompt="ab", suffix="yz", options={"num_predict": 4, "seed": 1}).done
    assert client.list().models[0].model == "small"
    assert ".Suffix" in client.show("small").template
    assert client.ps().models[0].name == "small"
    told = client.chat("small", user("say: ab"), logprobs=True, top_logprobs=2)
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in told.logprobs] == [("a", 0, 2), ("b", 0, 2)]
    streamed = list(client.chat("small", user("say: ab"), logprobs=True, stream=True))
    assert [one.token for part in streamed for one in part.logprobs or []] == ["a", "b"]
    assert client.chat("small", user("say: ab")).logprobs is None
    with pytest.raises(ollama.ResponseError, match="takes no images: send text only"):
        client.generate(model="small", prompt="x", images=["aGk="])


# 2. Editors, as they send it


def test_llama_vim(http):
    fields = ["content", "timings/prompt_n", "timings/predicted_n", "timings/predicted_ms", "truncated", "tokens_cached"]
    warm = http.post(
        "/infill", json={"id_slot": 0, "n_predict": 0, "input_prefix": "", "input_suffix": "", "response_fields": [""]}
    )
    assert warm.status_code == 200
    body = {
        "id_slot": 0, "input_prefix": "def f():\n", "input_suffix": "\n    return x\n", "prompt": "    x = ",
        "input_extra": [{"filename": "a.py", "text": "y = 1", "time": 3}], "n_indent": 4, "top_k": 40, "top_p": 0.9,
        "n_predict": 16, "stop": [], "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "stream": False,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 250, "response_fields": fields, "model": "",
    }  # fmt: skip
    raw = http.post("/infill", json=body)
    assert '"content":"' in raw.text  # llama.vim looks for it without a space
    assert set(raw.json()) == set(fields)


def test_llama_vscode(http):
    body = {
        "input_prefix": "a = 1\n",
        "input_suffix": "\nc = 3\n",
        "prompt": "b = ",
        "n_predict": 8,
        "top_p": 0.99,
        "n_cmpl": 3,
        "stream": False,
    }
    found = http.post("/infill", json=body).json()
    assert 1 <= len(found) <= 3
    assert {"prompt_n", "predicted_per_second"} <= set(found[0]["timings"])
    assert len({one["content"] for one in found}) == len(found)
    assert isinstance(http.post("/infill", json={**body, "n_cmpl": 1}).json()["content"], str)
    assert http.get("/props").json()["default_generation_settings"]["n_ctx"] == 512


@pytest.mark.parametrize(
    "prompt",
    [
        "<|file_sep|>b.py\nz = 0\n<|fim_prefix|>a = <|fim_suffix|>\nc = 3<|fim_middle|>",
        "<fim_prefix>a = <fim_suffix>\nc = 3<fim_middle>",
        "<PRE> a =  <SUF>\nc = 3 <MID>",
        "<｜fim▁begin｜>a = <｜fim▁hole｜>\nc = 3<｜fim▁end｜>",
        "[SUFFIX]\nc = 3[PREFIX]a = ",
        "<PRE> <SUF>\nc = 3 <MID> a = ",
        "<|code_prefix|>a = <|code_suffix|>\nc = 3<|code_middle|>",
    ],
)
def test_zed_marks_the_gap_in_the_prompt(http, prompt):
    gap = fim.find_gap(prompt)
    assert (gap.prefix.rstrip(), gap.suffix) == ("a =", "\nc = 3")
    found = http.post(
        "/v1/completions", json={"model": "small", "prompt": prompt, "max_tokens": 8, "stop": ["<|fim_middle|>"]}
    ).json()
    assert {"id", "object", "created", "model", "choices", "usage"} <= set(found)
    assert set(found["usage"]) >= {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert fim.find_gap("just text") is None


def test_continue_and_minuet(http):
    body = {"model": "small", "prompt": "a = ", "suffix": "\nc = 3", "max_tokens": 8, "stream": True, "stop": ["\n\n"]}
    for path in ("/v1/fim/completions", "/v1/completions"):
        lines = http.post(path, json=body).text.split("\n\n")
        part = json.loads(lines[0].removeprefix("data: "))
        assert part["choices"][0]["delta"]["content"] == part["choices"][0]["text"]
        assert lines[-2] == "data: [DONE]"
    blank = http.post("/v1/completions", json={**body, "suffix": "<|endoftext|>", "stream": False}).json()
    assert "delta" not in blank["choices"][0]  # there is no suffix: the text is continued
    assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["small"]


def test_an_infill_echoes_its_prefix_once_in_each_choice_and_no_long_one(http):
    body = {"prompt": "a = ", "suffix": "\nc = 3", "max_tokens": 4, "n": 2, "echo": True}
    for choice in http.post("/v1/completions", json=body).json()["choices"]:
        assert choice["text"] == "a = " + choice["delta"]["content"]
        assert choice["message"]["content"] == choice["delta"]["content"]
    refused = http.post("/v1/completions", json={**body, "prompt": "a" * 200_000, "n": 6})
    assert refused.status_code == 400
    message = "echo would repeat 1,200,000 characters, at most 1,048,576 are: leave it out, or ask for fewer choices"
    assert refused.json()["error"]["message"] == message


def test_an_edit_of_a_long_file_keeps_the_text_nearest_to_the_region(http):
    far, region = "# far\n" * 400, "a = 1\nb = 2"
    file = f"current_file_path: a.py\n{far}near()\n<|code_to_edit|>\n{region}\n<|/code_to_edit|>\nbelow()\n{far}"
    body = {"messages": user(f"<|current_file_content|>\n{file}<|/current_file_content|>")}
    found = http.post("/v1/edit/completions", json=body)
    assert "x-redraft-unknown-fields" not in found.headers
    assert found.json()["choices"][0]["message"]["content"].startswith("```\n")
    settings = {"temperature": 0.5, "seed": 1, "max_tokens": 2}  # of which a repair has no use
    same = http.post("/v1/edit/completions", json=body | settings)
    assert same.headers["x-redraft-unknown-fields"] == "temperature, seed, max_tokens"
    assert same.json()["choices"] == found.json()["choices"]
    before, after = infill.surrounding_text(make(), fim.find_region(body["messages"][0]["content"]))
    assert before.endswith("near()\n")
    assert after.startswith("\nbelow()")
    assert 300 < len(before + region + after) < tiny.BASE.max_position_embeddings


def test_a_region_beyond_the_context_is_refused_before_the_file_around_it_is_tokenized(monkeypatch):
    writer = make()
    lengths = []
    encode = writer.tokenizer.encode
    monkeypatch.setattr(writer.tokenizer, "encode", lambda text, *rest: lengths.append(len(text)) or encode(text, *rest))
    with pytest.raises(ValueError, match=r"the text has 600 tokens after a prompt of 1.*take it in parts"):
        infill.surrounding_text(writer, fim.Region("x" * 600, "y" * 2000, "z" * 2000, ""))
    assert lengths == [600]


def test_unknown_fields_are_named_in_a_header(http):
    ollama = {"prompt": "a", "stream": False, "template": "x", "options": {"top_k": 3, "num_predict": 2}}
    assert http.post("/api/generate", json=ollama).headers["x-redraft-unknown-fields"] == "template, options.top_k"
    anthropic = {"messages": user("a"), "max_tokens": 2, "top_p": 0.5, "bad\r\nname": 1}
    assert http.post("/v1/messages", json=anthropic).headers["x-redraft-unknown-fields"] == "bad??name, top_p"
    assert "x-redraft-unknown-fields" not in http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).headers


def test_continue_edits(http):
    region = "def f(b<|cursor|>):\n    return a"
    file = f"current_file_path: a.py\nimport os\n<|code_to_edit|>\n{region}\n<|/code_to_edit|>\nf(1)\n"
    prompt = (
        f"<|current_file_content|>\n{file}<|/current_file_content|>\n<|edit_diff_history|>\n-x\n+y\n<|/edit_diff_history|>"
    )
    body = {
        "model": "mercury-coder-local",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": prompt}],
    }
    found = http.post("/v1/edit/completions", json=body).json()["choices"][0]["message"]["content"]
    assert found.startswith("```\n")
    assert found.endswith("\n```")
    region_found = fim.find_region(prompt)
    assert (region_found.text, region_found.prefix, region_found.suffix) == (
        "def f(b):\n    return a",
        "import os\n",
        "\nf(1)\n",
    )
    assert region_found.context == "-x\n+y\n"
    file = "<|current_file_content|>\ncurrent_file_path: a\nx\ny\nz\n<|/current_file_content|>"
    apart = f"{file}\n<|code_to_edit|>\ny\n<|/code_to_edit|>"
    assert fim.find_region(apart) == fim.Region("y", "x\n", "\nz\n", "")
    assert http.post("/v1/edit/completions", json={"messages": user("x")}).status_code == 400


def test_infill_is_trimmed_for_editors():
    assert trim_infill("x\n\ny", (), 0, True) == "x"
    assert trim_infill("\n\ny", (), 0, True) == "\n\ny"
    assert trim_infill("x\n    y\nz", (), 4, False) == "x\n    y"
    cut = StopStringFilter(["END", "\n\n"])
    assert [cut.feed(text) for text in ("abE", "Nx", "yEN", "Dz", "more")] == ["ab", "ENx", "y", "", ""]
    assert cut.found == "END"


def test_metrics_count(http):
    def completion_tokens() -> float:
        lines = http.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith('redraft_tokens_total{kind="completion",')))

    before = completion_tokens()
    http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 4, "logit_bias": NO_END})
    assert completion_tokens() == before + 4
    assert 'redraft_requests_total{route="/v1/completions",status="200"}' in http.get("/metrics").text


def test_unsupported_options_are_a_bad_request_that_names_them(http):
    chat, text = {"messages": user("x")}, {"prompt": "x", "suffix": "y"}
    asked = [
        ("/v1/chat/completions", {**chat, "functions": [{}]}, "functions is not supported"),
        ("/v1/chat/completions", {**chat, "guided_grammar": "g"}, "guided_grammar is not supported"),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "choice", "choices": 5}}, "choices must be a list"),
        ("/v1/chat/completions", {**chat, "vllm_xargs": {"odd": 1}}, "'odd'"),
        ("/v1/completions", {"prompt": "x", "best_of": 3, "stream": True}, "cannot be streamed"),
        ("/v1/completions", {**text, "best_of": 2}, "leave best_of out"),
        ("/v1/completions", {**text, "logit_bias": {"7": -100}}, "infill does not support logit_bias"),
        ("/v1/completions", {**text, "diffusing": True}, "infill does not support frames"),
        ("/v1/completions", {"prompt": ["x"] * 40, "n": 4}, "160 completions in one request"),
        ("/api/generate", {**text, "format": "json"}, "infill supports neither format"),
    ]
    for path, body, words in asked:
        refused = http.post(path, json=body)
        assert (refused.status_code, words in refused.text) == (400, True), (path, body, refused.text)
    capped = http.post("/v1/completions", json={**text, "max_tokens": 500, "temperature": 1}).json()
    assert capped["warnings"] == ["infill has at most 64 tokens, max_tokens was 500"]


def test_ollama_counts_weights_in_fp8(http):
    plain = make()
    packed = make()
    packed.model = quantize_fp8(packed.model)
    assert parameter_count(packed.model) == parameter_count(plain.model)
    plain_details = http.get("/api/tags").json()["models"][0]
    with served(packed) as url:
        listed = httpx.get(f"{url}/api/tags").json()["models"][0]
        shown = httpx.post(f"{url}/api/show", json={}).json()["details"]
    assert listed["details"] == shown
    assert shown["parameter_size"] == plain_details["details"]["parameter_size"] != "0.0M"
    assert shown["quantization_level"] == "fp8"
    assert (
        0.25 * plain_details["size"] < listed["size"] < plain_details["size"]
    )  # float32 against fp8 and float32 embeddings
