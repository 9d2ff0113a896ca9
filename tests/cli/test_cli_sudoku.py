"""redraft sudoku on the command line, with the model that ships: one puzzle, a file, a terminal, mistakes."""

import contextlib
import csv
import io
import json
import sys
from types import SimpleNamespace

import pyte
import pytest
import torch
import transformers_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import DiffusionGemmaForBlockDiffusion

import redraft
from redraft.cli import main, sudoku
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import generate
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import encoding, generator, solve
from redraft.tasks.sudoku.board import BoardError
from redraft.tasks.sudoku.solve import FORBIDDEN
from redraft.train.evals import sudoku_lists
from redraft.train.sudoku_task import autoregressive_ids
from redraft.writer import DEFAULT_MODEL, SUDOKU_MODEL

PUZZLE = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


@pytest.fixture(name="writer", scope="module")
def _writer():
    return redraft.load("sudoku", dtype="float32")


@pytest.fixture(name="run")
def _run(monkeypatch, capsys):
    def run(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["redraft", "sudoku", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            main.main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


def easy(count: int) -> list[str]:
    chance = torch.Generator().manual_seed(5)
    puzzles = generator.remove_clues(generator.full_boards(count, chance), torch.full((count,), 34), chance)
    return [boards.to_line(tuple(board)) for board in puzzles.tolist()]


def test_the_model_is_small(writer):
    assert sum(file.stat().st_size for file in SUDOKU_MODEL.iterdir()) <= 8 * 2**20
    assert writer.tokenizer.decode([*encoding.DIGITS, *encoding.CLUES]).startswith("1 2 3")


def test_one_puzzle(run):
    code, out, err = run(PUZZLE, "--seed", "1")
    assert (code, out) == (0, boards.to_grid(boards.parse(SOLVED)) + "\n" + SOLVED + "\n")
    assert err.startswith("solved · ")
    assert "revisions" in err
    assert "seed 1" in err
    drawn = boards.to_grid(boards.parse(PUZZLE))
    assert run("-", "--seed", "1", stdin=drawn)[1] == out
    code, out, _ = run(PUZZLE, "--seed", "1", "--json")
    record = json.loads(out)
    assert (record["board"], record["solved"], record["canvases"], record["seed"]) == (SOLVED, True, 1, 1)


@pytest.mark.soak
def test_a_file_of_puzzles_comes_back_in_its_order(run, tmp_path, writer, monkeypatch):
    monkeypatch.setitem(solve.solve.__kwdefaults__, "rows", 4)
    puzzles = easy(10)  # three batches
    (tmp_path / "many.txt").write_text("\n".join(puzzles))
    code, out, err = run(str(tmp_path / "many.txt"), "--seed", "3")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["puzzle"] for row in rows] == puzzles
    assert all(boards.is_solution(boards.parse(row["board"]), boards.parse(row["puzzle"])) for row in rows)
    assert err.startswith("10 of 10 solved · ")
    found = writer.solve_sudoku(puzzles, seed=3)
    assert [boards.to_line(solution.board) for solution in found] == [row["board"] for row in rows]
    assert writer.solve_sudoku(boards.parse(puzzles[0]), seed=3).board == found[0].board
    code, out, _ = run(str(tmp_path / "many.txt"), "--seed", "3", "--json", "--out", str(tmp_path / "out.jsonl"))
    assert (code, out) == (0, "")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["board"] for line in lines] == [row["board"] for row in rows]


def test_an_interrupted_run_keeps_the_old_file_and_the_results_so_far(run, tmp_path, monkeypatch):
    puzzles = easy(3)
    (tmp_path / "many.txt").write_text("\n".join(puzzles))
    (tmp_path / "out.csv").write_text("old")
    format_solution = sudoku._format_solution

    def interrupt_at_the_third(solution, as_json):
        if solution.number == 2:
            raise KeyboardInterrupt
        return format_solution(solution, as_json)

    monkeypatch.setattr(sudoku, "_format_solution", interrupt_at_the_third)
    code, _, err = run(str(tmp_path / "many.txt"), "--seed", "3", "--out", str(tmp_path / "out.csv"))
    assert code == 130
    assert (tmp_path / "out.csv").read_text() == "old"
    (part,) = tmp_path.glob(".out.csv.part-*")
    assert f"the results so far are in {part}" in err
    assert [row["puzzle"] for row in csv.DictReader(io.StringIO(part.read_text()))] == puzzles[:2]


