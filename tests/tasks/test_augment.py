"""Variants: kept spans stay, chosen spans may change, a resumed run equals the unbroken one."""

import json
import re

import pytest
import tiny

from redraft.cli import augment as cli_augment
from redraft.tasks import augment
from redraft.tasks.augment import Plan, choose_spans
from redraft.tasks.edit import TokenizedText
from redraft.writer import Writer

WRITER = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=3))
TEXTS = ["one two three four five six", "name: Ann, age: 41", "x", "a longer text that has more than one page in it"]


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.writer.load", lambda *args, **kwargs: WRITER)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n\n" for number, text in enumerate(TEXTS)))
    return path


def test_spans_are_words_up_to_the_share_or_what_matches():
    for seed in range(30):
        found = choose_spans(TEXTS[0], Plan(share=0.5), seed)
        assert len(found) == 3
        assert found == sorted(found)
        assert all(re.fullmatch(r"\w+", TEXTS[0][a:b]) for a, b in found)
    assert choose_spans(TEXTS[1], Plan(regex=r"\d+"), 0) == [(16, 18)]
    assert all(
        TEXTS[0][a:b] != "two" for seed in range(30) for a, b in choose_spans(TEXTS[0], Plan(share=0.9, keep="two"), seed)
    )
    assert choose_spans("...", Plan(share=1.0), 0) == []


def test_text_outside_of_the_spans_is_unchanged():
    for found, text in zip(
        augment.variants(WRITER.engine, WRITER.tokenizer, list(enumerate(TEXTS)), WRITER.sampler, Plan(count=6, share=0.4)),
        TEXTS,
        strict=True,
    ):
        assert len({one.text for one in found}) == len(found)
        for one in found:
            at, begin = 0, 0
            for a, b in one.spans:  # letters between the spans are there, in order
                at = one.text.index(text[begin:a], at) + a - begin
                begin = b
            assert one.text.endswith(text[begin:])
            assert one.text != text


def test_a_variant_is_the_same_alone_and_among_others():
    plan = Plan(count=3, share=0.5, seed=4)
    together = list(augment.variants(WRITER.engine, WRITER.tokenizer, list(enumerate(TEXTS)), WRITER.sampler, plan))
    for number, text in enumerate(TEXTS):
        alone = augment.variants(WRITER.engine, WRITER.tokenizer, [(number, text)], WRITER.sampler, plan)
        assert list(alone) == [together[number]]


@pytest.mark.soak
def test_a_resumed_run_equals_the_unbroken_one(records, tmp_path, capsys):
    options = {"count": 5, "share": "60%", "seed": 2}
    cli_augment.augment(str(records), str(tmp_path / "a.jsonl"), **options)
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    assert re.search(
        r"\d+ variants of 4 records, \d+ dropped .* variants/s, \d+ tokens/s", " ".join(capsys.readouterr().err.split())
    )
    assert len({json.loads(line)["text"] for line in lines}) == len(lines) > 3
    for line in lines:
        record = json.loads(line)
        assert record["id"] == record["redraft"]["record"]
        assert TokenizedText(WRITER.tokenizer, record["text"])
    for cut in (0, 1, 3, len(lines)):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(b"".join(lines[:cut]) + b'{"id": 1, "te')
        cli_augment.augment(str(records), str(path), resume=True, **options)
        assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"share": "many"}, "--share is a share of words such as 30% or 0.3, got 'many'"),
        ({"share": "0%"}, "got 0%"),
        ({"share": "130%"}, "got 130%"),
        ({"count": 0}, "at least 1 variant"),
        ({"regex": "("}, "'(' is not a regular expression"),
        ({"keep": "["}, "'[' is not a regular expression"),
        ({"field": "body"}, "line 1 of"),
        ({"out": "in.jsonl"}, "exists already"),
    ],
)
def test_mistakes_are_named(records, options, words):
    out = records.with_name(options.pop("out", "out.jsonl"))
    with pytest.raises(ValueError, match=re.escape(words)):
        cli_augment.augment(str(records), str(out), **options)
    assert records.name == out.name or not out.exists()


def test_files_of_other_origin_are_refused(records, tmp_path):
    with pytest.raises(ValueError, match="was not written by redraft augment"):
        cli_augment.augment(str(records), str(records), resume=True)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"line 2 of .* is not JSON"):
        cli_augment.augment(str(tmp_path / "bad.jsonl"), str(tmp_path / "o.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no records"):
        cli_augment.augment(str(tmp_path / "empty.jsonl"), str(tmp_path / "o.jsonl"))


def test_nothing_is_lost_by_a_run_that_cannot_go_on(records, tmp_path, monkeypatch):
    out = tmp_path / "o.jsonl"
    cli_augment.augment(str(records), str(out), count=5, share="60%")
    before = out.read_bytes()

    def fail(*args, **kwargs):
        raise ValueError("no such model")

    for options, words in [
        ({"seed": 1}, "other options"),
        ({"share": "50%"}, "other options"),
        ({"count": 1}, "other options"),
    ]:
        with pytest.raises(ValueError, match=words):
            cli_augment.augment(str(records), str(out), resume=True, **{"count": 5, "share": "60%", **options})
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text(json.dumps({"text": TEXTS[0]}) + "\n")
    with pytest.raises(ValueError, match="other records"):
        cli_augment.augment(str(fewer), str(out), resume=True, count=5, share="60%")
    monkeypatch.setattr("redraft.writer.load", fail)
    with pytest.raises(ValueError, match="no such model"):
        cli_augment.augment(str(records), str(out), resume=True, count=5, share="60%")
    assert out.read_bytes() == before


def test_a_record_that_cannot_be_used_is_named_before_anything_is_made(records, tmp_path):
    records.write_text(json.dumps({"text": "fine"}) + "\n" + json.dumps({"text": "a<eos>b"}) + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*'<eos>', a special token"):
        cli_augment.augment(str(records), str(tmp_path / "o.jsonl"))
    records.write_text(json.dumps({"text": "long " * 200}) + "\n")
    with pytest.raises(ValueError, match=r"line 1 of .*the text has 1000 tokens"):
        cli_augment.augment(str(records), str(tmp_path / "o.jsonl"))
    assert not (tmp_path / "o.jsonl").exists()


def test_any_json_is_read_and_written(records, tmp_path):
    records.write_bytes('\ufeff{"text": "one\u2028two three", "id": "\\ud800"}\n'.encode())
    cli_augment.augment(str(records), str(tmp_path / "o.jsonl"), share="100%", count=8)
    lines = (tmp_path / "o.jsonl").read_bytes().split(b"\n")[:-1]
    assert lines
    assert all(json.loads(line)["id"] == "\ud800" for line in lines)
    assert choose_spans("abc", Plan(share=1.0, keep="x*"), 0) == [(0, 3)]
