"""A vocabulary of 262,144 tokens: logprobs, constraints and infilling read the whole vocabulary at most once."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import tiny
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

import redraft
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

SIZE = 262_144


class CountingVocabulary:
    """A vocabulary that counts the calls that copy or serialize all of it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.counts = {"get_vocab": 0, "to_str": 0}

    def __getattr__(self, name: str) -> Any:
        if name in self.counts:
            self.counts[name] += 1
        return getattr(self.vocabulary, name)


def build_tokenizer() -> Tokenizer:
    """Special tokens, one token per byte, and words that only the model writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(SIZE - len(tiny.SPECIAL_TOKENS) - len(alphabet))]
    ids = {token: number for number, token in enumerate([*tiny.SPECIAL_TOKENS, *alphabet, *words])}
    vocabulary = Vocabulary(models.BPE(vocab=ids, merges=[]))
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary.decoder = decoders.ByteLevel()
    vocabulary.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tiny.SPECIAL_TOKENS])
    tokenizer = Tokenizer(vocabulary)
    tokenizer.vocabulary = CountingVocabulary(vocabulary)
    return tokenizer


@pytest.fixture(scope="module")
def writer() -> Writer:
    config = replace(tiny.BASE, vocab_size=SIZE, hidden_size=32, layer_types=("full_attention",), canvas_length=8)
    return Writer(tiny.decided(config), build_tokenizer(), tiny.sampler(canvas_length=8, max_steps=2))


@pytest.fixture(autouse=True)
def _the_vocabulary_is_read_at_most_once(writer):
    yield
    assert writer.tokenizer.vocabulary.counts["get_vocab"] <= 1
    assert writer.tokenizer.vocabulary.counts["to_str"] == 0


def test_every_token_has_its_bytes(writer):
    tokenizer = writer.tokenizer
    assert tokenizer.size == SIZE
    assert b"".join(tokenizer.bytes_of(token) for token in tokenizer.encode("Zoë 😀")) == "Zoë 😀".encode()
    assert [tokenizer.bytes_of(token) for token in (0, SIZE - 1, SIZE)][::2] == [b"", b""]
    assert tokenizer.bytes_of(SIZE - 1).startswith(b" w")
    assert sum(len(tokenizer.bytes_of(token)) for token in range(SIZE)) > SIZE
    assert tokenizer.ids_without_text(SIZE + 2) == (*range(len(tiny.SPECIAL_TOKENS)), SIZE, SIZE + 1)


def test_logprobs(writer):
    """The candidates of every position, with text and bytes, as a server reports them."""
    events = list(writer.stream("a", max_tokens=8, seed=1, candidates=5))
    candidates = [event.top_probs for event in events if isinstance(event, redraft.Draft) and event.top_probs is not None]
    assert candidates
    for top_probs in candidates:
        for token in top_probs.ids_BCK.flatten().tolist():
            text = writer.tokenizer.token_text(token)
            assert writer.tokenizer.bytes_of(token).decode(errors="replace") == text or not writer.tokenizer.bytes_of(token)


def test_regex(writer):
    answer = writer.write("a", regex="[a-c]{2}( w[0-9]+)?", max_tokens=8, seed=1)
    assert re.fullmatch("[a-c]{2}( w[0-9]+)?", answer.text)


def test_schema(writer):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    answer = writer.write("a", schema=schema, max_tokens=16, seed=1)
    assert isinstance(json.loads(answer.text)["a"], bool)


def test_infilling(writer):
    filled = writer.fill("ab[[ 3 ]]cd", seed=1)
    assert filled.text.startswith("ab")
    assert filled.text.endswith("cd")
