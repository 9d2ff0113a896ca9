"""Answers of Llama's families: the space of a continuation, and reasoning that the chat template has opened."""

import re
from itertools import chain
from pathlib import Path
from threading import Event as StopEvent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_gguf import byte_level_vocabulary, sentencepiece_metadata, sentencepiece_vocabulary
from llama_models import make_reference
from tokenizers import pre_tokenizers

from redraft import Committed, Constraints, checkpoint
from redraft.checkpoint.gguf.vocabulary import read_tokenizer
from redraft.server.completion import CompletionParams, Finish, TextDelta, stream_completion
from redraft.tasks.text_events import EncodedPrompt, TextAssembler
from redraft.tokenizer.chat_parser import Parsed, parse_chat
from redraft.tokenizer.tokenizer import Decoder, Tokenizer
from redraft.writer import Writer

SENTENCEPIECE = read_tokenizer(Path("x.gguf"), sentencepiece_metadata(*sentencepiece_vocabulary()))
SOME_IDS = [0, 1, 2, *SENTENCEPIECE.encode("the steps a  x")]
MESSAGES = [{"role": "user", "content": "hi"}]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def writer_of(tokenizer, folder):
    """A tiny random Llama with this tokenizer."""
    make_reference("llama 2", vocab_size=tokenizer.size).save_pretrained(folder)
    tokenizer.save(folder)
    opened = checkpoint.load_checkpoint(folder, device="cpu")
    return Writer(*opened)


@pytest.fixture(name="llama", scope="module")
def _llama(tmp_path_factory):
    return writer_of(SENTENCEPIECE, tmp_path_factory.mktemp("llama"))


@pytest.fixture(name="thinker", scope="module")
def _thinker(tmp_path_factory):
    vocabulary = byte_level_vocabulary(pre_tokenizers.ByteLevel(add_prefix_space=False), 300)
    vocabulary.add_tokens(["<think>", "</think>"])
    return writer_of(Tokenizer(vocabulary, template=THINKING), tmp_path_factory.mktemp("thinker"))


# The leading space of SentencePiece


@pytest.mark.parametrize("prompt", ["the canvas", "the canvas "])
def test_a_continuation_keeps_its_leading_space(llama, prompt):
    pattern = " the step of [a-z]+"
    answer = llama.write(prompt, regex=pattern, max_tokens=12)
    assert re.fullmatch(pattern, answer.text) or answer.reason == "length"
    assert answer.text.startswith(" the step of")
    events = list(llama.stream(prompt, regex=pattern, max_tokens=12))
    assert "".join(event.delta.text for event in events[:-1]) == answer.text
    assert "".join(event.text for event in events if isinstance(event, Committed)) == answer.text


def test_the_first_text_of_all_begins_without_the_space(llama):
    ids = llama.tokenizer.encode("the step")
    answer = llama.write("", constraints=Constraints(pins=dict(enumerate([*ids, 2]))), max_tokens=12)
    assert (answer.text, answer.reason) == ("the step", "stop")


def test_a_stop_string_counts_the_tokens_of_a_continuation(llama):
    ids = llama.tokenizer.encode("the step and more")
    pins = dict(enumerate(ids))
    params = CompletionParams(prompt="so", stop_strings=(" and",), pins=pins, max_tokens=len(ids))
    chunks = list(stream_completion(llama, params, StopEvent()))
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, TextDelta)) == " the step"
    assert chunks[-1].stats.new_tokens == len(llama.tokenizer.encode("the step"))


@settings(max_examples=60)
@given(st.lists(st.lists(st.sampled_from(SOME_IDS), max_size=3), max_size=6), st.booleans(), st.booleans())
def test_pieces_of_sentencepiece_add_up_to_the_whole(pieces, keep_special, continues):
    """Empty pieces and pieces of special tokens alone included."""
    decode = SENTENCEPIECE.decode_fragment if continues else SENTENCEPIECE.decode
    decoder = Decoder(SENTENCEPIECE, keep_special=keep_special, continues=continues)
    texts = [decoder.feed(piece) for piece in pieces]
    assert "".join(texts) + decoder.flush() == decode(chain(*pieces), keep_special=keep_special)


