"""The tokenizer of a GGUF file equals the one of tokenizer.json from which it was converted."""

import json

import gguf_files
import pytest
from gguf_files import BYTES, SPECIAL_TOKENS, TEMPLATE, tokenizer_metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.checkpoint.gguf.vocabulary import RELEASED_SPECIAL_TOKENS, read_tokenizer
from redraft.checkpoint.names import CheckpointError
from redraft.tokenizer.tokenizer import check_same_vocabulary

OURS = read_tokenizer("a.gguf", tokenizer_metadata())
REFERENCE = gguf_files.reference_tokenizer()
pieces = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [*SPECIAL_TOKENS, *BYTES[:3], "▁", "▁▁", "  ", "\n\n\n", "the model", " the", "é", "\U0001f600", "<|turn", "\ud800"]
    ),
)
texts = st.lists(pieces, max_size=8).map("".join)


@settings(max_examples=150)
@given(texts)
def test_ids_and_text_equal_those_of_tokenizer_json(text):
    ids = OURS.encode(text)
    assert ids == REFERENCE.encode(text)
    for keep_special in (False, True):
        assert OURS.decode(ids, keep_special=keep_special) == REFERENCE.decode(ids, keep_special=keep_special)
    assert OURS.encode_prompt(text) == REFERENCE.encode_prompt(text)


@given(st.lists(st.integers(0, OURS.size - 1), max_size=20))
def test_any_ids_decode_to_the_same_text(ids):
    assert OURS.decode(ids) == REFERENCE.decode(ids)
    assert OURS.decode_fragment(ids) == REFERENCE.decode_fragment(ids)


def test_the_vocabulary_is_the_same():
    check_same_vocabulary(OURS, REFERENCE)
    assert OURS.special_tokens == REFERENCE.special_tokens == dict(enumerate(SPECIAL_TOKENS))
    ours, reference = (json.loads(tokenizer.vocabulary.to_str()) for tokenizer in (OURS, REFERENCE))
    assert set(ours) == set(reference)
    for part in ours:
        assert ours[part] == reference[part], part


def test_the_chat_template_comes_along():
    messages = [{"role": "user", "content": "Hello <|turn>"}]
    assert OURS.template == TEMPLATE
    assert OURS.encode_chat(messages) == REFERENCE.encode_chat(messages)
    assert OURS.settings["mask_token"] == "<mask>"
    without = read_tokenizer("a.gguf", {**tokenizer_metadata(), "tokenizer.chat_template": None})
    assert without.template is None


def test_text_tokens_of_the_user_stay_text_and_known_markers_are_special():
    values = tokenizer_metadata()
    kinds = list(values["tokenizer.ggml.token_type"])
    plain = len(kinds) - 1  # an ordinary token becomes a user-defined one
    kinds[plain] = 4
    kinds[SPECIAL_TOKENS.index("<|turn>")] = 1  # some converters say so
    tokenizer = read_tokenizer("a.gguf", {**values, "tokenizer.ggml.token_type": kinds})
    assert tokenizer.special_tokens == REFERENCE.special_tokens
    text = values["tokenizer.ggml.tokens"][plain]
    assert tokenizer.decode([plain]) == text.replace("▁", " ")
    assert len(RELEASED_SPECIAL_TOKENS) == 24


TOKENS = tokenizer_metadata()["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "bert"}, "has a tokenizer of the kind 'bert'; redraft reads 'gemma4', 'gpt2', 'llama'"),
        ({"model": None}, "has a tokenizer of the kind None"),
        ({"add_space_prefix": True}, "add_space_prefix is set"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be an array of str, got None"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of str"),
        ({"tokens": TOKENS[:-1]}, f"has {len(TOKENS) - 1} tokens and {len(TOKENS)} token types"),
        ({"tokens": [*TOKENS[:-1], TOKENS[5]]}, "has the token '<|turn>' twice"),
        ({"token_type": "x"}, "tokenizer.ggml.token_type must be an array of int"),
        ({"token_type": [True]}, "tokenizer.ggml.token_type must be an array of int"),
        ({"merges": ["a"]}, "has the merge 'a', which is not two tokens with a space between"),
        ({"merges": ["a b c"]}, "has the merge 'a b c'"),
        ({"merges": [" a"]}, "has the merge ' a'"),
        ({"merges": ["nobody knows"]}, "has a vocabulary that cannot be used"),
        ({"bos_token_id": len(TOKENS)}, "tokenizer.ggml.bos_token_id must be one of the"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id must be one of the"),
        ({"mask_token_id": "x"}, "tokenizer.ggml.mask_token_id must be one of the"),
    ],
)
def test_a_vocabulary_that_does_not_add_up_is_refused(changes, sentence):
    values = tokenizer_metadata() | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer("a.gguf", values)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("a.gguf")
    assert len(str(caught.value)) < 500


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(CheckpointError, match=r"a\.gguf has a chat template that is not a text: 7"):
        read_tokenizer("a.gguf", {**tokenizer_metadata(), "tokenizer.chat_template": 7})
