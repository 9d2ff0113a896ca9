"""Adapting: a left-to-right model learns to draft for itself, or to denoise canvases, so that it infills and edits.

model -> own answers (`own_answers.py`) or texts -> TrainConfig -> Trainer (`loop.py`) -> drafter or page adapter -> measured
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.diffusion.draft_tree import choose_tree
from redraft.kernels.backend import has_bf16
from redraft.model.backbone import Backbone
from redraft.model.drafter import DrafterConfig
from redraft.model.page import PageConfig
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.config import TrainConfig
from redraft.train.draft_loss import DraftConfig
from redraft.train.evals.acceptance import Acceptance, measure, sample_texts
from redraft.train.evals.gaps import GapScore, read_documents, remove_spans, score_gaps
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig
from redraft.train.own_answers import PART, OwnAnswerConfig
from redraft.train.records import DataConfig, Source

HELD_OUT_EVERY = 64  # every so many-th answer is held out; of few answers, more are
LEAST_HELD_OUT = 8
EVALUATIONS = 20  # in a run, about
MEASURED_PROMPTS = 128
MEASURED_TOKENS = 128  # behind the longest prompt: no text is longer, so answers to short prompts may have more
TEMPERATURES = (0.0, 0.7, 1.0)
PROMPT_SHARE = 0.5  # of a page adapter's texts, whose beginning becomes the prompt: a canvas may start anywhere
DROP_PROMPT_SHARE = 0.5  # share of own answers that are learned without their question: texts with gaps have none
SPAN_NOISE = 0.3  # share of a page adapter's canvases whose noise hits spans, as augmentation does
GAP_NOISE = 0.5  # share of its canvases that are a gap and the text after it


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """What a user chooses."""

    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    page: PageConfig | None = None  # train this page adapter instead of a drafter
    own: OwnAnswerConfig = field(default_factory=OwnAnswerConfig)
    length: int = 1024  # tokens of a row
    batch: int = 64  # rows of a step
    rows: int = 64  # of them in a forward
    epochs: float = 1.0
    steps: int | None = None  # instead of epochs
    minutes: float | None = None  # instead of steps: the learning rate cools down by the clock
    rate: float = 1e-3
    start_adapter: str = ""  # a drafter or page adapter to start with; empty: a new one
    seed: int = 0
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch % self.rows:
            raise ValueError(f"batch {self.batch} is no multiple of the {self.rows} rows of a forward")
        if not self.epochs > 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs}")
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be above 0, got {self.minutes}")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")


def own_source(folder: Path, options: AdaptOptions) -> Source:
    """The own answers in a folder."""
    files = tuple(str(folder / PART.format(part)) for part in range(options.own.parts))
    return Source(files=files, own=True, every=choose_held_out(files[0]))


def adapting_data(source: Source, context: int, options: AdaptOptions) -> DataConfig:
    """The texts, packed into rows that fit the model's context. Where pages begin is random: gaps are anywhere."""
    lengths = options.page.canvas_lengths if options.page is not None else (options.drafter.canvas_length,)
    if options.page is not None:
        source = replace(source, prompt_share=PROMPT_SHARE, drop_prompt_share=DROP_PROMPT_SHARE)
    return DataConfig(
        sources=(source,),
        length=min(options.length, context),
        canvas_lengths=lengths,
        seed=options.seed,
        keeps_bos=options.page is not None,
    )


