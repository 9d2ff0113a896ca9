"""Images over the wires: the answers of every wire format equal those of Writer.chat; hostile ones get one sentence."""

import base64
import json
import shutil
import socket
import struct
import threading
import zlib

import anthropic
import httpx
import llama_models
import ollama
import openai
import pytest
import tiny
import vision_models
from serving import keep, served
from tiny import wait_until

import redraft
from redraft.checkpoint.vision_check import find_image_config
from redraft.server.completion import join_messages
from redraft.server.errors import BadRequestError
from redraft.server.images import MAX_IMAGES
from redraft.server.model_card import ModelCard, image_config_of
from redraft.tokenizer import images as tokenizer_images
from redraft.tokenizer.helper_process import HelperStoppedError

pytestmark = pytest.mark.filterwarnings("ignore")  # from the clients' own libraries

QUESTION = "What is this?"
SEED, TOKENS = 9, 32
LANDSCAPE = vision_models.FILES["landscape"]()
ROTATED = vision_models.FILES["EXIF 6"]()
PICTURES = [LANDSCAPE, ROTATED]


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    return vision_models.published(tmp_path_factory.mktemp("published"))


def load(folder):
    """A Writer whose canvases take few steps."""
    writer = redraft.load(folder, device="cpu")
    writer.sampler = writer.sampler.changed(max_steps=4, entropy_bound=1.0)
    return writer


@pytest.fixture(name="url", scope="module")
def _url(folder):
    with served(load(folder), name="eyes") as address:
        yield address


@pytest.fixture(name="answer", scope="module")
def _answer(folder):
    """What Writer.chat answers: two images, then the text."""
    parts = [{"type": "image", "image": data} for data in PICTURES]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    return load(folder).chat(messages, seed=SEED, max_tokens=TOKENS)


def post(url, path, **body):
    return httpx.post(url + path, json=body, timeout=600)


# 1. The same answers


def chat_content(kind="image/png") -> list[dict]:
    urls = [vision_models.data_url(data, kind) for data in PICTURES]
    parts = [{"type": "image_url", "image_url": {"url": urls[0], "detail": "low"}}]
    parts.append({"type": "image_url", "image_url": urls[1]})  # as some clients send it
    return [*parts, {"type": "text", "text": QUESTION}]


def blocks() -> list[dict]:
    sources = [{"type": "base64", "media_type": "image/png", "data": base64_of(data)} for data in PICTURES]
    return [*({"type": "image", "source": source} for source in sources), {"type": "text", "text": QUESTION}]


def ask_openai(url, stream):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    options = {"model": "", "seed": SEED, "max_tokens": TOKENS}
    asked = {"messages": [{"role": "user", "content": chat_content()}], **options}
    if not stream:
        whole = client.chat.completions.create(**asked)
        return whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    usage = chunks[-1].usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return text, usage.prompt_tokens, usage.completion_tokens