def test_the_draft_of_a_later_canvas_keeps_its_leading_space():
    ids = SENTENCEPIECE.encode("the step")
    assembler = TextAssembler(SENTENCEPIECE, EncodedPrompt([SENTENCEPIECE.bos_id], is_chat=False))
    assert assembler.decode_draft(ids) == "the step"
    assert assembler.add(ids, final=False).text == "the step"
    assert assembler.decode_draft(ids) == " the step"


# Reasoning that the template opens


def test_an_answer_begins_inside_the_reasoning_that_the_template_has_opened(thinker):
    said = "Hm, hm.\n</think>\n\nHello!<|im_end|>"
    pins = dict(enumerate(thinker.tokenizer.encode(said)))
    options = {"constraints": Constraints(pins=pins), "max_tokens": 40}
    answer = thinker.chat(MESSAGES, **options)
    assert (answer.reasoning, answer.text) == ("Hm, hm.", "Hello!")
    events = list(thinker.stream(MESSAGES, **options))
    assert "".join(event.delta.reasoning for event in events[:-1]) == "Hm, hm."
    assert "".join(event.delta.text for event in events[:-1]) == "Hello!"
    assert thinker.write("<think>\n", **options).text.startswith("Hm, hm.")  # a text has no channels


def test_logprobs_leave_out_reasoning_that_the_template_has_opened(thinker):
    ids = thinker.tokenizer.encode("Hello? Hm.</think>Hello<|im_end|>")
    options = {"pins": dict(enumerate(ids)), "max_tokens": 40}
    params = CompletionParams(prompt=MESSAGES, logprobs=1, **options)
    deltas = [chunk for chunk in stream_completion(thinker, params, StopEvent()) if isinstance(chunk, TextDelta)]
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.id for token in tokens] == thinker.tokenizer.encode("Hello")
    constraints = Constraints(pins=options["pins"])
    events = thinker.stream(MESSAGES, constraints=constraints, max_tokens=40, candidates=1)
    canvases = [event for event in events if isinstance(event, Committed)]
    probabilities = [value for canvas in canvases for value in canvas.top_probs.draft_BC[0].tolist()]
    begin = len(ids) - 1 - len(tokens)
    assert [token.probability for token in tokens] == probabilities[begin : len(ids) - 1]


def test_an_answer_that_obeys_a_pattern_is_text(thinker):
    answer = thinker.chat(MESSAGES, regex="[0-9]{3}")
    assert re.fullmatch("[0-9]{3}", answer.text)
    assert answer.stats.prompt_tokens == len(thinker.encode_prompt(MESSAGES)) + 1  # </think>


def test_only_the_end_of_a_prompt_opens_a_channel(thinker):
    tokenizer = thinker.tokenizer
    for prompt in ("", "<think>\n</think>\n", "<think> I say <|im_end|>", "<think>hm", "<think>" + 9 * "<|im_end|>"):
        assert parse_chat(tokenizer, tokenizer.encode("x</think>y"), tokenizer.encode(prompt)) == Parsed("xy")
    for prompt in ("<think>", "a <think>\n\n", "</think><think>thought\n"):
        assert parse_chat(tokenizer, tokenizer.encode("x</think>y"), tokenizer.encode(prompt)) == Parsed("y", "x")


# Rendering


def test_a_chat_with_stop_strings_renders_its_template_once(thinker, monkeypatch):
    rendered = []
    render = Tokenizer.render
    monkeypatch.setattr(Tokenizer, "render", lambda *args, **options: rendered.append(1) or render(*args, **options))
    pins = dict(enumerate(thinker.tokenizer.encode("</think>one two three<|im_end|>")))
    params = CompletionParams(prompt=MESSAGES, stop_strings=(" three",), pins=pins, max_tokens=40, best_of=2)
    *_, end = stream_completion(thinker, params, StopEvent())
    assert isinstance(end, Finish)
    assert (end.stop_string, len(rendered)) == (" three", 1)
    assert end.stats.prompt_tokens == len(thinker.encode_prompt(MESSAGES))