def test_a_wrong_board_is_reported_as_wrong(run, tmp_path):
    hard = "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4.."  # often called the hardest
    code, out, err = run(hard, "--seed", "1", "--no-check", "--steps", "1")
    assert code == 1
    assert err.startswith("WRONG: this board breaks the rules")
    assert not boards.is_solution(boards.parse(out.splitlines()[-1]), boards.parse(hard))
    (tmp_path / "two.txt").write_text(f"{PUZZLE}\n{hard}\n")
    code, out, err = run(str(tmp_path / "two.txt"), "--seed", "1", "--canvases", "1", "--steps", "3")
    assert code == 1
    assert "1 of 2 solved, 1 WRONG" in err
    assert out.splitlines()[2].split(",")[2] == "false"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (PUZZLE + "1", "this one has 82"),
        ("x" + PUZZLE[1:], "'x' (character 1)"),
        ("55" + PUZZLE[2:], "5 stands twice in row 1, at row 1 column 1 and row 1 column 2"),
        ("." * 81, "more than one solution"),
        ("12345678.........9" + "." * 63, "has no solution"),
        ("nothing.txt", "there is no file 'nothing.txt'"),
        ("puzzles17.txt", "there is no file 'puzzles17.txt'"),
        ("/", "'/' is a folder; give a file of puzzles"),
        (
            ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4.........",
            "not known after 50,000 guesses",
        ),
        ("", "81 cells, this one has 0"),
    ],
)
def test_mistakes_are_one_sentence(run, given, words):
    code, out, err = run(given)
    assert (code, out) == (2, "")
    assert err.startswith("redraft: ")
    assert words in err
    assert err.count("\n") == 1


def test_mistakes_in_a_file_name_their_line(run, tmp_path):
    (tmp_path / "bad.txt").write_text(f"{PUZZLE}\n{'.' * 81}\n")
    assert "bad.txt, line 2: this puzzle has more than one solution" in run(str(tmp_path / "bad.txt"))[2]
    (tmp_path / "bad.txt").write_text(f"{PUZZLE}\n{PUZZLE[:-1]}x\n")
    assert "line 2: 'x' (character 81)" in run(str(tmp_path / "bad.txt"))[2]
    (tmp_path / "bad.txt").write_text("")
    assert "there is no puzzle in it" in run(str(tmp_path / "bad.txt"))[2]
    (tmp_path / "bad.txt").write_bytes(b"\0" * 300_000)
    assert run(str(tmp_path / "bad.txt"))[2].count("\n") == 1
    (tmp_path / "good.txt").write_bytes(b"\xef\xbb\xbfpuzzle\r\n" + PUZZLE.encode() + b"\r\n")
    assert run(str(tmp_path / "good.txt"), "--seed", "1")[0] == 0
    (tmp_path / "old.csv").write_text("old")
    assert "at least one canvas" in run(PUZZLE, "--canvases", "0", "--out", str(tmp_path / "old.csv"))[2]
    assert (tmp_path / "old.csv").read_text() == "old"
    assert not list(tmp_path.glob(".*"))
    assert "there is no folder" in run(PUZZLE, "--out", str(tmp_path / "no" / "out.csv"))[2]
    assert "was not made for Sudoku boards" in run(PUZZLE, "-m", "tiny")[2]


@pytest.mark.soak
@settings(max_examples=200, deadline=None)
@given(st.text(max_size=100) | st.text(alphabet="0123456789.*|\n- ", max_size=200))
def test_any_argument_is_a_puzzle_or_gives_a_one_sentence_error(text):
    with contextlib.suppress(BoardError):
        ((_, board),) = sudoku.read_argument(text.replace("-", ".") if text == "-" else text)
        assert len(board) == 81


def test_a_terminal_shows_the_board_settle(writer):
    screen = pyte.Screen(60, 20)
    stream, written = pyte.Stream(screen), io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, height=20, color_system="standard")
    puzzle = boards.parse(PUZZLE)
    events = list(writer.sudoku_events([puzzle], seed=1))
    solution = sudoku.draw_steps(iter(events), puzzle, console)
    stream.feed(written.getvalue().replace("\n", "\r\n"))
    shown = [line.rstrip() for line in screen.display if line.strip()]
    assert "".join(c for line in shown for c in line if c.isdigit()) == SOLVED
    assert boards.to_line(solution.board) == SOLVED
    assert "step 1" in written.getvalue()
    assert screen.buffer[0][0].bold  # a clue
    assert not screen.buffer[0][4].bold
    clash = sudoku.draw_board((5, 5, *puzzle[2:]), puzzle, puzzle, [True] * 81)
    styles = [str(span.style) for span in clash.spans]
    assert "bold red" in styles
    changed = sudoku.draw_board((*puzzle[:2], 4, *puzzle[3:]), puzzle, puzzle, [True] * 81)
    assert "green reverse" in [str(span.style) for span in changed.spans]