def ask_responses(url, stream):
    client = keep(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    parts = [{"type": "input_image", "image_url": vision_models.data_url(data), "detail": "auto"} for data in PICTURES]
    asked = [{"role": "user", "content": [*parts, {"type": "input_text", "text": QUESTION}]}]
    options = {"model": "", "max_output_tokens": TOKENS, "extra_body": {"seed": SEED}}
    response = client.responses.create(input=asked, stream=stream, **options)
    if stream:
        response = list(response)[-1].response
    return response.output_text, response.usage.input_tokens, response.usage.output_tokens


def ask_anthropic(url, stream):
    client = keep(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    asked = {"model": "", "messages": [{"role": "user", "content": blocks()}], "max_tokens": TOKENS}
    if not stream:
        message = client.messages.create(**asked, extra_body={"seed": SEED})
    else:
        with client.messages.stream(**asked, extra_body={"seed": SEED}) as events:
            message = events.get_final_message()
    return "".join(block.text for block in message.content), message.usage.input_tokens, message.usage.output_tokens


def ask_ollama_chat(url, stream):
    client = keep(ollama.Client(host=url))
    message = {"role": "user", "content": QUESTION, "images": PICTURES}
    options = {"num_predict": TOKENS, "seed": SEED}
    answered = client.chat(model="eyes", messages=[message], options=options, stream=stream)
    lines = list(answered) if stream else [answered]
    return "".join(line.message.content for line in lines), lines[-1].prompt_eval_count, lines[-1].eval_count


def ask_ollama_generate(url, stream):
    client = keep(ollama.Client(host=url))
    options = {"num_predict": TOKENS, "seed": SEED}
    answered = client.generate(model="eyes", prompt=QUESTION, images=PICTURES, options=options, stream=stream)
    lines = list(answered) if stream else [answered]
    return "".join(line.response for line in lines), lines[-1].prompt_eval_count, lines[-1].eval_count


WIRES = [ask_openai, ask_responses, ask_anthropic, ask_ollama_chat, ask_ollama_generate]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", WIRES)
def test_an_answer_equals_that_of_the_writer(url, answer, ask, stream):
    assert answer.text
    assert ask(url, stream) == (answer.text, answer.stats.prompt_tokens, answer.stats.new_tokens)


def test_answers_are_the_same_beside_other_requests(url, answer):
    """Five clients with images, and as many with text, all at once."""
    texts = [{"prompt": f"text {number}", "seed": number, "max_tokens": TOKENS} for number in range(5)]
    alone = [post(url, "/v1/completions", **body).json()["choices"][0]["text"] for body in texts]
    results: dict = {}

    def run(key, work):
        results[key] = work()

    jobs = {f"image {number}": lambda ask=ask: ask(url, True)[0] for number, ask in enumerate(WIRES)}
    for number, body in enumerate(texts):
        jobs[f"text {number}"] = lambda body=body: post(url, "/v1/completions", **body).json()["choices"][0]["text"]
    threads = [threading.Thread(target=run, args=job) for job in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert results == {f"image {n}": answer.text for n in range(5)} | {f"text {n}": alone[n] for n in range(5)}


def test_the_route_of_the_page_takes_images(url, answer):
    """The page's chat sends OpenAI's parts to /v1/canvas, and shows every step."""
    body = {"messages": [{"role": "user", "content": chat_content()}], "seed": SEED, "max_tokens": TOKENS, "stream": False}
    whole = post(url, "/v1/canvas", **body)
    events = whole.json()["events"]
    ids = [token for event in events if event["type"] == "canvas" for token in event["ids"]]
    assert tuple(ids[: len(answer.ids)]) == answer.ids
    assert {event["type"] for event in events} == {"begin", "frame", "canvas", "end"}
    assert (events[-1]["text"], events[-1]["timings"]["seed"]) == (answer.text, SEED)
    streamed = httpx.post(f"{url}/v1/canvas", json=body | {"stream": True}, timeout=600)
    lines = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert lines[-1]["text"] == answer.text


def test_several_completions_of_one_request_see_the_images(url, answer):
    body = {"messages": [{"role": "user", "content": chat_content()}], "seed": SEED, "max_tokens": TOKENS, "n": 2}
    choices = post(url, "/v1/chat/completions", **body).json()["choices"]
    assert choices[0]["message"]["content"] == answer.text
    assert len(choices) == 2


def test_tokens_of_images_are_counted_without_the_vision_tower(folder, answer):
    writer = redraft.load(folder, device="cpu")
    with served(writer) as url:
        body = {"messages": [{"role": "user", "content": blocks()}]}
        assert post(url, "/v1/messages/count_tokens", **body).json() == {"input_tokens": answer.stats.prompt_tokens}
        assert vars(writer.images).get("_parts") is None


def test_ignored_fields_of_an_image_are_named(url):
    def header(detail):
        image = {"url": vision_models.data_url(LANDSCAPE), "detail": detail}
        body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}], "max_tokens": 1}
        return post(url, "/v1/chat/completions", **body).headers.get("x-redraft-unknown-fields")

    assert header("high") == "image_url.detail"
    assert header("auto") is None


def test_a_picture_of_several_frames_is_announced(url):
    warning = "the image has several frames: the first one is used"
    data = vision_models.data_url(vision_models.FILES["animated GIF"](), "image/gif")
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data}}]}
    body = {"messages": [message], "max_tokens": 1}
    assert post(url, "/v1/chat/completions", **body).json()["warnings"] == [warning]
    assert warning in post(url, "/v1/chat/completions", **body, stream=True).text
    asked = [{"role": "user", "content": [{"type": "input_image", "image_url": data}]}]
    assert post(url, "/v1/responses", input=asked, max_output_tokens=1).json()["warnings"] == [warning]


# 2. Which models take images


def test_lists_say_whether_a_model_takes_images(folder, tmp_path):
    text_only = tiny.save_folder(tmp_path / "text")
    for path, takes_images in ((folder, True), (text_only, False)):
        assert ModelCard.from_checkpoint(path).takes_images is takes_images
        writer = redraft.load(path, device="cpu")
        with served(writer) as url:
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["vision"] is takes_images
            assert httpx.get(f"{url}/props").json()["modalities"] == {"vision": takes_images, "audio": False}
            assert ("vision" in post(url, "/api/show").json()["capabilities"]) is takes_images
        assert vars(writer.images).get("_parts") is None