def adapting_config(base: str, data: DataConfig, tokens: int, options: AdaptOptions, device: torch.device) -> TrainConfig:
    """The configuration of the run on these texts, of so many tokens."""
    model, sampler = checkpoint.read_configs(checkpoint.find(base, weights=False))
    sources = tuple(replace(source, is_held_out=True) for source in data.sources)
    held_out = replace(data, sources=sources, seed=0, lookahead=1, shuffle=1)
    canvas_length = options.drafter.canvas_length
    loss = LossConfig(draft=DraftConfig(lengths=(*[canvas_length] * 3, max(2, canvas_length // 2))))
    if options.page is not None:
        loss = LossConfig(span_noise=SPAN_NOISE, gap_noise=GAP_NOISE, self_condition=0.0, ar_weight=0.0, balance_weight=0.0)
    steps = options.steps or max(1, round(options.epochs * tokens / (options.batch * data.length)))
    if options.minutes is not None:
        steps = 10**9
    return TrainConfig(
        model=model,
        sampler=sampler,
        data=data,
        held_out=held_out,
        init=name_base(base),
        start_adapter=options.start_adapter,
        drafter=options.drafter if options.page is None else None,
        page=options.page,
        loss=loss,
        optim=OptimConfig(
            muon=False,
            adamw_lr=options.rate,
            weight_decay=0.0,
            warmup=20 if options.minutes is not None else min(100, steps // 10),
            cooldown=0.9,
            ema=0.98 if steps > 500 else 0.0,
        ),
        steps=steps,
        max_seconds=60 * options.minutes if options.minutes is not None else float("inf"),
        by_clock=options.minutes is not None,
        rows=options.rows,
        microbatches=options.batch // options.rows,
        seed=options.seed,
        precision="bfloat16" if device.type == "cuda" and has_bf16(device) else "float32",
        compile=options.compile,
        prefetch=device.type == "cuda",
        streams=choose_streams(options.rows, device),
        report_every=10,
        save_every=max(1, steps // EVALUATIONS) if options.minutes is None else 200,
        evaluate_every=max(1, steps // EVALUATIONS) if options.minutes is None else 200,
        keep=1,
    )


def choose_streams(rows: int, device: torch.device) -> int:
    """How many processes make the rows of a forward. A GPU would wait for one alone."""
    return next(count for count in (4, 2, 1) if rows % count == 0) if device.type == "cuda" else 1


def name_base(base: str) -> str:
    """How a drafter names its base: a path from the root for a folder or a file, else the name itself."""
    path = Path(base)
    return str(path.resolve()) if path.is_file() or (path / "config.json").is_file() else base


def choose_held_out(file: str) -> int:
    """Every how many-th answer is held out, by the number of answers in the first file."""
    with open(file, encoding="utf-8") as lines:
        answers = sum(1 for _ in lines)
    if answers < 2 * LEAST_HELD_OUT:
        raise ValueError(f"{file} has {answers} answers, too few to learn from: give more tokens")
    return min(HELD_OUT_EVERY, answers // LEAST_HELD_OUT)


def read_held_out_prompts(source: Source, count: int = MEASURED_PROMPTS) -> list[list[int]]:
    """The prompts of held-out answers."""
    prompts: list[list[int]] = []
    for file in source.files:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if not source.has(number):
                    prompts.append(json.loads(line)["prompt_ids"])
                if len(prompts) == count:
                    return prompts
    return prompts


def measure_gaps(model: Backbone, tokenizer: Tokenizer, sampler: SamplerConfig, source: Source) -> dict[str, GapScore]:
    """How gaps of held-out texts are filled by canvases and left to right."""
    documents = read_documents(replace(source, is_held_out=True), tokenizer, model.config.eos_token_ids[0])
    gaps = remove_spans(documents, sampler.eos_token_ids, model.config.max_position_embeddings)
    return score_gaps(model, tokenizer, sampler, list(islice(gaps, MEASURED_PROMPTS)))


@torch.no_grad()
def measure_drafts(model: Backbone, prompts: Sequence[Sequence[int]], canvas_length: int) -> list[Acceptance]:
    """Tokens a round on answers that the model writes to these prompts now, at each temperature."""
    found = []
    canvases = canvas_length + 8  # room that measuring takes behind a text
    longest = min(max(map(len, prompts)) + MEASURED_TOKENS, model.config.max_position_embeddings - canvases)
    prompt_lengths = [len(prompt) for prompt in prompts]
    tree = choose_tree(model)
    for temperature in TEMPERATURES:
        texts = sample_texts(model, prompts, temperature, longest)
        run = partial(measure, model, texts, prompt_lengths, temperature, draft_token=model.config.vocab_size)
        if tree is None or tree.depth + 1 == canvas_length:
            found.append(run(canvas_length=canvas_length, tree=tree))
        else:  # canvases behind a tree are shorter
            rows = run(canvas_length=canvas_length)
            trees = run(canvas_length=tree.depth + 1, tree=tree)
            found.append(replace(rows, tree=trees.tree))
    return found
