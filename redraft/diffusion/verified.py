"""Checked and exact mode: the denoiser drafts, the causal half verifies. The second story, beside `generate`.

    prompt --prefill--> KV cache          checked mode: a few denoising steps draft a whole canvas first
    [last token, drafts] --joint forward--> causal logits of each, and a canvas of new drafts behind each
    causal logits --pick--> tokens: drafts are accepted from the left, and the first rejected one is replaced
    the canvas behind the last accepted token --draft--> the next drafts; this repeats, one round each, until the end

Exact mode accepts a draft if it is the token that autoregressive sampling would pick. The answer then depends on prompt and
seed only, and every round gives at least one token. Checked mode also accepts a draft that is at most `tolerance` nats less
likely than the likeliest token. Without drafts (draft_length 0) exact mode is autoregressive sampling.
`generate_verified` is the specification; the engine must give the same tokens.
Shapes: S clean tokens of a round, J canvases, C positions of each, V vocabulary, D model size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.constraints.next_token import NextToken
from redraft.diffusion import pick, rng, sampler
from redraft.diffusion.draft_policy import DraftPolicy
from redraft.diffusion.generate import (
    Committed,
    Draft,
    Event,
    StatsCounter,
    check_images,
    check_inputs,
    check_steering,
    constrain_canvas,
    make_draft,
    prefill,
    require_drafter,
)
from redraft.kernels import TopProbs
from redraft.model.backbone import Backbone
from redraft.model.kv_cache import KVCache
from redraft.model.lora import Adapter

if TYPE_CHECKING:  # text-only use does not load it
    from redraft.model.vision import ImageSpan

# 1. The state of one answer


@dataclass(frozen=True)
class Round:
    """The input of one joint forward: tokens to encode, and behind which of them canvases stand."""

    clean: tuple[int, ...]  # the token before the cursor, then the drafts to verify
    drafts: tuple[int, ...]  # what the causal logits are compared with: the clean drafts, and one more if there is one
    after: tuple[int, ...]
    canvas_length: int


@dataclass(frozen=True)
class Verdict:
    """What the causal half says about the drafts of a round."""

    accepted: int  # drafts accepted from the left
    token: int | None  # the causal half's token behind them; None if all drafts were accepted and it was not needed
    logprobs: tuple[float, ...]  # of the accepted drafts and the token, before temperature, bias and constraints
    top: tuple[tuple[list[int], list[float]], ...] = ()  # for each: the likeliest tokens and their probabilities


@dataclass
class Verification:
    """How far an answer is: verified tokens up to the cursor, and drafts ahead of it."""

    prompt: Sequence[int]
    cfg: SamplerConfig
    seed: int
    next_token: NextToken
    tokens: list[int] = field(default_factory=list)  # verified; its length is the cursor
    drafts: list[int] = field(default_factory=list)  # from the cursor on
    tree: list[int] = field(default_factory=list)  # the tokens of a tree of drafts, where the engine verifies trees
    logprobs: list[float] = field(default_factory=list)  # of the verified tokens
    candidates: int = 0  # how many of the likeliest tokens are noted at each position
    top: list[tuple[list[int], list[float]]] = field(default_factory=list)
    policy: DraftPolicy | None = None  # exact mode: chooses the number of drafts; None: always `draft_length`
    automaton_state: int = 0
    round_begin: int = 0  # where the last round began
    block_begin: int = 0  # checked mode: where the canvas in work begins and ends
    block_end: int = 0
    has_ended: bool = False  # a stop token was verified
    rounds: int = 0
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    corrected: int = 0  # drafts that were replaced

    @classmethod
    def start(
        cls, prompt: Sequence[int], cfg: SamplerConfig, seed: int, constraints: Constraints, vocab_size: int
    ) -> "Verification":
        """Nothing is verified yet."""
        next_token = NextToken(constraints, cfg.max_new_tokens, cfg.eos_token_ids, vocab_size)
        state = cls(prompt, cfg, rng.wrap_seed(seed), next_token, automaton_state=constraints.initial_state)
        state.block_end = cfg.max_new_tokens
        return state

    @property
    def last(self) -> int:
        """The token before the cursor. It is not in the KV cache yet."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def cached(self) -> int:
        """Tokens of prompt and answer that the KV cache holds between two rounds: all but the last."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.has_ended or len(self.tokens) >= self.cfg.max_new_tokens

    @property
    def is_canvas_done(self) -> bool:
        """Whether all positions of the canvas in work are verified."""
        return self.is_finished or len(self.tokens) >= self.block_end

    @property
    def counts(self) -> dict[str, int]:
        """Rounds and drafts so far, by the names of Stats."""
        return {name: getattr(self, name) for name in ("rounds", "drafted", "accepted", "corrected")}

    def committed(self, block: int, begin: int) -> Committed:
        """The verified tokens from `begin` on as an event: a canvas in checked mode, those of a round in exact mode."""
        ids_1C = torch.tensor([self.tokens[begin:]])  # on the host, where the tokens are
        return Committed(
            block=block,
            ids_BC=ids_1C,
            entropy_BC=torch.zeros(ids_1C.shape),
            settled_B=torch.ones(1, dtype=torch.bool),
            steps_B=torch.zeros(1, dtype=torch.long),
            logprobs=tuple(self.logprobs[begin:]),
            top_probs=self._top_probs(begin) if self.candidates else None,
            counts=self.counts,
        )

    def _top_probs(self, begin: int) -> TopProbs:
        """The probabilities of the verified tokens from `begin` on."""
        own_1C = torch.tensor([self.logprobs[begin:]]).exp()
        ids_CK = [ids for ids, _ in self.top[begin:]]
        probs_CK = [probs for _, probs in self.top[begin:]]
        return TopProbs(own_1C, own_1C, torch.tensor([ids_CK]), torch.tensor([probs_CK]))

    def set_canvas(self, ids: Sequence[int]) -> None:
        """Checked mode: these drafts are verified next, to the end of their canvas."""
        self.drafts = list(ids)
        self.block_begin = len(self.tokens)
        self.block_end = min(len(self.tokens) + len(ids), self.cfg.max_new_tokens)

    def next_round(self) -> Round:
        """What the next forward verifies, and where it drafts."""
        room = self.block_end - len(self.tokens)
        drafts = self.drafts[: min(self.cfg.draft_length + 1, room)]
        stops = [index for index, token in enumerate(drafts) if token in self.cfg.eos_token_ids]
        drafts = drafts[: stops[0] + 1] if stops else drafts
        clean_drafts = drafts[: min(self.cfg.draft_length, max(0, room - 1))]
        if stops:
            clean_drafts = clean_drafts[: stops[0]]  # nothing follows a stop token
        length, drafts_always = self.cfg.draft_length, True
        if self.policy is not None and length:
            length, drafts_always = self.policy.choose()
        has_canvases = length > 0 and (drafts_always or not clean_drafts)
        after = tuple(range(len(clean_drafts) + 1)) if has_canvases else ()
        return Round((self.last, *clean_drafts), tuple(drafts), after, length + 1)

    def canvas_ids(self, work: Round, vocab_size: int, device: torch.device) -> Tensor:
        """The canvases of a round before they are denoised, ids_JC: blanks if the model was trained so, else noise."""
        shape = (len(work.after), work.canvas_length)
        if self.cfg.draft_token is not None:
            return torch.full(shape, self.cfg.draft_token, device=device)
        starts_J = torch.tensor(work.after, dtype=torch.long, device=device) + len(self.tokens)
        positions_JC = starts_J[:, None] + torch.arange(work.canvas_length, device=device)
        seeds_N = torch.full((positions_JC.numel(),), self.seed, device=device)
        return rng.draft_noise(seeds_N, positions_JC.flatten(), vocab_size).view(shape)

    def take_drafts(self) -> None:
        """A deadline has passed before anything was verified: the drafts become the answer as they are."""
        stops = [index for index, token in enumerate(self.drafts) if token in self.cfg.eos_token_ids]
        self.has_ended = bool(stops)
        self.tokens = self.drafts[: stops[0] + 1] if stops else self.drafts[: self.block_end]
        self.logprobs = [0.0] * len(self.tokens)
        self.top = [([], [])] * len(self.tokens)

    def apply(self, work: Round, verdict: Verdict, fresh: Sequence[int]) -> None:
        """Takes over the verified tokens and the fresh drafts behind them."""
        accepted = list(work.drafts[: verdict.accepted])
        new = accepted if verdict.token is None else [*accepted, verdict.token]
        stops = [index for index, token in enumerate(new) if token in self.cfg.eos_token_ids]
        if stops:
            new = new[: stops[0] + 1]
            self.has_ended = True
        for token in new:
            next_state = self.next_token.advance(self.automaton_state, token)
            assert next_state is not None, "only tokens that fit the pattern are picked or accepted"
            self.automaton_state = next_state
        if self.policy is not None:
            self.policy.record(len(work.drafts), verdict.accepted)
        self.rounds += 1
        self.round_begin = len(self.tokens)
        self.drafted += len(work.drafts)
        self.accepted += verdict.accepted
        self.corrected += int(verdict.accepted < len(work.drafts))
        self.tokens += new
        self.logprobs += verdict.logprobs[: len(new)]
        self.top += verdict.top[: len(new)]
        self.tree = []
        ahead = self.drafts[len(new) :]
        self.drafts = [*fresh, *ahead[len(fresh) :]]


# 2. The story


@torch.inference_mode()
def generate_verified(
    model: Backbone,
    prompt: Sequence[int],
    cfg: SamplerConfig,
    *,
    seed: int,
    constraints: Constraints | None = None,
    verifier: Backbone | None = None,
    policy: DraftPolicy | None = None,
    adapter: Adapter | None = None,
    images: Sequence["ImageSpan"] = (),
) -> Iterator[Event]:
    """Continues a prompt in checked or exact mode, round by round. Another model may be the `verifier`.

    The answer of exact mode is then the verifier's own. Exact mode may choose its drafts by a `policy`.
    """
    constraints = constraints or Constraints()
    require_drafter(model, cfg)
    check_inputs(model, [prompt], cfg, [seed], [constraints], None)
    check_steering(cfg, constraints)
    check_verified_images(prompt, images, verifier)
    counter = StatsCounter(cfg, [seed], [len(prompt)], [constraints])
    state = Verification.start(prompt, cfg, seed, constraints, model.config.vocab_size)
    state.policy = policy
    worker = OwnVerifier(model, adapter) if verifier is None else OtherVerifier(model, verifier)
    worker.prefill(prompt, cfg, images)
    counter.mark_prefilled()
    block = 0
    while not state.is_finished:
        if cfg.check == "checked":
            canvas = None
            for canvas in draft_canvas(worker, state, constraints, block):
                yield make_draft(block, canvas, cfg.for_drafts, None)
            assert canvas is not None
            counter.rows[0]["steps"] += canvas.step
            counter.rows[0]["commits"] += int(block > 0)
            state.set_canvas(canvas.best_BC[0].tolist())
        while not state.is_canvas_done:
            work = state.next_round()
            verdict, fresh = worker.run(state, work)
            state.apply(work, verdict, fresh)
            if cfg.check == "checked":
                yield make_checked_draft(state, block, model.device)
            else:
                yield state.committed(block, state.round_begin)
        if cfg.check == "checked":
            yield state.committed(block, state.block_begin)
        block += 1
    counter.add_verified(state.tokens, sum(state.logprobs), state.counts, model.device)
    yield counter.finish(torch.tensor([state.has_ended], device=model.device))


def draft_canvas(
    worker: "OwnVerifier", state: Verification, constraints: Constraints, block: int
) -> Iterator[sampler.Canvas]:
    """Checked mode: denoises a whole canvas behind the verified tokens, step by step."""
    model = worker.model
    cfg = state.cfg.for_drafts
    cache = worker.cache_all(state)
    vocab_size = model.config.vocab_size
    draws = rng.draws([state.seed], block, model.device)
    canvas_constraints = constrain_canvas([constraints], [state.automaton_state], block, cfg, vocab_size, model.device)
    canvas = sampler.start(draws.noise(0, cfg.canvas_length, vocab_size), canvas_constraints)
    soft_1CD = None
    while not sampler.is_finished(canvas, cfg):
        logits_1CV = model.denoise(canvas.ids_BC, soft_1CD, cache)
        canvas, shaped_1CV = sampler.step(logits_1CV, canvas, cfg, draws, canvas_constraints)
        yield canvas
        soft_1CD = model.soft_embed(shaped_1CV) if not sampler.is_finished(canvas, cfg) else None


# 3. Its parts


class OwnVerifier:
    """The model verifies its own drafts: one joint forward a round."""

    def __init__(self, model: Backbone, adapter: Adapter | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self.cache: KVCache | None = None

    def prefill(self, prompt: Sequence[int], cfg: SamplerConfig, images: Sequence["ImageSpan"] = ()) -> None:
        """Encodes the prompt but its last token, which the first round encodes."""
        capacity = len(prompt) + cfg.max_new_tokens
        self.cache = self.model.new_cache(1, capacity, cfg.draft_length + 2, self.adapter)
        if len(prompt) > 1:
            prefill(self.model, [prompt[:-1]], self.cache, [images])

    def cache_all(self, state: Verification) -> KVCache:
        """The cache with all tokens before the cursor, for drafting a whole canvas. A round encodes the last one again."""
        assert self.cache is not None
        self.model.encode(torch.tensor([[state.last]], device=self.model.device), self.cache)
        return self.cache

    def run(self, state: Verification, work: Round) -> tuple[Verdict, list[int]]:
        """One round. Afterwards the cache holds all verified tokens but the last."""
        model = self.model
        cache = self.cache
        assert cache is not None
        begin = state.cached
        cache.rewind([begin])
        clean_1S = torch.tensor([work.clean], device=model.device)
        if work.after:
            canvas_JC = state.canvas_ids(work, model.config.vocab_size, model.device)
            hidden_1SD, hidden_1JCD = model.joint(clean_1S, canvas_JC[None], work.after, cache)
        else:
            hidden_1SD = model.encode(clean_1S, cache)
            hidden_1JCD = None
        verdict = verify(state, work, model.head(hidden_1SD[0]))
        cache.rewind([begin + min(verdict.accepted, len(work.clean) - 1) + 1])
        if hidden_1JCD is None or verdict.token is None or verdict.accepted not in work.after:
            return verdict, []
        hidden_CD = hidden_1JCD[0, work.after.index(verdict.accepted)]
        return verdict, draft_tokens(model, state, work, verdict, hidden_CD[1:])  # its first position is `token`'s own


class OtherVerifier(OwnVerifier):
    """Another model verifies: one forward of it and one joint forward of the drafting model a round."""

    def __init__(self, model: Backbone, verifier: Backbone) -> None:
        super().__init__(model)
        self.verifier = OwnVerifier(verifier)

    def prefill(self, prompt: Sequence[int], cfg: SamplerConfig, images: Sequence["ImageSpan"] = ()) -> None:
        """Encodes the prompt in both models. It has no images: see `check_verified_images`."""
        super().prefill(prompt, cfg, images)
        self.verifier.prefill(prompt, cfg)

    def attach(self, cache: KVCache, prompt: Sequence[int], cfg: SamplerConfig) -> None:
        """Takes over a cache of the drafting model that holds the prompt, and encodes the prompt in the verifier."""
        self.cache = cache
        self.verifier.prefill(prompt, cfg)

    def cache_all(self, state: Verification) -> KVCache:
        """The drafting model's cache with all tokens before the cursor."""
        self.catch_up(state)
        return super().cache_all(state)

    def catch_up(self, state: Verification) -> None:
        """Encodes the verified tokens that the drafting model has not seen. Its cache then holds all but the last."""
        assert self.cache is not None
        known = self.cache.lengths[0]
        context = [*state.prompt, *state.tokens][:-1]
        self.cache.rewind([min(known, len(context))])
        if known < len(context):
            self.model.encode(torch.tensor([context[known:]], device=self.model.device), self.cache)

    def run(self, state: Verification, work: Round) -> tuple[Verdict, list[int]]:
        """One round: the verifier judges the drafts, then the model drafts behind the tokens that are verified now."""
        verifier = self.verifier.model
        cache = self.verifier.cache
        assert cache is not None
        begin = state.cached
        cache.rewind([begin])
        hidden_1SD = verifier.encode(torch.tensor([work.clean], device=verifier.device), cache)
        verdict = verify(state, work, verifier.head(hidden_1SD[0]))
        cache.rewind([begin + min(verdict.accepted, len(work.clean) - 1) + 1])
        if not work.after or verdict.token is None:
            return verdict, []
        assert self.cache is not None
        known = self.cache.lengths[0]
        context = [*state.prompt, *state.tokens, *work.drafts[: verdict.accepted], verdict.token]
        self.cache.rewind([min(known, len(context) - 1)])
        known = self.cache.lengths[0]
        clean_1S = torch.tensor([context[known:]], device=self.model.device)
        canvas_JC = state.canvas_ids(work, self.model.config.vocab_size, self.model.device)[:1]
        _, hidden_11CD = self.model.joint(clean_1S, canvas_JC[None], [clean_1S.shape[1] - 1], self.cache)
        return verdict, draft_tokens(self.model, state, work, verdict, hidden_11CD[0, 0, :-1])


