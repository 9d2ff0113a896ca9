"""Edits: nothing at strength 0, kept spans unchanged, at most the share of tokens, all other text unchanged."""

import json
import os
import re
import stat

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.cli import edit as cli_edit
from redraft.config import EngineConfig
from redraft.constraints.constraints import ConstraintEdit
from redraft.diffusion.generate import Committed, Draft
from redraft.engine import Intervention, Replay
from redraft.tasks import edit
from redraft.writer import Writer

WRITER = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=3))
SMALL_WRITER = Writer(
    tiny.decided(tiny.CONFIGS["one layer"]), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=2)
)


def has_no_special_token(text: str) -> bool:
    """Special tokens, such as <bos>, are refused in a text."""
    return all(WRITER.tokenizer.token_bytes[token] is not None for token in WRITER.tokenizer.encode(text))


TEXT = st.text(st.characters(codec="utf-8"), max_size=40).filter(has_no_special_token)

EDITS = given(TEXT, st.floats(0, 1), st.integers(0, 99), st.data())


@settings(max_examples=40, deadline=None)
@EDITS
def test_kept_spans_stay_and_at_most_the_share_of_tokens_changes(text, strength, seed, data):
    check_edit(text, strength, seed, data)


@pytest.mark.soak_long
@settings(max_examples=400, deadline=None)
@EDITS
def test_kept_spans_stay_in_any_edit(text, strength, seed, data):
    check_edit(text, strength, seed, data)


def check_edit(text, strength, seed, data) -> None:
    """A kept span stays, no more than the share of tokens changes, and the changes rebuild the text."""
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2)))
    edited = SMALL_WRITER.edit(text, strength=strength, keep=[tuple(ends)], seed=seed)
    assert edited == SMALL_WRITER.edit(text, strength=strength, keep=[tuple(ends)], seed=seed)
    ids = SMALL_WRITER.tokenizer.encode(text)
    options = {"strength": strength, "keep_positions": (), "forbidden": (), "prompt": [2], "seed": seed}
    new, _, _ = edit.redraft_tokens(SMALL_WRITER.engine, ids, SMALL_WRITER.sampler, **options)
    assert sum(a != b for a, b in zip(ids, new, strict=True)) <= strength * len(ids) + 1e-6
    rebuilt, at = "", 0
    for change in edited.changes:
        assert text[change.start : change.end] == change.old != change.new
        assert change.end <= ends[0] or change.start >= ends[1] or ends[0] == ends[1]
        rebuilt += text[at : change.start] + change.new
        at = change.end
    assert edited.text == rebuilt + text[at:]
    assert strength > 0 or edited.text == text
    assert edited.before == text


def test_an_edit_says_what_has_changed():
    edits = (WRITER.edit("one line\nanother line\n", strength=0.4, seed=seed) for seed in range(6))
    edited = next(edited for edited in edits if edited.changes)  # bytes at random are seldom letters: the rest stays
    assert edited.text != edited.before
    assert edited.diff("a").startswith("--- a\n+++ a\n@@")
    assert WRITER.edit("same", strength=0.0, seed=1).diff() == ""
    odd = edit.Edited("a\fb\nc", "a\fx\nc", (), True, 1, 1)
    assert odd.diff() == "--- text\n+++ text\n@@ -1,2 +1,2 @@\n-a\fx\n+a\fb\n c\n\\ No newline at end of file\n"
    assert str(edited) == edited.text


def edited(replay=None, text="some words that are there to be others", **options):
    """Events of an edit over three canvases, of which the last is short."""
    options = {"strength": 0.6, "seed": 3, "replay": replay, **options}
    return list(edit.stream_edit(WRITER.engine, WRITER.tokenizer, text, WRITER.sampler, **options))


def canvases_of(found):
    return tuple(tuple(event.ids_BC[0].tolist()) for event in found if isinstance(event, Committed))


def test_a_resumed_edit_equals_the_unbroken_one():
    whole = edited()
    assert [len(page) for page in canvases_of(whole)] == [16, 16, 6]
    for had in (0, 1, 2):
        again = edited(Replay(canvases_of(whole)[:had], (Intervention(had, 1, ConstraintEdit()),)))
        assert canvases_of(again) == canvases_of(whole)[had:]
        assert again[-1].text == whole[-1].text
        assert again[-1].changes == whole[-1].changes