@pytest.mark.soak
def test_easy_puzzles_are_solved_on_one_canvas_in_a_few_steps(writer):
    listed = sudoku_lists.generate_list(60)
    found = sudoku_lists.score(writer.model, listed, writer.sampler, canvases=1, rows=64, progress=lambda done: None)
    assert (found["one_canvas"], found["clues_kept"], found["cells"]) == (1.0, 1.0, 1.0)
    assert found["forwards_one_canvas_most"] <= 16
    assert found["right_after"][15] == 1.0
    assert found["right_after"][0] < 1.0
    assert sum(part["puzzles"] for part in found["by_guesses"].values()) == 60


@pytest.mark.parametrize("wrong", [None, 5, [1, 2], [[1] * 81, None], torch.zeros(81), ["x"], [1.5] * 81, [10] * 81])
def test_what_is_no_puzzle_is_refused(writer, wrong):
    with pytest.raises((BoardError, TypeError)) as caught:
        writer.solve_sudoku(wrong)
    assert isinstance(caught.value, BoardError) or not hasattr(wrong, "__iter__")


@pytest.mark.soak
def test_the_autoregressive_score_equals_the_plain_loop(writer):
    """The plain loop has no KV cache: it encodes everything again for each cell."""
    listed = sudoku_lists.generate_list(2)
    scores = sudoku_lists.score_autoregressive(writer.model, listed, rows=1)
    puzzles = torch.tensor(listed.puzzles)
    digits = puzzles[:, :0]
    for cell in range(81):
        ids = autoregressive_ids(puzzles, digits, 2)
        with torch.inference_mode():
            hidden = writer.model.encode(ids, writer.model.new_cache(2, ids.shape[1]))
            logits = writer.model.head(hidden[:, -1])[:, encoding.DIGITS.start : encoding.DIGITS.stop]
        digit = torch.where(puzzles[:, cell] > 0, puzzles[:, cell], logits.argmax(dim=-1) + 1)
        digits = torch.cat([digits, digit[:, None]], dim=1)
    right_cells = float((digits == torch.tensor(listed.solutions)).float().mean())
    assert abs(scores["cells"] - right_cells) < 1e-6
    assert scores["exact"] == 0.0  # it was not trained for that


def test_boards_written_as_text_are_parsed_and_compared(monkeypatch):
    listed = sudoku_lists.generate_list(3)
    reader = redraft.Tokenizer.from_folder(DEFAULT_MODEL)
    answers = [encoding.board_text(listed.solutions[0]), "no board", encoding.board_text(listed.solutions[1])]

    def pretend(model, prompts, cfg, *, seeds, adapter):
        assert [reader.decode(ids) for ids in prompts] == [encoding.prompt_text(puzzle) for puzzle in listed.puzzles]
        ids = [reader.encode(text) for text in answers]
        padded = torch.tensor([row + [0] * (200 - len(row)) for row in ids])
        yield SimpleNamespace(ids_BT=padded, stats=[SimpleNamespace(steps=n) for n in (4, 5, 6)])

    monkeypatch.setattr(sudoku_lists, "generate", pretend)
    found = sudoku_lists.score_text(None, reader, listed, None, 8)
    assert found == {"puzzles": 3, "boards": 2 / 3, "clues_kept": 1 / 3, "exact": 1 / 3, "steps": 5.0}


@pytest.mark.soak
def test_transformers_loads_it_and_gives_the_same_tokens(writer, monkeypatch):
    other = DiffusionGemmaForBlockDiffusion.from_pretrained(SUDOKU_MODEL, dtype=torch.float32).eval()
    prompt = [writer.model.config.bos_token_id, *encoding.NAMES]
    cfg = writer.sampler.changed(max_steps=6)
    *_, page, _ = generate(writer.model, [prompt], cfg, seeds=[4], constraints=[Constraints()])
    with transformers_reference.our_draws(monkeypatch, [4]):
        found = transformers_reference.generate(other, torch.tensor([prompt]), cfg)
    ours = page.ids_BC[0].tolist()
    assert found.sequences[0, len(prompt) :].tolist()[:81] == ours
    assert set(FORBIDDEN).isdisjoint(encoding.DIGITS)