def check_verified_images(prompt: Sequence[int], images: Sequence["ImageSpan"], verifier: Backbone | None) -> None:
    """Refuses images that checked and exact mode cannot take: the features of an image are made for one model."""
    check_images([prompt], [images])
    if images and verifier is not None:
        raise ValueError("another model that verifies (verify_with) cannot read this model's images: choose check 'off'")
    if images and images[-1].end == len(prompt):
        raise ValueError("checked and exact mode need a token behind the last image of a prompt, which ends with it")


def verify(state: Verification, work: Round, logits_SV: Tensor) -> Verdict:
    """Compares the drafts of a round with the causal logits behind each clean token."""
    cfg = state.cfg
    rows = len(work.clean)
    device = logits_SV.device
    cursor = len(state.tokens)
    adjusted_SV = pick.adjust_logits(logits_SV, cfg, seen_tokens(state, work, logits_SV))
    adjusted_SV = state.next_token.mask_logits(adjusted_SV, cursor, state.automaton_state, work.drafts)
    seeds_S = torch.full((rows,), state.seed, device=device)
    picks = pick.pick_tokens(adjusted_SV, cfg, seeds_S, cursor + torch.arange(rows, device=device)).tolist()
    drafts = list(work.drafts)
    fits = [token == picked for token, picked in zip(drafts, picks, strict=False)]
    if cfg.check == "checked" and drafts:
        draft_S1 = torch.tensor(drafts, device=device)[:, None]
        chosen_S = adjusted_SV[: len(drafts)].gather(1, draft_S1)[:, 0]
        near = (adjusted_SV[: len(drafts)].amax(dim=-1) - chosen_S <= cfg.tolerance).tolist()
        fits = [is_equal or is_near for is_equal, is_near in zip(fits, near, strict=True)]
    accepted = fits.index(False) if False in fits else len(fits)
    token = picks[accepted] if accepted < rows else None
    emitted = [*drafts[:accepted], *([token] if token is not None else [])]
    logprobs_SV = logits_SV.float().log_softmax(dim=-1)
    emitted_S1 = torch.tensor(emitted, dtype=torch.long, device=device)[:, None]
    logprobs = logprobs_SV[: len(emitted)].gather(1, emitted_S1)[:, 0].tolist()
    top = []
    if state.candidates:
        best = logprobs_SV[: len(emitted)].topk(min(state.candidates, logits_SV.shape[-1]), dim=-1)
        top = list(zip(best.indices.tolist(), best.values.exp().tolist(), strict=True))
    return Verdict(accepted, token, tuple(logprobs), tuple(top))