def test_interventions_pin_and_open_positions_of_an_edit():
    whole, ids = edited(), WRITER.tokenizer.encode("some words that are there to be others")
    held = {at for at, (a, b) in enumerate(zip(ids, sum(canvases_of(whole), ()), strict=True)) if a == b}
    letter, (kept, later) = WRITER.tokenizer.encode("Z")[0], (min(held), max(held))
    more = ConstraintEdit(pins={1: letter, 20: letter}, bans=((kept, ids[kept]), (later, ids[later])))
    found = edited(Replay((), (Intervention(0, 1, more),)))
    new = sum(canvases_of(found), ())
    assert (new[1], new[20]) == (letter, letter)
    assert new[kept] != ids[kept]
    assert new[later] != ids[later]
    again = edited(Replay(canvases_of(found)[:1], (Intervention(0, 1, more), Intervention(1, 1, ConstraintEdit()))))
    assert canvases_of(again) == canvases_of(found)[1:]


def test_an_unchanged_canvas_is_opened_before_its_first_step():
    letter = WRITER.tokenizer.encode("Z")[0]
    found = edited(Replay((), (Intervention(0, 0, ConstraintEdit(pins={2: letter}, bans=((5, 111),))),)), keep=[(0, 16)])
    assert found[-1].text[2] == "Z"
    with pytest.raises(ValueError, match="at strength 0 nothing is redrafted"):
        edited(Replay((), (Intervention(0, 1, ConstraintEdit()),)), strength=0.0)


def test_unchanged_canvases_are_committed_too():
    found = edited(keep=[(0, 16)])
    assert [event.block for event in found if isinstance(event, Committed)] == [0, 1, 2]
    assert not any(isinstance(event, Draft) and event.block == 0 for event in found)


@pytest.mark.parametrize(
    ("replay", "words"),
    [
        (Replay(((1, 2),)), "canvas 0 of this text has 16 tokens, got 2"),
        (Replay(((9999,) * 16,)), "the token 9999 is no text"),
        (Replay((), (Intervention(0, 0, ConstraintEdit(pins={3: 1})),)), "the token 1 is no text"),
        (
            Replay((), (Intervention(1, 3, ConstraintEdit()),)),
            "canvas 1, step 3 to intervene at: the last possible is canvas 2, step 2",
        ),
        (
            Replay((), (Intervention(1, 1, ConstraintEdit()), Intervention(0, 1, ConstraintEdit()))),
            "canvas 0, step 1 comes too late",
        ),
        (Replay((), (Intervention(0, 1, ConstraintEdit(pins={38: 3})),)), "position 38 is beyond the text's 38 tokens"),
        (Replay((), (Intervention(9, 1, ConstraintEdit()),)), "no canvas 9, step 1 to intervene at"),
        (
            Replay((), (Intervention(0, 1, ConstraintEdit()),)),
            "canvas 0 has nothing to redraft at strength 0.6: raise it, or intervene at step 0",
        ),
    ],
)
def test_a_replay_of_another_text_is_refused(replay, words):
    with pytest.raises(ValueError, match=words):
        edited(replay, keep=[(0, 16)])


def test_an_instruction_is_read_before_the_text(monkeypatch):
    read = []
    monkeypatch.setattr(
        WRITER.engine, "add", lambda prompt, *a, add=WRITER.engine.add, **k: read.append(prompt) or add(prompt, *a, **k)
    )
    WRITER.edit("some words", "Say it better.", strength=0.3, seed=1)
    assert "Say it better.\n\nsome words" in WRITER.tokenizer.decode(read[0])
    WRITER.edit("some words", strength=0.3, seed=1)
    assert list(read[1]) == WRITER.tokenizer.encode_prompt("")


def test_logprob_margins():
    logs = torch.log_softmax(torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [1.0, 0.0, 0.0]]), dim=-1)
    assert edit.logprob_margins(logs, [0, 0, 1]).tolist() == pytest.approx([0.0, 5.0, 1.0])