def test_a_model_without_a_vision_tower_says_what_it_is(tmp_path):
    text_only = tiny.save_folder(tmp_path / "text")
    content = chat_content()
    with served(redraft.load(text_only, device="cpu")) as url:
        for path, body in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": content}]},
            "/v1/messages": {"messages": [{"role": "user", "content": blocks()}], "max_tokens": 1},
            "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": blocks()}]},
            "/api/chat": {"messages": [{"role": "user", "content": "x", "images": [base64_of(LANDSCAPE)]}]},
            "/api/generate": {"prompt": "", "images": [base64_of(LANDSCAPE)]},
            "/v1/canvas": {"messages": [{"role": "user", "content": content}]},
        }.items():
            refused = post(url, path, **body)
            assert refused.status_code == 400, path
            assert "this model is a text-only diffusion model, so it takes no images: send text only" in refused.text


def test_what_a_model_is_that_takes_no_images(folder, tmp_path):
    assert ModelCard.from_writer(tiny.writer()).images == "one that was made without a checkpoint"
    llama = llama_models.save_with_drafter(tmp_path / "llama")
    assert find_image_config(llama.parent / "drafter") == "a causal-only model"
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert find_image_config(gguf) == "a GGUF file, which has no vision tower"
    assert find_image_config(tmp_path / "nowhere") == "one whose vision tower redraft cannot read"
    no_weights = tiny.save_folder(tmp_path / "text")
    (no_weights / "config.json").write_text((folder / "config.json").read_text())
    assert find_image_config(no_weights) == "a checkpoint without the weights of its vision tower"
    assert image_config_of(folder, tiny.byte_tokenizer()) == "one whose vocabulary has no image tokens"
    assert image_config_of(folder, vision_models.byte_tokenizer()) == vision_models.IMAGES


# 3. Hostile input


