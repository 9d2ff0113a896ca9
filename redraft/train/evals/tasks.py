"""The tasks of `redraft eval`: each function loads its texts, runs the measurement and returns named scores."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any

from redraft.config import SamplerConfig
from redraft.engine import AdaptedEngine
from redraft.model.backbone import Backbone
from redraft.model.lora import Adapter
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.documents import Document
from redraft.train.evals import code_lines, edit_repair, extraction, likelihood, sandbox, sudoku_lists, words
from redraft.train.evals import gaps as token_gaps
from redraft.train.evals import infill as infill_cases
from redraft.train.evals import samples as story_samples
from redraft.train.evals.judge import LlamaJudge
from redraft.train.records import Source, open_text

STORY_PROMPT = "Once upon a time"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the tasks."""

    data: Path
    judge: str
    count: int
    levels: int
    canvas: int | None
    canvases: int = 64
    check: str | None = None  # samples: the mode; None: the checkpoint's
    rows: int | None = None  # samples: texts in a batch; None: by device
    words: str | None = None  # samples: a file of known words; None: the words of the stories in `data`
    adapter: Adapter | None = None  # for the tasks in WITH_ADAPTER
    picture: Path | None = None
    allow_code_execution: bool = False
    progress: Callable[[str], None] = lambda text: None


Task = Callable[[Backbone, Tokenizer, SamplerConfig, Options], dict[str, Any]]