def test_scores_and_canvases_follow_one_cache(monkeypatch):
    """An edit that finds nothing in the prefix cache makes the same changes, and encodes 5 times as much."""
    encoded = []
    encode = WRITER.model.encode
    monkeypatch.setattr(WRITER.model, "encode", lambda ids, *rest: encoded.append(ids.numel()) or encode(ids, *rest))
    text = "some words that are there to be others, " * 6  # 15 canvases
    edits = []
    for entries in (0, 1):
        config = EngineConfig(prefix_cache_entries=entries)
        writer = Writer(WRITER.model, WRITER.tokenizer, WRITER.sampler, config=config)
        encoded.clear()
        edits.append((writer.edit(text, strength=0.4, keep=[(20, 100)], seed=3), sum(encoded)))
        assert writer.engine.scheduler.used == 0
    (plain, plain_work), (cached, cached_work) = edits
    assert plain.changes
    assert cached == plain
    assert cached_work <= len(text) + 2  # the start token alone is encoded for the score and for the canvas
    assert plain_work > 5 * cached_work


def test_nothing_is_suggested_for_nothing():
    assert WRITER.suggest("") == []
    assert WRITER.edit("", seed=1).text == ""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: WRITER.edit("text", strength=1.5), "strength is the share of tokens to replace, from 0 to 1, got 1.5"),
        (lambda: WRITER.edit("text", strength=float("nan")), "nan"),
        (lambda: WRITER.edit("text", keep=[(2, 9)]), "the span 2 to 9 is outside of the text, which has 4 characters"),
        (lambda: WRITER.edit("text", keep=(0, 3)), "a span is a pair of a start and an end, got 0"),
        (lambda: WRITER.edit("a<eos>b"), "'<eos>', a special token"),
        (lambda: WRITER.edit("long " * 200), "the text has 1000 tokens after a prompt of 1, but the model's context is"),
        (lambda: WRITER.edit("text", temperature=0.5), "temperature has no meaning for repairs, which draw nothing"),
        (lambda: WRITER.suggest("long " * 2000), "take it in parts"),
        (lambda: WRITER.suggest("a", least=0.5), "least must be a number above 1, got 0.5"),
        (lambda: WRITER.suggest("a", most=0), "most must be a whole number from 1"),
    ],
)
def test_mistakes_are_named(call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


@pytest.fixture
def shipped(monkeypatch):
    monkeypatch.setattr("redraft.writer.load", lambda *args, **kwargs: WRITER)


def test_the_commands(shipped, tmp_path, capsys, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("ab [[ 2 ]] cd\n")
    cli_edit.fill(str(file), seed=1)
    text = capsys.readouterr().out
    assert text.startswith("ab ")
    assert text.endswith(" cd\n")
    cli_edit.fill(str(file), seed=1, as_json=True)
    assert json.loads(capsys.readouterr().out)["text"] == text
    cli_edit.fill(str(file), seed=1, count=2, as_json=True)
    assert len(json.loads(capsys.readouterr().out)) == 2
    os.chmod(file, 0o640)
    cli_edit.fill(str(file), seed=1, write=True)
    assert file.read_text() == text
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    seed = next(seed for seed in range(20) if WRITER.edit(text, strength=0.3, seed=seed).changes)
    cli_edit.edit(str(file), strength=0.3, seed=seed)
    edited = capsys.readouterr().out
    cli_edit.edit(str(file), strength=0.3, seed=seed, write=True)
    assert file.read_text() == edited != text
    assert os.listdir(tmp_path) == ["a.txt"]
    monkeypatch.setattr(WRITER, "suggest", lambda text: [edit.Suggestion(1, 2, "b", 0.125, (("c", 0.5),))])
    cli_edit.edit(str(file), suggest=True)
    assert capsys.readouterr().out == "1:2: 'b' 12.5%; rather 'c' 50%\n"


def test_commands_say_what_is_wrong(shipped, tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"a\xff [[ ]]")
    with pytest.raises(ValueError, match=r"is not UTF-8 text: byte 1 is 0xff"):
        cli_edit.fill(str(file))
    with pytest.raises(ValueError, match="--write replaces a file"):
        cli_edit.edit("-", write=True)
    file.write_text("fine")
    with pytest.raises(ValueError, match="--suggest changes nothing"):
        cli_edit.edit(str(file), suggest=True, write=True)


def test_a_file_is_replaced_atomically(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cli_edit.write_text(file, "new")
    assert (file.read_text(), os.listdir(tmp_path)) == ("old", ["a.txt"])
