"""Logprobs: the probabilities of the last step of a canvas, released together with the text."""

from dataclasses import replace

import httpx
import openai
import pytest
import tiny
import torch
from serving import NO_END, make, served, user

from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Committed, Draft
from redraft.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore")  # from the client's own library
WRITER = make()


@pytest.fixture(scope="module")
def client():
    with served(WRITER) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_logprobs_are_those_of_the_last_step(client):
    plain = {"model": "", "prompt": "ab", "max_tokens": 24, "seed": 1, "logit_bias": NO_END}
    found = client.completions.create(**plain, logprobs=3).choices[0]
    events = list(WRITER.stream("ab", max_tokens=24, seed=1, constraints=Constraints(forbidden=(1, 5)), candidates=3))
    ids = [token for event in events if isinstance(event, Committed) for token in event.ids_BC[0, : event.shown].tolist()]
    text = [at for at, token in enumerate(ids) if WRITER.tokenizer.token_bytes[token] is not None]  # no special tokens
    last = {event.block: event.top_probs for event in events if isinstance(event, Draft)}
    own = torch.cat([shares.draft_BC[0] for shares in last.values()])[text]
    assert len(text) > 20
    assert found.logprobs.token_logprobs == pytest.approx(own.log().tolist(), abs=1e-4)
    assert found.logprobs.tokens == [WRITER.tokenizer.token_text(ids[at]) for at in text]
    for at, token in zip(found.logprobs.text_offset, found.logprobs.tokens, strict=True):
        assert token == "\ufffd" or found.text[at] == token
    likely = torch.cat([shares.probs_BCK[0] for shares in last.values()])[text]
    tops = [sorted(top.values(), reverse=True) for top in found.logprobs.top_logprobs]
    for top, shares in zip(tops, likely.log().tolist(), strict=True):
        assert top[0] == pytest.approx(shares[0], abs=1e-4)
        assert all(min(abs(one - share) for share in shares) < 1e-4 for one in top)  # half characters share a key
    parts = [chunk.choices[0] for chunk in client.completions.create(**plain, logprobs=3, stream=True)]
    told = [part.logprobs for part in parts if part.logprobs]
    assert len(told) == 2
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [*getattr(told[0], name), *getattr(told[1], name)] == getattr(found.logprobs, name)


def test_openai_logprobs_of_a_chat_spell_its_text(client):
    ask = {"model": "", "messages": user("say: a wörd or two"), "seed": 1, "logprobs": True}
    found = client.chat.completions.create(**ask, top_logprobs=2).choices[0]
    assert found.message.content == "a wörd or two"
    assert b"".join(bytes(one.bytes) for one in found.logprobs.content).decode() == "a wörd or two"
    assert all(one.logprob == 0 and len(one.top_logprobs) == 2 for one in found.logprobs.content)  # they were pinned
    cut = client.chat.completions.create(**ask, stop=["rd or"]).choices[0]
    assert cut.message.content == "a wö"
    assert b"".join(bytes(one.bytes) for one in cut.logprobs.content).decode() == "a wö"
    assert not cut.logprobs.content[0].top_logprobs
    whole = b""
    for chunk in client.chat.completions.create(**ask, stream=True):
        content = chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
        whole += b"".join(bytes(one.bytes) for one in content)
    assert whole.decode() == "a wörd or two"
    none = client.chat.completions.create(model="", messages=user("say: a"), seed=1).choices[0]
    assert none.logprobs is None


def test_logprobs_match_the_text_that_is_sent(client):
    """With a stop string across two canvases, with whitespace before the text, and with reasoning before it."""
    said = {"say: abcdefghijklmnopqrstuv": "abcdefghijklmn", "say: \n\n\nab cdopqrx": "ab cd"}
    said["say: <|channel>thought\nhm<channel|>ok"] = "ok"
    for asked, text in said.items():
        for stream in (False, True):
            ask = {"model": "", "messages": user(asked), "seed": 1, "logprobs": True, "stop": ["opqr"], "max_tokens": 32}
            found = client.chat.completions.create(**ask, stream=stream)
            choices = [part.choices[0] for part in found] if stream else found.choices
            assert "".join((one.delta if stream else one.message).content or "" for one in choices) == text
            told = [token.token for one in choices if one.logprobs for token in one.logprobs.content]
            assert "".join(told) == text, (asked, stream)


def test_logprobs_of_ids_that_only_the_model_has():
    """The vocabulary may be larger than the tokenizer's."""
    config = replace(tiny.BASE, vocab_size=300)
    writer = Writer(
        tiny.build(config), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_new_tokens=32, max_steps=2)
    )
    assert writer.tokenizer.size < 300
    with served(writer) as url:
        body = {"prompt": "ab", "max_tokens": 24, "seed": 1, "logprobs": 20, "logit_bias": NO_END}
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
        assert found.status_code == 200, found.text
        choice = found.json()["choices"][0]
        for at, token in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
            assert token == "\ufffd" or choice["text"][at : at + len(token)] == token
        canvases = [[290] * 16]
        edit = httpx.post(f"{url}/v1/canvas/edit", json={"text": "x" * 20, "canvases": canvases}, timeout=600)
        assert (edit.status_code, "the token 290 is no text" in edit.text) == (400, True)
