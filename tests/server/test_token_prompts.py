"""Token ids as prompts, and llama.cpp's /completion, /tokenize and /detokenize."""

import json

import httpx
import openai
import pytest
import tiny
from serving import make, served

pytestmark = pytest.mark.filterwarnings("ignore")  # from the client's own library

TOKENIZER = tiny.byte_tokenizer()
PROMPT_IDS = TOKENIZER.encode_prompt("ab")
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.fixture(scope="module")
def url():
    with served(make(), name="small") as address:
        yield address


@pytest.fixture(scope="module")
def http(url):
    with httpx.Client(base_url=url, timeout=600) as client:
        yield client


def test_token_ids_are_continued_as_their_text(url, http):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "", "max_tokens": 4, "seed": 1}
    of_text = client.completions.create(prompt="ab", **asked)
    of_ids = client.completions.create(prompt=PROMPT_IDS, **asked)
    assert (of_ids.choices[0].text, of_ids.usage) == (of_text.choices[0].text, of_text.usage)
    several = client.completions.create(prompt=[PROMPT_IDS, PROMPT_IDS[:2]], echo=True, **asked)
    assert [choice.text[:6] for choice in several.choices] == ["<bos>a", "<bos>a"]
    assert several.choices[0].text == "<bos>ab" + of_text.choices[0].text
    parts = list(client.completions.create(prompt=PROMPT_IDS, stream=True, echo=True, **asked))
    assert "".join(part.choices[0].text for part in parts) == several.choices[0].text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": [10_000]}, "token 10000 is outside the vocabulary of 272"),
        ("/v1/completions", {"prompt": []}, "prompt: Input should be a text, a list of texts, token ids, or lists"),
        ("/v1/completions", {"prompt": [True]}, "prompt: Input should be a text, a list of texts, token ids, or lists"),
        ("/v1/completions", {"prompt": [1, -1]}, "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [1, "a"]}, "valid integer"),
        ("/v1/completions", {"prompt": [[1, 2], []]}, "at least 1 item"),
        ("/v1/completions", {"prompt": [20] * 600}, "context is 512"),
        ("/v1/completions", {"prompt": PROMPT_IDS, "suffix": "x"}, "a suffix needs a text"),
        ("/v1/fim/completions", {"prompt": PROMPT_IDS}, "got token ids"),
        ("/completion", {"prompt": "x", "grammar": "root ::= x"}, "grammar is not supported"),
        ("/completion", {"prompt": "x" * 1_000_000}, "has more than 512 tokens"),
        ("/completion", {"prompt": "x", "n_predict": True}, "got true"),
        ("/tokenize", {"content": "x" * 1_000_000}, "has more than 512 tokens"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special false is not supported"),
        ("/detokenize", {"tokens": [20] * 513}, "513 tokens are more than the model's limit of 512"),
        ("/detokenize", {"tokens": [272]}, "token 272 is outside the vocabulary of 272"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(http, path, body, words):
    refused = http.post(path, json=body)
    assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text


def test_llamacpp_completes_whole_and_streamed(http):
    asked = {"prompt": "ab", "n_predict": 20, "seed": 1, "ignore_eos": True}
    whole = http.post("/completion", json=asked).json()
    assert whole["content"] == http.post("/completion", json={**asked, "prompt": PROMPT_IDS}).json()["content"]
    expected = {"index": 0, "stop": True, "stop_type": "limit", "stopping_word": "", "tokens_predicted": 20}
    assert expected.items() <= whole.items()
    assert (whole["tokens_evaluated"], whole["prompt"], whole["truncated"]) == (3, "ab", False)
    assert whole["generation_settings"]["seed"] == 1
    events = http.post("/completion", json={**asked, "stream": True}).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events if event]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (len(parts) > 2, parts[-1]["tokens_predicted"]) == (True, 20)
    word = next(letter for letter in whole["content"][4:] if letter.isprintable() and letter not in '"\\')
    cut = http.post("/completion", json={**asked, "stop": [word]}).json()
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", word)
    assert whole["content"].startswith(cut["content"] + word)
    record = http.post("/completion", json={"prompt": "x", "n_predict": 32, "json_schema": SCHEMA}).json()
    assert (set(json.loads(record["content"])), record["stop_type"]) == ({"ok"}, "eos")
    several = http.post("/completion", json={**asked, "prompt": ["ab", "cd"], "response_fields": ["content", "index"]})
    assert [entry["index"] for entry in several.json()] == [0, 1]
    assert several.json()[0]["content"] == whole["content"]
    assert http.post("/completion", json={"prompt": "ab", "n_predict": 0}).json()["content"] == ""


def test_texts_become_tokens_and_tokens_become_texts(http):
    text = "Hi <|turn>ö"
    ids = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert ids == TOKENIZER.encode(text)
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True, "add_special": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == [TOKENIZER.bos_id, *ids]
    assert [piece["piece"] for piece in pieces] == ["<bos>", "H", "i", " ", "<|turn>", [0xC3], [0xB6]]
    assert http.post("/detokenize", json={"tokens": []}).json() == {"content": ""}
