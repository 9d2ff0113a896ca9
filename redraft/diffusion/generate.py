"""The whole system in one plain function: how prompts become tokens. Start reading here.

    prompt --2. prefill--> KV cache
    noise  --3. start----> canvas --4. denoise--> logits --5. sampler step--> canvas   4 and 5 repeat until it settles
    canvas --6. commit---> tokens --7. encode---> KV cache                             8. the next canvas, or the end

The numbers are those of docs/tour.md; number 1, text to token ids and back, belongs to the tokenizer.
`generate` is the specification: the engine, whatever its optimizations, must give the same tokens. It yields events with
token ids; the Writer adds text, and the terminal, the server and the web page display them.
Shapes: B rows (one per prompt), C canvas positions, S prompt tokens, T generated tokens, V vocabulary, D model size.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import CanvasConstraints, Constraints, StepCost, build_canvas_constraints
from redraft.constraints.errors import PatternError, shorten
from redraft.diffusion import rng, sampler
from redraft.diffusion.events import Committed, Draft, Event, Finished, Stats
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache
from redraft.model.lora import Adapter

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

PREFILL_CHUNK = 2048  # prompt tokens per forward: the causal mask has this many rows, and a column for each cached token


# 1. The story


@torch.inference_mode()
def generate(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    cfg: SamplerConfig,
    *,
    seeds: Sequence[int],
    constraints: Sequence[Constraints] | None = None,
    first_canvas_BC: Tensor | None = None,
    adapter: Adapter | None = None,
    images: Sequence[Sequence["ImageSpan"]] | None = None,
) -> Iterator[Event]:
    """Continues every prompt, canvas after canvas, until a stop token or max_new_tokens.

    Rows do not influence one another: a row gives the same tokens alone and in a batch. `images` are those of each prompt.
    """
    constraints = constraints if constraints is not None else [Constraints()] * len(prompts)
    check_inputs(model, prompts, cfg, seeds, constraints, first_canvas_BC)
    check_images(prompts, images)
    rows = len(prompts)
    length = cfg.canvas_length
    vocab_size = model.config.vocab_size
    counter = StatsCounter(cfg, list(seeds), [len(prompt) for prompt in prompts], constraints)

    # 2. Prefill: run the prompts causally and write their keys and values into the cache.
    capacity = max(map(len, prompts)) + (cfg.max_canvases - 1) * length  # the last canvas is never encoded
    cache = model.new_cache(rows, capacity, rewind=0, adapter=adapter)
    prefill(model, prompts, cache, images)
    counter.mark_prefilled()

    ended_B = torch.zeros(rows, dtype=torch.bool, device=model.device)
    automaton_states = [row_constraints.initial_state for row_constraints in constraints]
    for block in range(cfg.max_canvases):
        # 3. A new canvas: random tokens, or the user's own tokens for the first one.
        draws = rng.draws(list(seeds), block, model.device)
        canvas_constraints = constrain_canvas(constraints, automaton_states, block, cfg, vocab_size, model.device)
        canvas_BC = draws.noise(0, length, vocab_size)
        if block == 0 and first_canvas_BC is not None:
            canvas_BC = first_canvas_BC.to(model.device)
        canvas = sampler.start(canvas_BC, canvas_constraints, ended_B)

        soft_BCD = None  # self-conditioning: a canvas's first step has none
        while not sampler.is_finished(canvas, cfg):
            # 4. Denoise: logits for all canvas positions at once; the canvas attends to itself and to the cache.
            logits_BCV = model.denoise(canvas.ids_BC, soft_BCD, cache)
            # 5. Sampler step: accept the positions with low entropy, renoise the others, test whether the canvas settled.
            canvas, shaped_BCV = sampler.step(logits_BCV, canvas, cfg, draws, canvas_constraints)
            yield make_draft(block, canvas, cfg, canvas_constraints)
            soft_BCD = model.soft_embed(shaped_BCV) if not sampler.is_finished(canvas, cfg) else None

        # 6. Commit: the argmax of the last logits becomes text, up to the stop token.
        committed = sampler.commit(canvas, cfg)
        ended_B = committed.ended_B
        is_last = block + 1 == cfg.max_canvases or bool(ended_B.all())
        counter.add_canvas(canvas, committed, is_last)
        yield Committed(block, committed.ids_BC, canvas.entropy_BC, canvas.settled_B | canvas.skipped_B, canvas.steps_B)
        if is_last:
            break

        # 7. Encode: run the committed tokens causally, so that the next canvas attends to them through the cache.
        model.encode(committed.ids_BC, cache)
        automaton_states = [
            row_constraints.advance(state, ids, length)
            for row_constraints, state, ids in zip(constraints, automaton_states, committed.ids_BC.tolist(), strict=True)
        ]
    yield counter.finish(ended_B)  # 8. The end


# 2. Its parts


def prefill(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    cache: KVCache,
    images: Sequence[Sequence["ImageSpan"]] | None = None,
) -> None:
    """Encodes all prompts into the cache, a chunk at a time. Shorter rows are padded on the right; padding is not cached."""
    images = images if images is not None else [()] * len(prompts)
    chunks_of = [split_prompt(len(prompt), spans) for prompt, spans in zip(prompts, images, strict=True)]
    for chunks in zip_longest(*chunks_of, fillvalue=(0, 0)):
        counts = [end - begin for begin, end in chunks]
        longest = max(counts)
        pieces = [prompt[begin:end] for prompt, (begin, end) in zip(prompts, chunks, strict=True)]
        padded = [[*piece, *[0] * (longest - len(piece))] for piece in pieces]
        chunk_BS = torch.tensor(padded, dtype=torch.long, device=model.device)
        inside = [images_inside(spans, begin, end) for spans, (begin, end) in zip(images, chunks, strict=True)]
        model.encode(chunk_BS, cache, counts, inside if any(inside) else None)


def split_prompt(length: int, images: Sequence["ImageSpan"]) -> list[tuple[int, int]]:
    """The chunks of a prompt, (first, end) of each. None divides an image, whose tokens attend to one another."""
    chunks = []
    begin = 0
    while begin < length:
        end = find_chunk_end(begin, length, PREFILL_CHUNK, images)
        chunks.append((begin, end))
        begin = end
    return chunks


def find_chunk_end(begin: int, length: int, chunk: int, images: Sequence["ImageSpan"]) -> int:
    """The end of the chunk that begins at `begin`. An image that begins there makes it longer than `chunk`, if it must."""
    end = min(begin + chunk, length)
    for span in images:
        if span.start < end < span.end:
            return span.start if span.start > begin else span.end
    return end


def images_inside(images: Sequence["ImageSpan"], begin: int, end: int) -> list["ImageSpan"]:
    """The images of a chunk, counted from its beginning."""
    return [span._replace(start=span.start - begin) for span in images if begin <= span.start < end]


def check_images(prompts: Sequence[Sequence[int]], images: Sequence[Sequence["ImageSpan"]] | None) -> None:
    """Refuses images that do not belong to these prompts, or that are not in order."""
    if images is None:
        return
    if len(images) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and the images of {len(images)} do not match")
    for prompt, spans in zip(prompts, images, strict=True):
        ends = [0, *(span.end for span in spans)]
        starts = [*(span.start for span in spans), len(prompt)]
        if any(start < end for end, start in zip(ends, starts, strict=True)):
            raise ValueError(f"the images of a prompt of {len(prompt)} tokens overlap or are outside of it")


def constrain_canvas(
    constraints: Sequence[Constraints],
    automaton_states: Sequence[int],
    block: int,
    cfg: SamplerConfig,
    vocab_size: int,
    device: torch.device,
) -> CanvasConstraints | None:
    """The constraints of all rows on one canvas, or None when it has none.

    An automaton state says how much of its pattern a row has matched on the canvases before.
    """
    length = cfg.canvas_length
    automata = [
        row_constraints.canvas_automaton(state, block * length, length, cfg.max_new_tokens)
        for row_constraints, state in zip(constraints, automaton_states, strict=True)
    ]
    return build_canvas_constraints(constraints, block, length, vocab_size, cfg.eos_token_ids, device, automata)


def check_inputs(
    model: Backbone,
    prompts: Sequence[Sequence[int]],
    cfg: SamplerConfig,
    seeds: Sequence[int],
    constraints: Sequence[Constraints],
    first_canvas_BC: Tensor | None,
) -> None:
    """Refuses inputs that cannot be generated from, before anything is computed."""
    config = model.config
    if cfg.check == "off":
        model.require_denoiser("generation without a check (check=off)")
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    if not len(prompts) == len(seeds) == len(constraints):
        raise ValueError(f"{len(prompts)} prompts, {len(seeds)} seeds and {len(constraints)} constraints do not match")
    for seed in seeds:
        if not isinstance(seed, int):
            raise ValueError(f"a seed must be a whole number, got {seed!r}")
    for prompt in prompts:
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"prompt token {token} is outside the vocabulary of {config.vocab_size}")
    if not 0 <= cfg.pad_token_id < config.vocab_size:
        raise ValueError(f"pad token {cfg.pad_token_id} is outside the vocabulary of {config.vocab_size}")
    for token, _ in cfg.logit_bias:
        if token >= config.vocab_size:
            raise ValueError(f"logit_bias names token {token}, which is outside the vocabulary of {config.vocab_size}")
    if cfg.draft_token is not None and cfg.draft_token >= config.vocab_size + (model.drafter is not None):
        raise ValueError(f"draft_token {cfg.draft_token} is outside the vocabulary of {config.vocab_size}")
    longest = max(map(len, prompts))
    answer = cfg.max_answer
    if longest + answer > config.max_position_embeddings:
        raise ValueError(
            f"the prompt has {longest} tokens and the answer may take {answer} (canvases of {cfg.canvas_length}); "
            f"the model's context is {config.max_position_embeddings}: shorten the prompt, max_tokens or the canvas"
        )
    step = step_cost(model, cfg) if cfg.check != "exact" else None  # which makes no sums over a canvas
    for row_constraints in constraints:
        if cfg.check == "off" and row_constraints.grammar is not None:
            pattern = shorten(row_constraints.grammar.pattern)
            raise PatternError(f"the pattern {pattern} is written from left to right only: choose check 'exact'")
        row_constraints.validate(config.vocab_size, cfg.max_new_tokens, cfg.eos_token_ids, step)
    if first_canvas_BC is not None:
        shape = tuple(first_canvas_BC.shape)
        expected = (len(prompts), cfg.canvas_length)
        if shape != expected:
            raise ValueError(f"the first canvas has shape {shape}; the prompts and canvas_length need {expected}")
        if first_canvas_BC.min() < 0 or first_canvas_BC.max() >= config.vocab_size:
            raise ValueError(f"the first canvas has a token outside the vocabulary of {config.vocab_size}")


def check_steering(
    cfg: SamplerConfig, constraints: Constraints, *, is_steered: bool = False, has_draft: bool = False
) -> None:
    """Refuses what checked and exact mode cannot honour: a canvas that the caller steers, and bans under a pattern.

    From left to right a pattern may lead to a position where all that fits is banned.
    """
    if cfg.check != "off" and constraints.pattern is not None and constraints.banned:
        raise ValueError(f"bans together with a pattern need check 'off', got {cfg.check!r}")
    if cfg.check != "off" and is_steered:
        raise ValueError(f"a steered or resumed canvas needs check 'off', got {cfg.check!r}")
    if cfg.settle_prefix and is_steered:
        raise ValueError("a steered or resumed canvas may change anywhere: leave settle_prefix out")
    if cfg.check == "exact" and has_draft:
        raise ValueError("check 'exact' generates from left to right and takes no draft: choose 'checked' or 'off'")


def require_drafter(model: Backbone, cfg: SamplerConfig) -> None:
    """Refuses a mode with drafts for a model that cannot draft."""
    what = f"drafting (check={cfg.check}, draft_length={cfg.draft_length})"
    if cfg.check == "checked":
        model.require_denoiser(what)  # it drafts whole canvases first, which a drafter does not
    if cfg.check != "off" and cfg.draft_length:
        model.require_drafts(what)


def step_cost(model: Backbone, cfg: SamplerConfig) -> StepCost:
    """What a step of this model costs, against which the sums of a pattern are compared."""
    on_gpu = model.device.type == "cuda"
    return StepCost(
        canvas_length=cfg.canvas_length,
        multiplications=None if on_gpu else model.config.parameter_counts()["active"],
    )


def make_draft(block: int, canvas: sampler.Canvas, cfg: SamplerConfig, constraints: CanvasConstraints | None) -> Draft:
    """The event for a canvas after a step."""
    return Draft(
        block=block,
        step=canvas.step,
        ids_BC=canvas.best_BC,
        canvas_BC=canvas.ids_BC,
        accepted_BC=canvas.accepted_BC,
        entropy_BC=canvas.entropy_BC,
        settled_B=canvas.settled_B,
        max_steps=cfg.max_steps,
        pinned_BC=constraints.pinned_BC if constraints is not None else None,
        final_B=canvas.final_B if cfg.settle_prefix else None,
    )


@dataclass
class StatsCounter:
    """Counts the steps, tokens and seconds of each row while it is generated."""

    cfg: SamplerConfig
    seeds: list[int]
    prompt_tokens: list[int]
    constraints: Sequence[Constraints]
    started_at: float = field(default_factory=time.perf_counter)
    prefill_seconds: float = 0.0
    canvases: list[Tensor] = field(default_factory=list)  # ids_BC of each committed canvas
    rows: list[dict[str, int]] = field(default_factory=list)  # counts of each row, under the names of Stats
    reused: list[int] = field(default_factory=list)  # prompt tokens of each row taken from the prefix cache
    replayed_tokens: int = 0  # tokens of canvases that were committed by an earlier request
    logprob: float | None = None  # checked and exact mode: of the verified tokens

    def __post_init__(self) -> None:
        names = ("new_tokens", "canvases", "settled", "steps", "commits", "rounds", "drafted", "accepted", "corrected")
        self.rows = [dict.fromkeys(names, 0) for _ in self.prompt_tokens]
        self.reused = [0] * len(self.rows)

    def mark_prefilled(self) -> None:
        """Records that prefill ends now."""
        self.prefill_seconds = time.perf_counter() - self.started_at

    def add_replayed(self, ids_BC: Tensor) -> None:
        """Adds a canvas that an earlier request committed: it is part of the answer and costs nothing."""
        self.canvases.append(ids_BC)
        self.replayed_tokens += ids_BC.shape[1]

    def add_canvas(self, canvas: sampler.Canvas, committed: sampler.CommitResult, is_last: bool) -> None:
        """Adds a committed canvas. The last one is not encoded."""
        self.canvases.append(committed.ids_BC)
        for row, counts in enumerate(self.rows):
            counts["new_tokens"] += int(committed.lengths_B[row])
            counts["canvases"] += int(not canvas.skipped_B[row])
            counts["settled"] += int(canvas.settled_B[row])
            counts["steps"] += int(canvas.steps_B[row])
            counts["commits"] += int(not is_last and not committed.ended_B[row])

    def add_verified(self, tokens: Sequence[int], logprob: float, counts: Mapping[str, int], device: torch.device) -> None:
        """Adds the verified tokens of an answer, their log probability, and what they cost, by the names of Stats."""
        self.logprob = logprob
        self.canvases.append(torch.tensor([list(tokens)], device=device))
        self.rows[0] |= counts
        self.rows[0]["new_tokens"] += len(tokens)

    def finish(self, ended_B: Tensor) -> Finished:
        """Makes the last event from all canvases and counts.

        A row that matches its pattern is complete without a stop token: what fills max_new_tokens has room for none.
        """
        ids_BT = torch.cat(self.canvases, dim=1)
        seconds = time.perf_counter() - self.started_at
        max_new_tokens = self.cfg.max_new_tokens - self.replayed_tokens
        reasons = []
        stats = []
        for row, counts in enumerate(self.rows):
            stopped = bool(ended_B[row]) and counts["new_tokens"] <= max_new_tokens
            if not stopped and self.constraints[row].pattern is not None:
                stopped = self.constraints[row].is_match(ids_BT[row, : self.cfg.max_new_tokens].tolist())
            reasons.append("stop" if stopped else "length")
            counts["new_tokens"] = min(counts["new_tokens"], max_new_tokens)
            row_stats = Stats(
                seed=self.seeds[row],
                prompt_tokens=self.prompt_tokens[row],
                seconds=seconds,
                prefill_seconds=self.prefill_seconds,
                reused=self.reused[row],
                check=self.cfg.check,
                logprob=self.logprob,
                **counts,
            )
            stats.append(row_stats)
        return Finished(ids_BT, tuple(reasons), tuple(stats))
