"""Infilling: the text around gaps is unchanged, lengths are found, user errors are named."""

import io
import re
import threading
from itertools import chain, zip_longest

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from redraft.cli import terminal
from redraft.cli.terminal import CanvasView
from redraft.config import EngineConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import generate
from redraft.engine import Stopped
from redraft.engine.request import Request, RequestStatus
from redraft.tasks import infill
from redraft.writer import Writer

WRITER = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=3))
SMALL_WRITER = Writer(
    tiny.decided(tiny.CONFIGS["one layer"]), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=2)
)
TEXT = st.text(st.characters(exclude_characters="[]", codec="utf-8"), max_size=12)


def woven(texts, holes) -> str:
    return "".join(chain.from_iterable(zip_longest(texts, holes, fillvalue="")))


GAPS = given(
    st.lists(TEXT, min_size=2, max_size=4),
    st.lists(st.sampled_from(["[[ ]]", "[[]]", "[[1]]", "[[ 5 ]]"]), min_size=3),
    st.integers(0, 99),
)


@pytest.mark.soak
@settings(max_examples=40, deadline=None)
@GAPS
def test_the_text_around_gaps_is_unchanged(texts, marks, seed):
    check_gaps(texts, marks, seed)


@pytest.mark.soak_long
@settings(max_examples=400, deadline=None)
@GAPS
def test_the_text_around_any_gaps_is_unchanged(texts, marks, seed):
    check_gaps(texts, marks, seed)


def check_gaps(texts, marks, seed) -> None:
    """Gaps at both ends, beside one another, of one token; any characters."""
    text = woven(texts, marks[: len(texts) - 1])
    found = SMALL_WRITER.fill(text, seed=seed, longest=2)
    assert len(found.gaps) == text.count("[[")
    assert found.text == woven(infill.parse_template(text).texts, found.gaps)
    assert list(infill.parse_template(text).texts) == texts
    assert found.text.startswith(texts[0])


def test_the_same_seed_gives_the_same_fill():
    one, two = (WRITER.fill("a[[ ]]b", seed=5, longest=6) for _ in range(2))
    assert one == two
    assert {WRITER.fill("a[[ ]]b", seed=seed, longest=6).text for seed in range(4)} != {one.text}


def test_an_infill_that_is_watched_is_the_same(monkeypatch):
    """The drafts of one canvas of each gap are drawn, the pinned suffix underlined."""
    seen, console = [], Console(file=io.StringIO(), force_terminal=True, width=60, height=20)
    monkeypatch.setattr(terminal, "FRAME_SECONDS", 0.0)
    with CanvasView(console, WRITER.tokenizer, [1]) as view:

        def watch(event):
            view.watch(event)
            seen.append((event.step, event.pinned_BC[0].nonzero()[:, 0].tolist()))

        found = WRITER.fill("a [[ 3 ]] bc[[ ]]d", seed=5, longest=6, watch=watch)
    assert found == WRITER.fill("a [[ 3 ]] bc[[ ]]d", seed=5, longest=6)
    assert [step for step, _ in seen].count(1) == 2
    assert seen[0][1][:3] == [3, 4, 5]  # " bc"
    assert "\x1b[4m" in console.file.getvalue()


def test_a_given_length_is_kept_and_others_have_at_most_the_longest(monkeypatch):
    asked, add = [], WRITER.engine.add
    monkeypatch.setattr(WRITER.engine, "add", lambda *a, **k: asked.append(k) or add(*a, **k))
    for length in (1, 2, 7, 16, 40):  # 16 is a page, 40 is more
        hole = WRITER.fill(f"x.[[ {length} ]]yz", seed=1).gaps[0]
        assert {length, length + 1} <= set(
            asked[-1]["constraints"].pins
        )  # what follows is in sight, so nothing ends the text
        assert len(hole.encode("utf-8", "replace")) <= length
    assert len(WRITER.fill("x.[[ ]].", seed=1, longest=4).gaps[0].encode()) <= 4


