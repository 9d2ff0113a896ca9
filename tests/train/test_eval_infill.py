"""Parts taken out of texts and put back: where they are cut, how programs are run, what is counted."""

import gzip
import json

import pytest
import tiny

from redraft.train.evals import infill
from redraft.train.evals.infill import Missing

CODE = 'def f(x):\n    """AutomatonCompiler."""\n    y = x + 1\n    if y:\n        y = y * 2\n    return y\n'
TOKENIZER = tiny.byte_tokenizer()


def test_lines_leave_their_indentation_and_are_of_the_code():
    found = {one.part for seed in range(20) for one in infill.lines([CODE], seed)}
    assert found == {"y = x + 1", "if y:", "y = y * 2"}
    (one,) = infill.lines([CODE])
    assert one.before + one.part + one.after == CODE
    assert list(infill.lines(["no code at all", "x = 1"])) == []


def test_words_are_of_such_lines_and_what_follows_stays():
    found = {one.part for seed in range(60) for one in infill.words([CODE], seed)}
    assert {"y", "x + 1", "if y:", "* 2", "="} <= found
    assert all(one.before + one.part + one.after == CODE for seed in range(9) for one in infill.words([CODE], seed))
    assert not any("return" in one or "AutomatonCompiler" in one for one in found)


def test_sentences_are_neither_the_first_nor_the_last():
    text = 'One is here. Two is "it." Three goes! Four ends.'
    found = {one.part for seed in range(20) for one in infill.sentences([text], seed)}
    assert found == {'Two is "it."', "Three goes!"}
    assert all(one.before + one.part + one.after == text for one in infill.sentences([text]))
    assert list(infill.sentences(["Only one. "])) == []


def test_programs_run_apart_and_with_limits(tmp_path):
    assert infill.runs("assert 1 + 1 == 2")
    assert not infill.runs("assert 1 + 1 == 3")
    assert not infill.runs("this is no program")
    assert not infill.runs("x = bytearray(3 << 30)")
    assert not infill.runs("open('a', 'w').write('x' * 10); open('a').read()[0]")
    assert not infill.runs("import os; assert os.environ.get('PATH')")


def test_a_program_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(infill, "SECONDS", 0.2)
    assert not infill.runs("while True: pass")


def test_humanevals_tasks_pass_with_their_own_part(tmp_path):
    task = {
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x + 1\n",
        "suffix": "\n",
        "entry_point": "f",
        "test": "def check(g):\n    assert g(1) == 2\n",
    }
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(task) + "\n")
    (one,) = infill.humaneval(tmp_path / "a.jsonl.gz")
    assert one.passes(one.part)
    assert not one.passes("    return x\n")


def test_every_way_puts_something_back_and_is_counted():
    sampler = tiny.sampler(canvas_length=16, max_steps=3)
    one = Missing("def f(x):\n    ", "y = x", "\n    return y\n")
    ways = infill.ways(tiny.decided(tiny.BASE), TOKENIZER, sampler)
    assert set(ways) == {"known", "unknown", "hidden"}
    for way in ways.values():
        assert way(one, 0) == way(one, 0)
    told = []
    found = infill.score([one, one], lambda one, number: [one.part, " y = z "][number], TOKENIZER, told.append)
    assert found == {"exact": 0.5, "similarity": pytest.approx((1 + 8 / 12) / 2), "tokens_off": 1.0}
    assert told == [1, 2]
    checked = Missing("", "x = 1", "", "\nassert x == 1\n")
    assert infill.score([checked], lambda *_: "x = 2", TOKENIZER, told.append)["passes"] == 0.0