def stories(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Likelihood and repair on TinyStories: paragraphs of more than 300 characters, each alone."""
    if model.page is not None:
        raise ValueError("the task stories needs a diffusion model; a page adapter is measured by the task gaps")
    texts = read_paragraphs(options.data / "stories/tinystories_val_a.txt.xz", options.count)
    canvas_length = options.canvas or 64
    autoregressive = likelihood.autoregressive(model, tokenizer, texts)
    denoiser = likelihood.nelbo(model, tokenizer, texts, canvas_length, options.levels)
    scores = {
        "texts": len(texts),
        "block": canvas_length,
        "ar_bits_per_byte": autoregressive.bits_per_byte,
        "ar_nats_per_token": autoregressive.nats_per_token,
        "nelbo_bits_per_byte": denoiser.bits_per_byte,
        "nelbo_over_ar": denoiser.nats / autoregressive.nats,
    }
    for steps in (1, 2):
        for level, (kept, repaired) in likelihood.repair(model, tokenizer, texts, canvas_length, steps).items():
            scores |= {f"kept_{level}_look{steps}": kept, f"mended_{level}_look{steps}": repaired}
    return scores


def read_paragraphs(path: Path, count: int) -> list[str]:
    """Reads the first paragraphs of more than 300 characters."""
    with open_text(path) as file:
        return [text for text in file.read().split("\n\n") if len(text) > 300][:count]


def samples(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Stories of one mode against autoregressive stories of the same weights and the same entropy, under a judge."""
    sampler = sampler.changed(canvas_length=options.canvas, check=options.check)
    judge = LlamaJudge(options.judge, model.device)
    known = words.find_words(options.words, options.data / "stories")
    engine = AdaptedEngine(story_samples.make_engine(model, options.rows), options.adapter)

    def sample_at(temperature: float) -> story_samples.Samples:
        options.progress(f"autoregressive samples at temperature {temperature:g}")
        cfg = story_samples.autoregressive(sampler, temperature)
        return story_samples.sample(engine, tokenizer, STORY_PROMPT, options.count, cfg)

    options.progress(f"samples with check {sampler.check}")
    stories = story_samples.sample(engine, tokenizer, STORY_PROMPT, options.count, sampler)
    curve = story_samples.measure_curve(STORY_PROMPT, judge, sample_at)
    return {"samples": options.count, **score_samples(stories, sampler, judge, curve, known)}


def score_samples(
    stories: story_samples.Samples,
    sampler: SamplerConfig,
    judge: story_samples.Judge,
    curve: story_samples.Curve,
    known: frozenset[str] | None,
) -> dict[str, Any]:
    """The scores of stories after STORY_PROMPT. Without known words, nothing is said about unknown ones."""
    comparison = story_samples.compare(stories, STORY_PROMPT, judge, curve)
    texts = [STORY_PROMPT + text for text in stories.whole_words]
    return {
        "check": sampler.check,
        "canvas": sampler.canvas_length,
        "perplexity": comparison.perplexity,
        "perplexity_left_to_right": comparison.autoregressive,
        "ratio": comparison.ratio,
        "entropy": stories.entropy,
        "length": stories.length,
        "tokens_per_forward": stories.tokens_per_forward,
        **stories.counts,
        "doubled_words": words.doubled_words(texts),
        "doubled_adjacent": words.doubled_adjacent(texts),
        "unknown_words": words.unknown_words(texts, known) if known is not None else None,
        "unknown": words.list_unknown(texts, known) if known is not None else None,
        "left_to_right": [[number and round(number, 4) for number in point] for point in comparison.curve],
        "first": stories.texts[0],
    }


def code(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Removed lines of Python functions, infilled with the code after them in sight, and generated without it.

    Packages copy from one another: a line is new if no training function has it between the same two neighbours. The code is
    compared, never run.
    """
    sampler = sampler.changed(canvas_length=options.canvas)
    functions = read_functions(options.data / "code/pyfuncs_eval.jsonl.xz")
    gaps = code_lines.remove_lines(tokenizer, functions, max_tokens=32)[: options.count]
    training = read_functions(options.data / "code/pyfuncs_train.jsonl.xz")
    training_triples = {triple for text in training for triple in line_triples(text)}
    is_new = [gap_triple(tokenizer, gap) not in training_triples for gap in gaps]
    scores: dict[str, Any] = {"holes": len(gaps), "new": sum(is_new), "canvas": sampler.canvas_length}
    answers_of = {
        "filled": code_lines.fill_gaps(model, tokenizer, gaps, sampler),
        "left_to_right": code_lines.continue_before(model, tokenizer, gaps),
    }
    for name, answers in answers_of.items():
        scores[name] = code_lines.exact_share(answers, gaps)
        scores[f"{name}_new"] = code_lines.exact_share(list(compress(answers, is_new)), list(compress(gaps, is_new)))
    return scores


def infill(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Removed lines, words and sentences, and HumanEval's infilling tasks, whose programs are run in a sandbox."""
    require_code_execution(options)
    folder = options.data / "code"
    functions = read_functions(folder / "pyfuncs_eval.jsonl.xz")
    paragraphs = read_paragraphs(options.data / "stories/tinystories_val_a.txt.xz", 4 * options.count)
    gaps_of = {
        "lines": infill_cases.remove_lines(functions),
        "words": infill_cases.remove_words(functions),
        "sentences": infill_cases.remove_sentences(paragraphs),
        "single": infill_cases.read_humaneval(folder / "HumanEval-SingleLineInfilling.jsonl.gz"),
        "spans": infill_cases.read_humaneval(folder / "HumanEval-RandomSpanInfillingLight.jsonl.gz"),
    }
    chosen = {}
    for name, all_gaps in gaps_of.items():
        fitting = (gap for gap in all_gaps if len(tokenizer.encode(gap.part)) <= infill_cases.MAX_GAP_TOKENS)
        chosen[name] = list(islice(fitting, options.count))
    methods = infill_cases.infill_methods(model, tokenizer, sampler)
    scores: dict[str, Any] = {}
    for name, gaps in chosen.items():
        scores[name] = {"holes": len(gaps)}
        for method_name, method in methods.items():
            progress = _count_progress(f"{name}, {method_name}", len(gaps), options)
            scores[name][method_name] = infill_cases.score(gaps, method, tokenizer, progress)
    return scores


def gaps(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Spans of 4 to 16 tokens, removed from the texts of a file or of TinyStories: filled by canvases and left to right."""
    model.require_denoiser("the task gaps")
    if options.data.is_file():
        documents = token_gaps.read_documents(Source(files=(str(options.data),)), tokenizer, sampler.eos_token_ids[0])
    else:
        texts = read_paragraphs(options.data / "stories/tinystories_val_a.txt.xz", 4 * options.count)
        documents = (Document(list(tokenizer.start_ids), tokenizer.encode(text)) for text in texts)
    found = token_gaps.remove_spans(documents, sampler.eos_token_ids, model.config.max_position_embeddings)
    chosen = list(islice(found, options.count))
    sampler = sampler.changed(canvas_length=options.canvas)
    scores = token_gaps.score_gaps(model, tokenizer, sampler, chosen, _count_progress("gaps", len(chosen), options))
    return {"gaps": len(chosen), **{name: asdict(score) for name, score in scores.items()}}


def require_code_execution(options: Options) -> None:
    """Raises ValueError unless the user allowed that code of a model is run, and it can be isolated."""
    if not options.allow_code_execution:
        raise ValueError("this task runs code that the model writes: allow that with --allow-code-execution")
    try:
        sandbox.check_isolation()
    except sandbox.IsolationError as error:
        raise ValueError(str(error)) from None


def schema(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Records in words, answered as JSON under schemas of one to eight fields, and without a schema."""
    size = options.canvas or min(128, sampler.canvas_length)
    cfg = sampler.changed(canvas_length=size, max_new_tokens=size)
    return extraction.score(model, tokenizer, cfg, extraction.make_records(options.count), options.progress)


def edit(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Paragraphs of TinyStories with one token in twenty replaced, then edited: tokens repaired, and tokens spoiled."""
    texts = read_paragraphs(options.data / "stories/tinystories_val_a.txt.xz", options.count)
    scores = edit_repair.score_edits(model, tokenizer, texts, sampler.changed(canvas_length=options.canvas))
    return {"texts": len(texts), **asdict(scores)}


def sudoku(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Puzzles solved, list by list, on one canvas and with check and restarts; draws a picture if one was asked for."""
    puzzle_lists = list(read_puzzle_lists(options))  # a missing list is reported before anything is scored
    scores = {}
    for puzzle_list in puzzle_lists:
        scores[puzzle_list.name] = sudoku_lists.score(
            model,
            puzzle_list,
            sampler,
            canvases=options.canvases,
            rows=_batch_rows(model),
            progress=_count_progress(puzzle_list.name, len(puzzle_list.puzzles), options),
        )
    if options.picture:
        sudoku_lists.draw_scores(scores, options.picture)
    return scores


def sudoku_autoregressive(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """The same lists, with a model that was trained to solve them autoregressively."""
    rows = _batch_rows(model)
    return {puzzles.name: sudoku_lists.score_autoregressive(model, puzzles, rows) for puzzles in read_puzzle_lists(options)}


def sudoku_written(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, options: Options) -> dict[str, Any]:
    """Generated puzzles of 30 to 40 clues as prompts, for a text model."""
    puzzles = sudoku_lists.generate_list(options.count, max_clues=40)
    return sudoku_lists.score_text(
        model, tokenizer, puzzles, sampler.changed(canvas_length=options.canvas), _batch_rows(model), options.adapter
    )


TASKS: dict[str, Task] = {
    "stories": stories,
    "samples": samples,
    "code": code,
    "infill": infill,
    "gaps": gaps,
    "edit": edit,
    "schema": schema,
    "sudoku": sudoku,
    "sudoku-autoregressive": sudoku_autoregressive,
    "sudoku-written": sudoku_written,
}


WITH_ADAPTER = ("samples", "sudoku-written")


def require_adapter_task(task: str | None, adapter: str | None) -> None:
    """Refuses an adapter for a task that would not use it."""
    if adapter is not None and task not in WITH_ADAPTER:
        names = " and ".join(WITH_ADAPTER)
        raise ValueError(f"--adapter is for --task {names}; redraft merge makes a checkpoint for the others")


def _batch_rows(model: Backbone) -> int:
    """Boards in a batch."""
    return 1024 if model.device.type == "cuda" else 64


def read_puzzle_lists(options: Options) -> Iterator[sudoku_lists.PuzzleList]:
    """Yields the generated puzzles, then the evaluation lists."""
    yield sudoku_lists.generate_list(options.count)
    for name in sudoku_lists.LISTS:
        yield sudoku_lists.read_list(options.data / "sudoku", name, options.count)


def _count_progress(name: str, count: int, options: Options) -> Callable[[int], None]:
    """Returns a function that reports how many items are done."""
    return lambda done: options.progress(f"{name}: {done} of {count}")


def read_functions(path: Path) -> list[str]:
    """Reads the texts of a file of functions."""
    with open_text(path) as file:
        return [json.loads(line)["t"] for line in file]


def line_triples(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields every three consecutive lines, without indentation and blank lines."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return zip(lines, lines[1:], lines[2:], strict=False)


def gap_triple(tokenizer: Tokenizer, gap: code_lines.LineGap) -> tuple[str, str, str]:
    """Returns the removed line between its two neighbours."""
    before, line, after = (tokenizer.decode(ids).strip() for ids in (gap.before, gap.line, gap.after))
    return before.split("\n")[-1].strip(), line, after.split("\n")[0].strip()