def test_several_infills_differ_and_the_most_likely_is_first():
    found = WRITER.fill("ab[[ ]]cd", count=4, seed=3, longest=8)
    assert 1 < len(found) <= 4
    assert len({one.text for one in found}) == len(found)
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert WRITER.fill("ab[[ ]]cd", seed=3, longest=8).text == found[0].text
    assert len(WRITER.fill("ab[[ 2 ]]cd", count=3, seed=3)) > 1
    many = WRITER.fill(prefix="def f():\n    ", suffix="\n", count=6, seed=3, longest=6)
    assert len({one.text for one in many}) == len(many)


def test_a_text_of_gaps_is_refused_at_the_first_one_too_many(monkeypatch):
    parsed = []

    class CountedGap:
        @staticmethod
        def finditer(text):
            for match in gap.finditer(text):
                parsed.append(match)
                yield match

    gap = infill.GAP
    monkeypatch.setattr(infill, "GAP", CountedGap)
    with pytest.raises(ValueError, match=r"more than 256 gaps.*fill it in parts"):
        infill.parse_template("[[]]" * 100_000)
    assert len(parsed) == 257
    assert len(infill.parse_template("a[[]]" * 256).lengths) == 256


def test_between_a_prefix_and_a_suffix():
    found = WRITER.fill(prefix="x = ", suffix="\nprint(x)", seed=2, longest=4)
    assert found.text == f"x = {found.gaps[0]}\nprint(x)"
    with_context = WRITER.fill(prefix="x = ", suffix="\n", context="# one\n", seed=2, longest=4)
    assert with_context.text.startswith("x = ")
    assert WRITER.fill(prefix="only", seed=2, longest=4).text.startswith("only")
    assert WRITER.fill(suffix="only", seed=2, longest=4).text.endswith("only")


def test_a_gap_does_not_repeat_the_suffix():
    assert infill.cut_overlap("a = 1\nprint(a)", "\nprint(a)\n") == "a = 1"
    assert infill.cut_overlap("a = 1", " + b") == "a = 1"
    assert infill.cut_overlap("the end.", ".") == "the end."  # one letter may be chance
    assert infill.cut_overlap("", "abcd") == ""


def test_a_gap_in_an_indented_block_stays_in_it():
    hole = "a = 1\n    b = 2\n\n    c = 3\ndef g():\n    pass"
    assert infill.cut_at_dedent("def f():\n    ", hole) == "a = 1\n    b = 2\n\n    c = 3"
    assert infill.cut_at_dedent("def f():\n    x = ", hole) == hole
    assert infill.cut_at_dedent("", hole) == hole


def gap_context(text, before):
    template = infill.parse_template(text)
    suffixes = infill.Infiller(WRITER.engine, WRITER.tokenizer)._encode_suffixes(template)
    return infill._GapContext(WRITER.tokenizer, template, 0, before, (1,), 1000, suffixes)


def test_a_text_after_gaps_is_tokenized_once(monkeypatch):
    tokenized = []
    encode = WRITER.tokenizer.encode
    monkeypatch.setattr(WRITER.tokenizer, "encode", lambda text, *rest: tokenized.append(text) or encode(text, *rest))
    WRITER.fill("a.[[ 1 ]] first[[ 1 ]] second[[ 1 ]] third", seed=1)
    assert [tokenized.count(text) for text in (" first", " second", " third")] == [1, 1, 1]


def test_the_text_around_a_gap_is_not_tokenized_once_the_client_has_left(monkeypatch):
    stop = threading.Event()
    contexts = []
    usual = infill._GapContext

    def rank(*_args):
        stop.set()
        return [infill._Ranked(0.0, "x", settled=True)]

    monkeypatch.setattr(infill, "_GapContext", lambda *args: contexts.append(args) or usual(*args))
    monkeypatch.setattr(infill.Infiller, "_rank", rank)
    with pytest.raises(Stopped):
        WRITER.fill("a[[ 1 ]]b[[ 1 ]]c", stop=stop)
    assert len(contexts) == 1


def test_a_canvas_begins_with_the_healed_bytes():
    context = gap_context("hap[[ ]]y", "hap")
    spelled = WRITER.tokenizer.token_bytes
    assert context.healed == b"p"
    assert all(spelled[token].startswith(b"p") for token in context.allowed_first)
    assert context.prompt == WRITER.tokenizer.encode_prompt("ha")
    context = gap_context("the  [[ ]]y", "the  ")
    assert (context.healed, context.prompt, context.healed_tokens) == (b" ", WRITER.tokenizer.encode_prompt("the "), 0)
    assert gap_context("a.[[ ]]", "a.").allowed_first == ()


