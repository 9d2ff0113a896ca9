"""JSON text: the same values as Python's parser, but nothing that is nested too deeply."""

import gc
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.config import JSONDepthError, parse_json
from redraft.config.json_text import MAX_DEPTH

VALUES = st.recursive(
    st.integers() | st.text('[]{}"\\,: a\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('[]{}"\\'), inner),
)


@settings(max_examples=50)
@given(value=VALUES, times=st.sampled_from([1, 300]))
def test_values_are_those_of_json(value, times):
    text = json.dumps([value] * times)
    assert parse_json(text) == json.loads(text)


WRAPPED = {
    "array": lambda value: [value],
    "object": lambda value: {"a": value},
    "neighbours": lambda value: [[], '"]]} [[[', {}, value],
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_the_depth_is_limited(kind):
    wrap = WRAPPED[kind]
    value = [1]
    for _ in range(MAX_DEPTH - 2):
        value = wrap(value)
    text = json.dumps([value])
    assert parse_json(text) == json.loads(text)
    with pytest.raises(JSONDepthError, match=f"more than {MAX_DEPTH} arrays"):
        parse_json(json.dumps([[value]]))


def test_brackets_in_strings_do_not_count():
    for text in ("[" * 1000, '\\"' + "[{" * 1000, "\\" * 3 + "[" * 1000):
        assert parse_json(json.dumps({text: [text]})) == {text: [text]}


OTHER_MISTAKES = ["", "[" * 150, '"' + "[" * 1000, '"' + '\\"' * 100_000 + "[" * 300, '{"n": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize("text", OTHER_MISTAKES, ids=range(len(OTHER_MISTAKES)))
def test_other_mistakes_are_those_of_json(text):
    with pytest.raises(ValueError, match=r".") as error:
        parse_json(text)
    assert not isinstance(error.value, JSONDepthError)


class Garbage:
    """An object in a reference cycle, whose finalizer needs some stack."""

    failures = 0

    def __init__(self):
        self.own = self

    def __del__(self):
        try:
            self.descend(60)
        except RecursionError:
            Garbage.failures += 1

    def descend(self, count):
        if count:
            self.descend(count - 1)


def test_garbage_can_be_finalized_while_json_is_parsed():
    """Deep in the parser of Python no stack would be left for finalizers."""

    def count_failures(parse):
        Garbage.failures = 0
        for threshold in range(600, 1000, 40):
            gc.collect()
            gc.set_threshold(threshold)
            Garbage()
            with pytest.raises((ValueError, RecursionError)):
                parse("[" * 100_000)
        return Garbage.failures

    thresholds = gc.get_threshold()
    gc.freeze()  # only new objects are looked at, which is fast
    try:
        assert count_failures(parse_json) == 0
        if sys.version_info < (3, 12):  # later versions collect no garbage inside of the parser
            assert count_failures(json.loads) > 0
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
