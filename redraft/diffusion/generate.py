"""The story: how a prompt becomes text, in one plain function. Everything faster must give the same tokens as this.

    prompt -> [2 prefill] -> cache
    noise  -> [3 start]   -> canvas -> [4 denoise] -> logits -> [5 step] -> canvas -> ... until it settles
    canvas -> [6 commit]  -> tokens -> [7 encode]  -> cache -> [8 next canvas, or the end]

Stops 1 and 8b (text to ids and back) are the tokenizer's. Knows nothing of scheduling, terminals or HTTP: it yields events,
and whoever shows them translates. Shapes: B rows, C canvas positions, V vocabulary, D model size.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from redraft.config import ModelConfig, SamplerConfig
from redraft.constraints.constraints import CanvasConstraints, Constraints, build_canvas_constraints
from redraft.diffusion import rng, sampler
from redraft.kernels import TopProbs
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.kv_cache import KVCache

PREFILL_CHUNK = 2048  # tokens of prompt a pass: the causal mask of a pass is this times the context


@dataclass(frozen=True)
class Draft:
    """A page after one denoising step."""

    block: int
    step: int  # 1 is the first
    ids_BC: Tensor  # the draft: the likeliest token everywhere
    canvas_BC: Tensor  # what the next step reads: accepted tokens, and noise in place of the rest
    accepted_BC: Tensor
    entropy_BC: Tensor  # nats
    settled_B: Tensor
    max_steps: int
    pinned_BC: Tensor | None = None  # what the constraints have fixed
    top_probs: TopProbs | None = None  # of the likeliest tokens, when the request asked for candidates


@dataclass(frozen=True)
class Committed:
    """A page that will not change any more, stop token included, padding behind it."""

    block: int
    ids_BC: Tensor
    entropy_BC: Tensor
    settled_B: Tensor  # False where every step was used and the page still moved: treat such text with doubt
    steps_B: Tensor


@dataclass(frozen=True)
class Stats:
    """What one row cost."""

    seed: int  # gives the same tokens again
    prompt_tokens: int
    new_tokens: int  # what the user gets: up to and with the stop token, at most max_new_tokens
    canvases: int
    settled: int  # canvases that settled before the last step
    steps: int  # denoising passes
    commits: int  # causal passes over finished canvases
    seconds: float
    prefill_seconds: float
    reused: int = 0  # tokens of the prompt that an earlier request had read

    @property
    def forwards(self) -> int:
        """Passes through the model after the prompt was read."""
        return self.steps + self.commits

    @property
    def tokens_per_forward(self) -> float:
        """Tokens won by each pass, commit passes counted."""
        return self.new_tokens / max(1, self.forwards)

    @property
    def tokens_per_second(self) -> float:
        """Output speed: what the user received over wall time, the reading of the prompt included."""
        return self.new_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Finished:
    """The end: every row's tokens (whole canvases, padded), why it ended, and what it cost.

    Reasons are "stop" and "length"; the engine knows a "deadline" too.
    """

    ids_BT: Tensor
    reasons: tuple[str, ...]
    stats: tuple[Stats, ...]


Event = Draft | Committed | Finished


@torch.inference_mode()
def generate(
    model: DiffusionGemma,
    prompts: Sequence[Sequence[int]],
    cfg: SamplerConfig,
    *,
    seeds: Sequence[int],
    constraints: Sequence[Constraints] | None = None,
    first_canvas_BC: Tensor | None = None,
) -> Iterator[Event]:
    """Redrafts page after page for every prompt until it stops or is long enough. Rows do not influence one another."""
    constraints = constraints if constraints is not None else [Constraints()] * len(prompts)
    check_inputs(model.config, prompts, cfg, seeds, constraints, first_canvas_BC)
    rows, length, vocab = len(prompts), cfg.canvas_length, model.config.vocab_size
    counter = StatsCounter(cfg, list(seeds), [len(prompt) for prompt in prompts])

    cache = model.new_cache(rows, max(map(len, prompts)) + (cfg.max_canvases - 1) * length, rewind=0)
    prefill(model, prompts, cache)  # stop 2
    counter.mark_prefilled()

    ended_B, matched = torch.zeros(rows, dtype=torch.bool, device=model.device), [rule.initial_state for rule in constraints]
    for block in range(cfg.max_canvases):
        draws = rng.draws(list(seeds), block, model.device)
        place = (block * length, length, cfg.max_new_tokens)
        patterns = [rule.canvas_automaton(state, *place) for rule, state in zip(constraints, matched, strict=True)]
        fixed = build_canvas_constraints(constraints, block, length, vocab, cfg.eos_token_ids, model.device, patterns)
        given = first_canvas_BC is not None and block == 0
        canvas_BC = first_canvas_BC.to(model.device) if given else draws.noise(0, length, vocab)
        state = sampler.start(canvas_BC, fixed, ended_B)  # stop 3

        soft_BCD = None
        while not sampler.is_finished(state, cfg):
            logits_BCV = model.denoise(state.ids_BC, soft_BCD, cache)  # stop 4
            state, shaped_BCV = sampler.step(logits_BCV, state, cfg, draws, fixed)  # stop 5
            yield make_draft(block, state, cfg, fixed)
            soft_BCD = model.soft_embed(shaped_BCV) if not sampler.is_finished(state, cfg) else None

        page = sampler.commit(state, cfg)  # stop 6
        ended_B = page.ended_B
        last = block + 1 == cfg.max_canvases or bool(ended_B.all())
        counter.add_canvas(state, page, last)
        yield Committed(block, page.ids_BC, state.entropy_BC, state.settled_B | state.skipped_B, state.steps_B)
        if last:
            break
        matched = [rule.advance(*one, length) for rule, *one in zip(constraints, matched, page.ids_BC.tolist(), strict=True)]
        model.encode(page.ids_BC, cache)  # stop 7
    yield counter.finish(ended_B)  # stop 8


def prefill(model: DiffusionGemma, prompts: Sequence[Sequence[int]], cache: KVCache) -> None:
    """Reads all prompts into the cache, a chunk at a time. Shorter rows are padded on the right, which leaves no trace."""
    longest = max(map(len, prompts))
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    ids_BS = torch.tensor(padded, dtype=torch.long, device=model.device)
    for begin in range(0, longest, PREFILL_CHUNK):
        chunk_BS = ids_BS[:, begin : begin + PREFILL_CHUNK]
        model.encode(chunk_BS, cache, [min(max(len(p) - begin, 0), chunk_BS.shape[1]) for p in prompts])


def check_inputs(
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    cfg: SamplerConfig,
    seeds: Sequence[int],
    constraints: Sequence[Constraints],
    first_canvas_BC: Tensor | None,
) -> None:
    """Refuses what cannot be generated, before anything is computed."""
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    if not len(prompts) == len(seeds) == len(constraints):
        raise ValueError(f"{len(prompts)} prompts, {len(seeds)} seeds and {len(constraints)} constraints do not match")
    if wrong := [seed for seed in seeds if not isinstance(seed, int)]:
        raise ValueError(f"a seed must be a whole number, got {wrong[0]!r}")
    for what, tokens in (("prompt", (t for prompt in prompts for t in prompt)), ("pad", [cfg.pad_token_id])):
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise ValueError(f"{what} token {token} is outside the vocabulary of {model.vocab_size}")
    longest, answer = max(map(len, prompts)), cfg.max_canvases * cfg.canvas_length
    if longest + answer > model.max_position_embeddings:
        raise ValueError(
            f"prompt has {longest} tokens and the answer may take {answer} (pages of {cfg.canvas_length}); "
            f"the model's context is {model.max_position_embeddings}: shorten the prompt, max_tokens or the page"
        )
    for rule in constraints:
        rule.validate(model.vocab_size, cfg.max_new_tokens, cfg.eos_token_ids)
    if first_canvas_BC is not None:
        shape, wanted = tuple(first_canvas_BC.shape), (len(prompts), cfg.canvas_length)
        if shape != wanted:
            raise ValueError(f"the first canvas has shape {shape}, the prompts and canvas_length ask for {wanted}")
        if first_canvas_BC.min() < 0 or first_canvas_BC.max() >= model.vocab_size:
            raise ValueError(f"the first canvas has a token outside the vocabulary of {model.vocab_size}")


def make_draft(block: int, state: sampler.Canvas, cfg: SamplerConfig, fixed: CanvasConstraints | None) -> Draft:
    """A canvas as whoever watches sees it."""
    return Draft(
        block=block,
        step=state.step,
        ids_BC=state.best_BC,
        canvas_BC=state.ids_BC,
        accepted_BC=state.accepted_BC,
        entropy_BC=state.entropy_BC,
        settled_B=state.settled_B,
        max_steps=cfg.max_steps,
        pinned_BC=fixed.pinned_BC if fixed is not None else None,
    )


@dataclass
class StatsCounter:
    """Adds up, per row, what the loop above spends."""

    cfg: SamplerConfig
    seeds: list[int]
    prompt_tokens: list[int]
    began: float = field(default_factory=time.perf_counter)
    prefill_seconds: float = 0.0
    pages: list[Tensor] = field(default_factory=list)
    rows: list[dict[str, int]] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    retold: int = 0  # tokens of pages that were there before

    def __post_init__(self) -> None:
        names = ("new_tokens", "canvases", "settled", "steps", "commits")
        self.rows = [dict.fromkeys(names, 0) for _ in self.prompt_tokens]
        self.reused = [0] * len(self.rows)

    def mark_prefilled(self) -> None:
        """The prompt has been read."""
        self.prefill_seconds = time.perf_counter() - self.began

    def add_replayed(self, ids_BC: Tensor) -> None:
        """A page that was there before: part of the answer, not of the counter."""
        self.pages.append(ids_BC)
        self.retold += ids_BC.shape[1]

    def add_canvas(self, state: sampler.Canvas, page: sampler.CommitResult, last: bool) -> None:
        """A page is committed; behind the last one no pass follows."""
        self.pages.append(page.ids_BC)
        for row, counter in enumerate(self.rows):
            counter["new_tokens"] += int(page.lengths_B[row])
            counter["canvases"] += int(not state.skipped_B[row])
            counter["settled"] += int(state.settled_B[row])
            counter["steps"] += int(state.steps_B[row])
            counter["commits"] += int(not last and not page.ended_B[row])

    def finish(self, ended_B: Tensor) -> Finished:
        """The end: all pages, and every row's cost."""
        seconds, most = time.perf_counter() - self.began, self.cfg.max_new_tokens - self.retold
        reasons, stats = [], []
        for row, counter in enumerate(self.rows):
            reasons.append("stop" if ended_B[row] and counter["new_tokens"] <= most else "length")
            counter["new_tokens"] = min(counter["new_tokens"], most)
            seed, prompt = self.seeds[row], self.prompt_tokens[row]
            clock = {"seconds": seconds, "prefill_seconds": self.prefill_seconds}
            stats.append(Stats(seed=seed, prompt_tokens=prompt, reused=self.reused[row], **clock, **counter))
        return Finished(torch.cat(self.pages, dim=1), tuple(reasons), tuple(stats))
