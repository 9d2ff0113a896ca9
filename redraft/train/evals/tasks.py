"""The scores of a model card, a task each: which texts, which protocol, which numbers. What they mean is in `measures.py`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

from redraft.config import SamplerConfig
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.data import open_text
from redraft.train.evals import extraction, measures, sudoku_lists
from redraft.train.evals import infill as infill_cases
from redraft.train.evals.judge import LlamaJudge

PROMPT = "Once upon a time"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the tasks can be told."""

    data: Path
    judge: str
    count: int
    levels: int
    canvas: int | None
    canvases: int = 64
    picture: Path | None = None
    tell: Callable[[str], None] = lambda text: None


def stories(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Likelihood and repair on real TinyStories: paragraphs of more than 300 characters, each alone."""
    texts = paragraphs(options.data / "stories/tinystories_val_a.txt.xz", options.count)
    block = options.canvas or 64
    spoken = measures.autoregressive(model, tokenizer, texts)
    denoised = measures.nelbo(model, tokenizer, texts, block, options.levels)
    found = {
        "texts": len(texts),
        "block": block,
        "ar_bits_per_byte": spoken.bits_per_byte,
        "ar_nats_per_token": spoken.nats_per_token,
        "nelbo_bits_per_byte": denoised.bits_per_byte,
        "nelbo_over_ar": denoised.nats / spoken.nats,
    }
    for looks in (1, 2):
        for level, (kept, mended) in measures.repair(model, tokenizer, texts, block, looks).items():
            found |= {f"kept_{level}_look{looks}": kept, f"mended_{level}_look{looks}": mended}
    return found


def paragraphs(path: Path, count: int) -> list[str]:
    """The first paragraphs longer than 300 characters."""
    with open_text(path) as file:
        return [text for text in file.read().split("\n\n") if len(text) > 300][:count]


def samples(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Drafted stories beside spoken ones of the same weights and the same entropy, under a judge."""
    sampler = sampler.changed(canvas_length=options.canvas)
    judge = LlamaJudge(options.judge, model.device)
    pages = measures.drafted(model, tokenizer, PROMPT, options.count, sampler)

    def generate_autoregressive(temperature: float) -> measures.Sampled:
        return measures.spoken(model, tokenizer, PROMPT, options.count, sampler, temperature)

    found = measures.compare(pages, PROMPT, judge, generate_autoregressive)
    return {
        "samples": options.count,
        "canvas": sampler.canvas_length,
        "perplexity": found.drafted,
        "perplexity_left_to_right": found.spoken,
        "ratio": found.ratio,
        "entropy": pages.entropy,
        "length": pages.length,
        "tokens_per_forward": pages.tokens_per_forward,
        "left_to_right": [[number and round(number, 4) for number in point] for point in found.curve],
        "first": pages.texts[0],
    }


def code(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Lines of Python functions put back, with what follows in sight and without.

    Packages copy from one another: a hole is new if no training function has its line between the same two neighbours.
    """
    sampler = sampler.changed(canvas_length=options.canvas)
    taken = measures.holes(tokenizer, functions(options.data / "code/pyfuncs_eval.jsonl.xz"), longest=32)[: options.count]
    known = {three for text in functions(options.data / "code/pyfuncs_train.jsonl.xz") for three in threes(text)}
    new = [place(tokenizer, hole) not in known for hole in taken]
    found = {"holes": len(taken), "new": sum(new), "canvas": sampler.canvas_length}
    ways = {
        "filled": measures.filled(model, tokenizer, taken, sampler),
        "left_to_right": measures.continued(model, tokenizer, taken),
    }
    for way, answers in ways.items():
        found[way] = measures.exact(answers, taken)
        found[f"{way}_new"] = measures.exact(list(compress(answers, new)), list(compress(taken, new)))
    return found


def infill(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Lines, words, sentences and HumanEval's holes put back: length known, to be found, and with what follows hidden."""
    folder = options.data / "code"
    code = functions(folder / "pyfuncs_eval.jsonl.xz")
    sets = {
        "lines": list(infill_cases.lines(code)),
        "words": list(infill_cases.words(code)),
        "sentences": list(
            infill_cases.sentences(paragraphs(options.data / "stories/tinystories_val_a.txt.xz", 4 * options.count))
        ),
        "single": list(infill_cases.humaneval(folder / "HumanEval-SingleLineInfilling.jsonl.gz")),
        "spans": list(infill_cases.humaneval(folder / "HumanEval-RandomSpanInfillingLight.jsonl.gz")),
    }
    found: dict[str, Any] = {}
    for name, parts in sets.items():
        fit = (one for one in parts if len(tokenizer.encode(one.part)) <= infill_cases.LONGEST)
        taken = list(islice(fit, options.count))
        found[name] = {"holes": len(taken)}
        for way, put_back in infill_cases.ways(model, tokenizer, sampler).items():
            tell = _counted(f"{name}, {way}", len(taken), options)
            found[name][way] = infill_cases.score(taken, put_back, tokenizer, tell)
    return found


def schema(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Records told in words, answered as JSON under schemas of one to eight fields, and without them."""
    size = options.canvas or min(128, sampler.canvas_length)
    settings = sampler.changed(canvas_length=size, max_new_tokens=size)
    return extraction.score(model, tokenizer, settings, extraction.told(options.count), options.tell)


def edit(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """One token in twenty struck in paragraphs of real TinyStories, then edited: repaired, and spoiled on the way."""
    texts = paragraphs(options.data / "stories/tinystories_val_a.txt.xz", options.count)
    found = measures.mended(model, tokenizer, texts, sampler.changed(canvas_length=options.canvas))
    return {"texts": len(texts), **asdict(found)}


def sudoku(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Puzzles solved, list by list, on one canvas and with check and restarts; a picture of it where one is asked for."""
    rows, found = _rows(model), {}
    for listed in list(puzzle_lists(options)):  # a list that is not there is noticed before anything is scored
        found[listed.name] = sudoku_lists.score(
            model,
            listed,
            sampler,
            canvases=options.canvases,
            rows=rows,
            tell=_counted(listed.name, len(listed.puzzles), options),
        )
    if options.picture:
        sudoku_lists.draw(found, options.picture)
    return found


def sudoku_spoken(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """The same lists by a model that was trained to solve them left to right."""
    return {listed.name: sudoku_lists.spoken(model, listed, _rows(model)) for listed in puzzle_lists(options)}


def sudoku_written(model: DiffusionGemma, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Generated puzzles of 30 to 40 clues as prompts, for a model that writes text."""
    listed = sudoku_lists.generated(options.count, most=40)
    return sudoku_lists.written(model, tokenizer, listed, sampler.changed(canvas_length=options.canvas), _rows(model))


def _rows(model: DiffusionGemma) -> int:
    """Boards at once."""
    return 1024 if model.device.type == "cuda" else 64


def puzzle_lists(options: Options) -> Iterator[sudoku_lists.Listed]:
    """The generated puzzles, then the lists at hand."""
    yield sudoku_lists.generated(options.count)
    for name in sudoku_lists.LISTS:
        yield sudoku_lists.read(options.data / "sudoku", name, options.count)


def _counted(what: str, count: int, options: Options) -> Callable[[int], None]:
    """Tells how many of them are done."""
    return lambda done: options.tell(f"{what}: {done} of {count}")


def functions(path: Path) -> list[str]:
    """The texts of a file of functions."""
    with open_text(path) as file:
        return [json.loads(line)["t"] for line in file]


def threes(text: str) -> Iterator[tuple[str, str, str]]:
    """Every three lines that follow one another, indentation and blank lines apart."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return zip(lines, lines[1:], lines[2:], strict=False)


def place(tokenizer: Tokenizer, hole: measures.Hole) -> tuple[str, str, str]:
    """The line of a hole between its neighbours."""
    before, line, after = (tokenizer.decode(ids).strip() for ids in (hole.before, hole.line, hole.after))
    return before.split("\n")[-1].strip(), line, after.split("\n")[0].strip()