def png_header(width: int, height: int) -> bytes:
    """A PNG file that describes a picture of this size and has almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


HOSTILE = {
    "SVG": (base64_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "is no PNG, JPEG"),
    "HTML": (base64_of(b"<!DOCTYPE html><img src=x onerror=alert(1)>"), "is no PNG, JPEG"),
    "cut short": (base64_of(LANDSCAPE[: len(LANDSCAPE) // 2]), "damaged or cut short"),
    "a bomb": (base64_of(png_header(60_000, 60_000)), "60000 x 60000 pixels"),
    "6 MiB of base64 that is no picture": (base64_of(bytes(6 * 2**20 - 2**16)), "is no PNG, JPEG"),
    "8 MB that are no base64": ("%" * 8_000_000, "is not base64: it holds '%'"),
    "a path": ("/etc/passwd", "is no PNG, JPEG"),
    "nothing": ("", "is empty"),
}
LINKS = [
    "http://127.0.0.1:1/a.png",
    "https://example.org/a.png",
    "http://169.254.169.254/latest",
    "file:///etc/passwd",
    "ftp://a",
]


def each_wire(data: str) -> dict[str, dict]:
    """Requests of each wire with an image as base64."""
    image_url = {"type": "image_url", "image_url": {"url": data}}
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": [image_url]}], "max_tokens": 1, "stream": True},
        "/v1/messages": {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}], "max_tokens": 1},
        "/api/chat": {"messages": [{"role": "user", "content": "", "images": [data]}]},
    }


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_get_one_sentence(url, name):
    data, words = HOSTILE[name]
    for path, body in each_wire(data).items():
        refused = post(url, path, **body)
        error = refused.json()["error"]
        sentence = error if isinstance(error, str) else error["message"]
        assert (refused.status_code, words in sentence, len(sentence) < 400) == (400, True, True), (path, sentence[:400])
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("link", LINKS)
def test_links_are_not_followed(url, link):
    bodies = each_wire(link)
    source = {"type": "url", "url": link}
    bodies["/v1/messages/count_tokens"] = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    for path, body in bodies.items():
        refused = post(url, path, **body)
        assert (refused.status_code, "data URL" in refused.text or "not base64" in refused.text) == (400, True), refused.text


def test_a_mislabelled_picture_is_taken_for_what_it_is(url, answer):
    body = {"messages": [{"role": "user", "content": chat_content("image/webp")}], "seed": SEED, "max_tokens": TOKENS}
    assert post(url, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"] == answer.text
    body["messages"][0]["content"][0]["image_url"]["url"] = vision_models.data_url(LANDSCAPE, "text/html")
    assert "says that it is 'text/html'" in post(url, "/v1/chat/completions", **body).text


IMAGE = {"type": "image_url", "image_url": {"url": vision_models.data_url(vision_models.FILES["one pixel"]())}}
BLOCK = blocks()[0]


@pytest.mark.parametrize(
    ("path", "messages", "words"),
    [
        ("/v1/chat/completions", [{"role": "assistant", "content": [IMAGE]}], "only user messages take images"),
        ("/v1/chat/completions", [{"role": "system", "content": [IMAGE]}], "only user messages take images"),
        ("/v1/chat/completions", [{"role": "user", "content": [IMAGE] * (MAX_IMAGES + 1)}], "101 images, at most 100"),
        ("/v1/chat/completions", [{"role": "user", "content": [IMAGE] * 4097}], "at most 4096 items"),
        (
            "/v1/chat/completions",
            [{"role": "user", "content": [IMAGE] * 63}],
            "the model's context is 4,096",
        ),
        ("/v1/chat/completions", [{"role": "user", "content": [{"type": "image_url"}]}], "needs its file as a data URL"),
        ("/v1/chat/completions", [{"role": "user", "content": [{"type": "input_audio"}, IMAGE]}], "only text and images"),
        (
            "/v1/chat/completions",
            [{"role": "user", "content": [IMAGE, {"type": "text", "text": "<|image|>"}]}],
            "places for",
        ),
        ("/v1/canvas/decide", [{"role": "user", "content": [IMAGE]}], "images are not read here"),
        ("/v1/canvas/autoregressive", [{"role": "user", "content": [IMAGE]}], "images are not read here"),
        ("/v1/messages", [{"role": "assistant", "content": [BLOCK]}], "only user messages take images"),
        (
            "/v1/messages",
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [BLOCK]}]}],
            "a tool_result has an image",
        ),
        (
            "/v1/messages",
            [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}],
            "the server keeps none",
        ),
        ("/api/chat", [{"role": "system", "content": "x", "images": [base64_of(LANDSCAPE)]}], "only user messages"),
    ],
)
def test_images_in_wrong_places_get_one_sentence(url, path, messages, words):
    required = {"choices": ["a"]} if path.endswith("decide") else {"max_tokens": 1}
    refused = post(url, path, messages=messages, **required)
    assert refused.status_code == 400, refused.text
    assert words in refused.text, refused.text[:500]
    assert len(refused.text) < 600


def test_prompts_that_take_no_images_say_so(url):
    image = base64_of(LANDSCAPE)
    raw = post(url, "/api/generate", prompt="x", images=[image], raw=True)
    infill = post(url, "/api/generate", prompt="x", suffix="y", images=[image])
    assert (raw.status_code, "a raw prompt takes no images" in raw.text) == (400, True)
    assert (infill.status_code, "infill takes no images" in infill.text) == (400, True)
    messages = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    with pytest.raises(BadRequestError, match="no chat template, so it takes no images"):
        join_messages(messages)  # for a model without a chat template


def test_a_body_above_the_limit_is_refused_before_it_is_read(url):
    refused = post(url, "/api/generate", prompt="x", images=["A" * (8 * 2**20)])
    assert (refused.status_code, "8,388,608 bytes" in refused.text) == (413, True)


def test_a_vision_tower_that_cannot_be_loaded_is_no_mistake_of_the_client(folder, tmp_path, caplog):
    moved = shutil.copytree(folder, tmp_path / "moved")
    with served(load(moved)) as url:
        (moved / "model.safetensors").rename(moved / "elsewhere.safetensors")
        failed = post(url, "/v1/chat/completions", messages=[{"role": "user", "content": chat_content()}])
        assert failed.status_code == 500
        assert "the vision tower of this model cannot be loaded" in failed.text
        assert str(tmp_path) not in failed.text
        assert "model.safetensors" in caplog.text
        (moved / "elsewhere.safetensors").rename(moved / "model.safetensors")
        assert post(url, "/v1/chat/completions", messages=[{"role": "user", "content": chat_content()}]).status_code == 200


def test_the_likeliest_completion_is_chosen_with_the_image(url, folder):
    """With this seed another completion would be the likeliest without the image."""
    parts = [{"type": "image", "image": data} for data in PICTURES]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
    best = load(folder).chat(messages, seed=12, max_tokens=TOKENS, best_of=6)
    asked = {"messages": [{"role": "user", "content": chat_content()}], "seed": 12, "max_tokens": TOKENS, "best_of": 6}
    assert post(url, "/v1/chat/completions", **asked).json()["choices"][0]["message"]["content"] == best.text


def test_a_client_that_leaves_while_its_picture_is_decoded_frees_its_slot(folder, monkeypatch):
    calls = []

    def sleep(message, name, stop):
        calls.append(name)
        stop.wait(600)
        raise HelperStoppedError

    with served(load(folder)) as url:
        for number, name in enumerate(("portrait", "square", "grey")):
            path, body = list(each_wire(base64_of(vision_models.FILES[name]())).items())[number]
            content = json.dumps(body).encode()
            with monkeypatch.context() as patched:
                patched.setattr(tokenizer_images, "_call_decoder", sleep)
                with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
                    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
                    connection.sendall(head.encode() + content)
                    assert wait_until(lambda number=number: len(calls) == number + 1)
                assert wait_until(lambda: "redraft_active_requests 0.0" in httpx.get(f"{url}/metrics").text)
            assert post(url, path, **body).status_code == 200  # the turn is free too