def test_an_answer_begins_with_one_of_the_first_tokens():
    allowed = (20, 21, 22)
    prompts, constraints = [[2, 9, 9], [2, 7]], [Constraints(allowed_first=allowed), Constraints()]
    *_, end = generate(
        WRITER.model, prompts, tiny.sampler(canvas_length=8, max_new_tokens=16), seeds=[1, 2], constraints=constraints
    )
    *_, alone = generate(WRITER.model, prompts[1:], tiny.sampler(canvas_length=8, max_new_tokens=16), seeds=[2])
    assert end.ids_BT[0, 0] in allowed
    assert torch.equal(end.ids_BT[1], alone.ids_BT[0])


def test_sequence_logprobs_equal_those_of_one_forward_over_the_whole_text():
    before, texts = [2, 30, 31, 32], [[40, 41], [], [42, 43, 44, 45]]
    found = infill.sequence_logprobs(WRITER.engine, before, texts)
    for text, score in zip(texts, found, strict=True):
        ids = torch.tensor([[*before, *text]])
        with torch.inference_mode():
            cache = WRITER.model.new_cache(1, ids.shape[1])
            logs = WRITER.model.head(WRITER.model.encode(ids, cache)).log_softmax(-1)[0]
        direct = sum(float(logs[len(before) - 1 + at, token]) for at, token in enumerate(text))
        assert score == pytest.approx(direct, abs=1e-4)


def test_a_stop_token_in_the_text_does_not_end_it():
    stop = WRITER.tokenizer.decode([1], keep_special=True)
    assert WRITER.fill(f"a[[ 2 ]]{stop} b", seed=1).text.endswith(f"{stop} b")
    assert WRITER.fill("a[[ 2 ]] b<bos> c", seed=1, eos_token_ids=(1, 2)).text.endswith(" b<bos> c")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: WRITER.fill(""), "nothing to fill"),
        (lambda: WRITER.fill("no hole"), "nothing to fill: write a gap as [[ ]]"),
        (lambda: WRITER.fill("a\nb [[ c"), "'[[' on line 2 belongs to no gap"),
        (lambda: WRITER.fill("a ]] [[ ]]"), "']]' on line 1"),
        (lambda: WRITER.fill("[[ [[ ]] ]]"), "not nested"),
        (lambda: WRITER.fill("[[ -1 ]]"), "belongs to no gap"),
        (lambda: WRITER.fill("[[ 0 ]]"), "at least one token"),
        (lambda: WRITER.fill("a[[ 99999 ]]b"), "a gap of 99999 tokens does not fit the model's context of"),
        (lambda: WRITER.fill("a[[ ]]b", count=0), "count"),
        (lambda: WRITER.fill("a[[ ]]b", longest=0), "longest"),
        (lambda: WRITER.fill("a[[ ]]b", prefix="a"), "a text with gaps, or a prefix and a suffix"),
        (lambda: WRITER.fill(), "a text with gaps, or a prefix and a suffix"),
        (lambda: WRITER.fill("a[[ ]]b", context="c"), "context"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_tries_that_a_deadline_ends_before_they_run_are_no_infills(monkeypatch):
    """One slot: the first length runs, and the deadline passes while the others wait."""
    writer = Writer(WRITER.model, WRITER.tokenizer, WRITER.sampler, None, EngineConfig(max_running=1))
    first = []

    def is_late(request) -> bool:
        first.append(request)
        return request.status is RequestStatus.WAITING and request is not first[0]

    monkeypatch.setattr(Request, "is_late", property(is_late))
    found = writer.fill("one [[ ]] three", seed=1, longest=8, count=8)
    assert len(found) == 1
    monkeypatch.setattr(Request, "is_late", property(lambda request: request.status is RequestStatus.WAITING))
    found = writer.fill("one [[ ]] three", seed=1, longest=8)
    assert (found.gaps, found.settled) == (("",), False)
