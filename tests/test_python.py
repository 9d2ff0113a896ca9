"""Python and notebooks: HTML, short reprs, keywords that editors complete, asyncio, wrong types, the examples."""

import asyncio
import inspect
import re
import runpy
import sys
import threading
from dataclasses import fields
from html import unescape
from pathlib import Path
from typing import get_type_hints

import pytest
import tiny

import redraft
from redraft.constraints.constraints import Constraints
from redraft.tasks import keywords
from redraft.tasks.async_stream import AsyncStream
from redraft.tasks.sudoku.solve import Solution
from redraft.writer import Writer

WRITER = Writer(tiny.decided(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(canvas_length=16, max_steps=3))
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
EXAMPLES = [  # the short one is a test, the others are checked by `make soak`
    pytest.param(path, id=path.stem, marks=[pytest.mark.soak] if path.stem != "infill_and_edit" else [])
    for path in sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
]


def saying(text: str) -> Constraints:
    return Constraints(pins=dict(enumerate([*WRITER.tokenizer.encode(text), 1])))


def text_of(html: str) -> str:
    """The text that a browser shows."""
    return unescape(re.sub(r"<[^>]*>", "", html))


def test_an_answer_in_a_notebook():
    answer = WRITER.write("x", constraints=saying("a <b>&\nü"), seed=7, max_tokens=24)
    html = answer._repr_html_()
    assert "a &lt;b&gt;&amp;\nü</div>" in html
    assert text_of(html).startswith("a <b>&\nü")
    assert f"{answer.stats.new_tokens} tokens in {answer.stats.forwards} forwards" in html
    assert ("did not settle" in html) == (not answer.settled)
    settled = "" if answer.settled else ", settled=False"
    assert repr(answer) == f"Answer('a <b>&\\nü', {len(answer.ids)} tokens, 'stop'{settled}, seed=7)"


def test_a_draft_in_a_notebook_shows_which_tokens_are_accepted():
    events = list(WRITER.stream("Once", seed=1, max_tokens=32, constraints=Constraints(pins={0: 80})))
    drafts = [event for event in events if isinstance(event, redraft.Draft)]
    draft = next(draft for draft in drafts if not draft.accepted_BC.all())
    html = draft._repr_html_()
    grey = "".join(re.findall(r'<span style="color:#8a8a8a">(.*?)</span>', html, re.DOTALL))
    refused = [token for token, is_accepted in zip(draft.ids_BC[0], draft.accepted_BC[0], strict=True) if not is_accepted]
    assert len(unescape(grey)) <= len(refused)
    assert grey
    assert html.count("text-decoration:underline") == 1
    accepted = int(draft.accepted_BC[0].sum())
    assert repr(draft).endswith(f", block={draft.block}, step={draft.step}, {accepted} of 16 accepted)")
    assert max(len(repr(event)) for event in drafts) < 250
    assert all(repr(event).startswith("Committed(") for event in events if isinstance(event, redraft.Committed))


def test_a_filled_text_in_a_notebook_marks_its_gaps():
    for filled in (WRITER.fill("ab [[ 2 ]] cd [[ 3 ]] ef", seed=1), WRITER.fill(prefix="ab ", suffix=" cd", seed=1)):
        assert tuple(filled.text[start:end] for start, end in filled.spans) == filled.gaps
        html = filled._repr_html_()
        marked = re.findall(r'<span style="background:#22c55e44">(.*?)</span>', html, re.DOTALL)
        assert tuple(map(unescape, marked)) == tuple(gap for gap in filled.gaps if gap)
        assert text_of(html).startswith(filled.text)
        assert f"score {filled.score:.1f}" in html
        assert repr(filled).endswith(f"seed={filled.seed})")


def test_a_solution_in_a_notebook_is_a_board():
    board = tuple(map(int, SOLVED))
    wrong = (board[1], *board[1:])
    puzzle = (0, 0, *board[2:])
    solutions = [Solution(0, puzzle, cells, cells == board, True, True, 1, 4, 0, 0.1, 3) for cells in (board, wrong)]
    for solution in solutions:
        cells = re.findall(r"<td style=\"([^\"]*)\">(.)</td>", solution._repr_html_())
        assert "".join(digit for _, digit in cells) == "".join(map(str, solution.board))
        assert ["bold" in style or "ef4444" in style for style, _ in cells[2:]] == [True] * 79
        red = [number for number, (style, _) in enumerate(cells) if "ef4444" in style]
        assert red[:2] == ([] if solution.solved else [0, 1])
    assert repr(solutions[0]) == f"Solution('{SOLVED}', solved, 1 canvases, seed=3)"
    assert "not solved" in repr(solutions[1])


def test_a_writer_says_what_it_is():
    assert re.fullmatch(r"Writer\(\d\.\d million parameters, float32, cpu, check='off'\)", repr(WRITER))


def test_keywords_are_the_fields_of_the_records():
    sampler = {field.name for field in fields(redraft.SamplerConfig)}
    options = {field.name for field in fields(redraft.GenerationOptions)}
    assert set(get_type_hints(keywords.SamplerKeywords)) == sampler
    assert set(get_type_hints(keywords.GenerationKeywords)) == sampler | options
    assert set(get_type_hints(keywords.SudokuKeywords)) - sampler == {"canvases"}


@pytest.mark.parametrize("name", ["write", "chat", "stream", "astream", "fill", "edit", "solve_sudoku"])
def test_a_notebook_completes_every_keyword(name):
    """IPython completes from the signature; no method hides its keywords behind two stars."""
    parameters = inspect.signature(getattr(WRITER, name)).parameters
    assert "temperature" in parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


def test_every_listed_keyword_is_accepted():
    settings = {name: getattr(WRITER.sampler, name) for name in get_type_hints(keywords.SamplerKeywords)}
    expected = WRITER.fill("a [[ 1 ]] b", seed=1)
    assert WRITER.fill("a [[ 1 ]] b", **{**settings, "seed": 1, "longest": 3, "seconds": 60, "stop": None}) == expected
    assert WRITER.write("a", seed=1, **settings).ids == WRITER.write("a", seed=1).ids
    assert (Path(redraft.__file__).parent / "py.typed").is_file()


def test_streams_of_asyncio_give_the_answers_of_write():
    """Two at once, one awaited first; the third is closed early and leaves nothing behind."""

    async def read(prompt: str, *, awaits: bool) -> str:
        stream = WRITER.astream(prompt, seed=2, max_tokens=40)
        events = [event async for event in (await stream if awaits else stream)]
        assert isinstance(events[-1], redraft.Finished)
        return "".join(event.text for event in events if isinstance(event, redraft.Committed))

    async def read_all() -> list[str]:
        texts = await asyncio.gather(read("Once", awaits=True), read("Tom", awaits=False))
        stop = threading.Event()
        stream = WRITER.astream("Lily", seed=1, max_tokens=400, stop=stop)
        async for _ in stream:
            break
        await stream.aclose()
        assert stop.is_set()
        assert [event async for event in stream] == []
        return texts

    texts = asyncio.run(read_all())
    assert texts == [answer.text for answer in (WRITER.write(text, seed=2, max_tokens=40) for text in ("Once", "Tom"))]
    assert WRITER.engine.is_idle


def test_a_stream_that_is_cancelled_while_it_opens_stops_its_request():
    stop = threading.Event()
    is_opening = threading.Event()

    def start():
        is_opening.set()
        assert stop.wait(600)
        return iter(())

    async def cancel() -> None:
        task = asyncio.ensure_future(anext(AsyncStream(start, stop)))
        await asyncio.to_thread(is_opening.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert stop.is_set()

    asyncio.run(cancel())


WRONG_PROMPTS = (5, None, b"text", [1.5], ["a", 5], [None], [True], {"a": 1})


@pytest.mark.parametrize("method", ["write", "chat", "stream", "fill", "edit", "suggest", "decide"])
def test_a_text_of_another_type_is_refused_with_a_sentence(method):
    for value in WRONG_PROMPTS:
        if (method, value) == ("fill", None):
            continue  # then it asks for a prefix and a suffix
        choices = (["a", "b"],) if method == "decide" else ()
        with pytest.raises(ValueError, match=r"(string|text|prompt).* got "):
            getattr(WRITER, method)(value, *choices)


@pytest.mark.parametrize(
    ("method", "wrong", "words"),
    [
        ("write", {"seed": "1"}, "seed must be a whole number, got '1'"),
        ("write", {"seed": True}, "seed must be a whole number, got True"),
        ("write", {"stop": "END"}, "stop must be a threading.Event, which cancels the request once it is set, got 'END'"),
        ("write", {"seconds": "1"}, "seconds must be a number above 0, got '1'"),
        ("write", {"constraints": {"a": 1}}, "constraints must be redraft.Constraints or None, got {'a': 1}"),
        ("write", {"draft": [1.5]}, "draft must be a text or a list of token ids, got [1.5]"),
        ("write", {"think": "yes"}, "think must be True or False, got 'yes'"),
        ("write", {"candidates": "2"}, "candidates must be a whole number"),
        ("write", {"replay": 5}, "replay must be a Replay or None, got 5"),
        ("write", {"sampler": 5}, "sampler must be a dictionary of sampler settings, got 5"),
        ("write", {"options": {"seed": 1}}, "options must be a GenerationOptions, got {'seed': 1}: give single options as"),
        ("write", {"streamer": 5}, "a streamer has the methods put and end, as those of transformers do, got 5"),
        ("write", {"temperature": "hot"}, "temperature"),
        ("fill", {"count": 1.5}, "count must be a whole number"),
        ("fill", {"watch": 5}, "watch is a function that is called with every draft, got 5"),
        ("fill", {"stop": 5}, "stop must be a threading.Event"),
        ("edit", {"strength": "x"}, "strength is the share of tokens to replace, from 0 to 1, got x"),
        ("edit", {"keep": 5}, "keep must be a list of spans, got 5"),
        ("edit", {"keep": [(0.5, 1)]}, "a character of a span must be a whole number"),
        ("edit", {"instruction": 5}, "instruction must be a string, got 5"),
        ("edit", {"seed": 1.5}, "seed must be a whole number, got 1.5"),
    ],
)
def test_options_of_another_type_are_refused_with_a_sentence(method, wrong, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        getattr(WRITER, method)("a [[ 2 ]] b", **wrong)


@pytest.mark.parametrize("puzzle", [5, None, b"1", [1.5]])
def test_a_puzzle_of_another_type_is_refused(puzzle):
    with pytest.raises(ValueError, match="a puzzle is text or 81 whole numbers, got"):
        WRITER.solve_sudoku(puzzle)


@pytest.mark.parametrize("name", [5, None, b"folder"])
def test_a_checkpoint_of_another_type_is_refused(name):
    with pytest.raises(ValueError, match=r"a checkpoint is named by a folder, a file or a hub id, got"):
        redraft.load(name)


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path / "run"), "2"])
    names = runpy.run_path(str(path))
    assert capsys.readouterr().out.strip()
    match path.stem:
        case "write":
            alone = names["writer"].write("The cat", seed=2, canvas_length=32, max_tokens=32)
            assert names["answers"][1].ids == alone.ids
        case "infill_and_edit":
            assert names["edited"].text == names["text"].replace("a big the ball", "a big ball")
        case "structured_output":
            assert re.fullmatch(" [0-9]{4}-[01][0-9]-[0-3][0-9]", names["date"].text)
            assert (set(names["record"]), str(names["mood"]) in names["shares"]) == ({"name", "age", "mood"}, True)
        case "train_a_toy":
            assert (names["trainer"].step, len(names["answer"].ids) <= 32) == (2, True)