def seen_tokens(state: Verification, work: Round, logits_SV: Tensor) -> Tensor | None:
    """The tokens before each position, bool_SV, prompt and drafts included; None if no penalty needs them."""
    if state.cfg.repetition_penalty == 1:
        return None
    seen_SV = torch.zeros_like(logits_SV, dtype=torch.bool)
    seen_SV[:, [*state.prompt, *state.tokens]] = True
    for row, token in enumerate(work.clean[1:], 1):
        seen_SV[row:, token] = True
    return seen_SV


def draft_tokens(model: Backbone, state: Verification, work: Round, verdict: Verdict, hidden_CD: Tensor) -> list[int]:
    """Samples drafts from left to right out of the hidden states of a canvas, behind the tokens verified in this round.

    Drafts use the same Gumbel numbers as the causal half: where both agree on the probabilities, they agree on the token.
    """
    assert verdict.token is not None
    cfg = state.cfg
    device = hidden_CD.device
    automaton_state: int | None = state.automaton_state
    for token in (*work.drafts[: verdict.accepted], verdict.token):
        automaton_state = state.next_token.advance(automaton_state, token) if automaton_state is not None else None
    position = len(state.tokens) + verdict.accepted + 1
    seed_1 = torch.full((1,), state.seed, device=device)
    previous = verdict.token
    drafts: list[int] = []
    for hidden_D in hidden_CD[: max(0, cfg.max_new_tokens - position)]:
        if previous in cfg.eos_token_ids or automaton_state is None:
            break
        logits_1V = model.draft_logits(hidden_D[None], torch.tensor([previous], device=device))
        if not state.next_token.is_empty:
            logits_1V = state.next_token.mask_logits(logits_1V, position, automaton_state, ())
        position_1 = torch.tensor([position], device=device)
        previous = int(pick.pick_tokens(logits_1V, cfg.without_filters, seed_1, position_1))
        automaton_state = state.next_token.advance(automaton_state, previous)
        drafts.append(previous)
        position += 1
    return drafts


# 4. Events


def make_checked_draft(state: Verification, block: int, device: torch.device) -> Draft:
    """The canvas in work after a round: verified tokens up to the cursor, drafts behind it."""
    begin = state.block_begin
    verified = len(state.tokens) - begin
    ids = [*state.tokens[begin:], *state.drafts][: state.block_end - begin]
    ids_1C = torch.tensor([ids], device=device)
    accepted_1C = (torch.arange(len(ids), device=device) < verified)[None]
    return Draft(
        block=block,
        step=state.cfg.draft_steps + state.rounds,
        ids_BC=ids_1C,
        canvas_BC=ids_1C,
        accepted_BC=accepted_1C,
        entropy_BC=torch.zeros(ids_1C.shape, device=device),
        settled_B=torch.tensor([state.is_canvas_done], device=device),
        max_steps=state.cfg.draft_steps,
        verified=verified,
        logprobs=tuple(state.logprobs[begin:]),
        counts=state.counts,
    )
