"""Infilling scores: where gaps are cut, which programs pass, what is counted."""

import gzip
import json

import pytest
import tiny

from redraft.train.evals import infill
from redraft.train.evals.infill import Gap

CODE = 'def f(x):\n    """Words."""\n    y = x + 1\n    if y:\n        y = y * 2\n    return y\n'
TOKENIZER = tiny.byte_tokenizer()


def test_removed_lines_keep_their_indentation_and_are_statements():
    found = {gap.part for seed in range(20) for gap in infill.remove_lines([CODE], seed)}
    assert found == {"y = x + 1", "if y:", "y = y * 2"}
    (gap,) = infill.remove_lines([CODE])
    assert gap.before + gap.part + gap.after == CODE
    assert list(infill.remove_lines(["no code at all", "x = 1"])) == []


def test_removed_words_are_of_such_lines_and_the_rest_stays():
    found = {gap.part for seed in range(60) for gap in infill.remove_words([CODE], seed)}
    assert {"y", "x + 1", "if y:", "* 2", "="} <= found
    assert all(gap.before + gap.part + gap.after == CODE for seed in range(9) for gap in infill.remove_words([CODE], seed))
    assert not any("return" in part or "Words" in part for part in found)


def test_removed_sentences_are_neither_the_first_nor_the_last():
    text = 'One is here. Two is "it." Three goes! Four ends.'
    found = {gap.part for seed in range(20) for gap in infill.remove_sentences([text], seed)}
    assert found == {'Two is "it."', "Three goes!"}
    assert all(gap.before + gap.part + gap.after == text for gap in infill.remove_sentences([text]))
    assert list(infill.remove_sentences(["Only one. "])) == []


def test_humaneval_tasks_pass_with_their_own_solution(tmp_path):
    task = {
        "prompt": "def f(x):\n",
        "canonical_solution": "    return x + 1\n",
        "suffix": "\n",
        "entry_point": "f",
        "test": "def check(g):\n    assert g(1) == 2\n",
    }
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps(task) + "\n")
    (gap,) = infill.read_humaneval(tmp_path / "a.jsonl.gz")
    assert gap.passes(gap.part)
    assert not gap.passes("    return x\n")


def test_every_method_is_deterministic_and_counted(monkeypatch):
    monkeypatch.setattr(infill, "MAX_GAP_TOKENS", 6)  # lengths that the method "unknown" compares
    sampler = tiny.sampler(canvas_length=16, max_steps=3)
    gap = Gap("def f(x):\n    ", "y = x", "\n    return y\n")
    methods = infill.infill_methods(tiny.decided(tiny.BASE), TOKENIZER, sampler)
    assert set(methods) == {"known", "unknown", "hidden"}
    for method in methods.values():
        assert method(gap, 0) == method(gap, 0)
    counts = []
    found = infill.score([gap, gap], lambda gap, number: [gap.part, " y = z "][number], TOKENIZER, counts.append)
    assert found == {"exact": 0.5, "similarity": pytest.approx((1 + 8 / 12) / 2), "tokens_off": 1.0}
    assert counts == [1, 2]
    checked = Gap("", "x = 1", "", "\nassert x == 1\n")
    assert infill.score([checked], lambda *_: "x = 2", TOKENIZER, counts.append)["passes"] == 0.0
