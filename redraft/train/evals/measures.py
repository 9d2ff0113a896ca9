"""How good a model is: as a language model, as a denoiser, as a writer, at filling holes.

    likelihood      next-token loss of the encoder, and the denoiser's bound (NELBO), in nats per token and bits per byte
    repair          at each noise level: clean tokens kept, struck tokens mended
    samples         perplexity under a judge that is not the model, beside the samples' entropy and tokens per forward
    infill          whole lines of code put back, against the same weights that may not look behind the line
    edit            struck tokens found and put back, and what is spoiled on the way

Everything is seeded. Knows nothing of terminals. Shapes: B rows, L tokens of a row, V vocabulary, N tokens, S samples.
"""

import ast
import itertools
import math
import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.config import SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion import generate
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.engine import Engine
from redraft.kernels import argmax_entropy_sample
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.masks import Layout
from redraft.tasks.edit import redraft_tokens
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.loss import Batch, Masks, dense_masks

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
ROWS = 16  # texts looked at together
WINDOW = 100  # tokens of each text that entropy is taken over: it grows with length, and lengths differ
TEMPERATURES = (1.2, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1)  # of the left-to-right samples that others are compared with


# 1. Texts to rows


def rows_of(texts: Sequence[list[int]], block: int, device: torch.device) -> Batch:
    """A text a row, its first token given, the rest in blocks; the last block is as short as the text leaves it."""
    longest = max(map(len, texts))
    shape = (len(texts), longest)
    ids_BL, positions_BL = torch.zeros(shape, dtype=torch.long), torch.arange(longest).expand(shape)
    documents_BL = torch.full(shape, -1)
    for row, ids in enumerate(texts):
        ids_BL[row, : len(ids)] = torch.tensor(ids)
        documents_BL[row, : len(ids)] = 0
    starts_BL = torch.where(positions_BL == 0, -1, 1 + (positions_BL - 1) // block * block)
    starts_BL = torch.where(documents_BL == 0, starts_BL, -1)
    return Batch(ids_BL.to(device), Layout(positions_BL, starts_BL, documents_BL).to(device))


def look(model: DiffusionGemma, batch: Batch, noisy_BL: Tensor, mask_of: Masks, looks: int) -> Iterator[Tensor]:
    """The denoiser's logits at every position, look after look; each is told what the one before believed."""
    soft_BLD = None
    for _ in range(looks):
        hidden_BLD, _, _ = model.forward_train(noisy_BL, batch.ids_BL, soft_BLD, batch.layout.positions, mask_of)
        logits_BLV = model.head(hidden_BLD)
        yield logits_BLV
        soft_BLD = model.soft_embed(logits_BLV) * batch.canvas_BL[..., None]


# 2. Likelihood


@dataclass(frozen=True)
class Likelihood:
    """Nats over a number of tokens and bytes."""

    nats: float
    tokens: int
    size: int

    @property
    def nats_per_token(self) -> float:
        """Mean over tokens, the start token not counted."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Comparable between vocabularies."""
        return self.nats / math.log(2) / self.size


@torch.inference_mode()
def autoregressive(model: DiffusionGemma, tokenizer: Tokenizer, texts: Sequence[str]) -> Likelihood:
    """Next-token loss of the encoder, each text alone behind the start token."""
    nats = tokens = 0
    for some in _split([tokenizer.encode_prompt(text) for text in texts]):
        batch = rows_of(some, 1, model.device)
        counts = [len(ids) for ids in some]
        hidden_BLD = model.encode(batch.ids_BL, model.new_cache(len(some), max(counts)), counts)
        logits_BLV = model.head(hidden_BLD[:, :-1])
        targets_BL = torch.where(batch.next_BL, batch.ids_BL.roll(-1, dims=1), -100)[:, :-1]
        nats += float(F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum"))
        tokens += sum(counts) - len(some)
    return Likelihood(nats, tokens, sum(len(text.encode()) for text in texts))


@torch.inference_mode()
def nelbo(
    model: DiffusionGemma, tokenizer: Tokenizer, texts: Sequence[str], block: int, levels: int = 16, looks: int = 2
) -> Likelihood:
    """The denoiser's bound on the same texts, block behind block, over stratified noise levels."""
    generator = torch.Generator().manual_seed(0)
    vocab, nats, tokens = model.config.vocab_size, 0.0, 0
    for some in _split([tokenizer.encode_prompt(text) for text in texts]):
        batch = rows_of(some, block, model.device)
        mask_of = dense_masks(model.config, batch.layout)
        for level in range(levels):
            t = (level + float(torch.rand(1, generator=generator))) / levels
            t = min(max(t, 1e-3), 1 - 1e-3)
            noisy_BL = strike(batch, t, vocab, generator)
            *_, logits_BLV = look(model, batch, noisy_BL, mask_of, looks)
            canvas_BL = batch.canvas_BL
            terms = bound(logits_BLV[canvas_BL], noisy_BL[canvas_BL], batch.ids_BL[canvas_BL], t)
            nats += float(terms.sum()) / levels
        tokens += sum(map(len, some)) - len(some)
    return Likelihood(nats, tokens, sum(len(text.encode()) for text in texts))


def strike(batch: Batch, t: float, vocab: int, generator: torch.Generator) -> Tensor:
    """The rows with every canvas token replaced by a uniform one with probability t."""
    shape = batch.ids_BL.shape
    hit_BL = (torch.rand(shape, generator=generator) < t).to(batch.ids_BL.device) & batch.canvas_BL
    noise_BL = torch.randint(vocab, shape, generator=generator).to(batch.ids_BL.device)
    return torch.where(hit_BL, noise_BL, batch.ids_BL)


def bound(logits_NV: Tensor, noisy_N: Tensor, clean_N: Tensor, t: float) -> Tensor:
    """The integrand of the continuous-time bound at level t, in nats per token.

    The denoiser's logits say p(clean | everything); the bound is made for a model that has not seen the token itself. The
    two differ exactly in what the token says about itself, log(1 + V a / (1 - a)), which is taken off where it stands.
    """
    vocab, a = logits_NV.shape[-1], 1.0 - t
    logits_NV = logits_NV.double()
    own_N1, clean_N1 = noisy_N[:, None], clean_N[:, None]
    logits_NV = logits_NV.scatter_add(-1, own_N1, torch.full_like(own_N1, -math.log1p(vocab * a / t), dtype=torch.double))
    mixed_NV = vocab * a * torch.softmax(logits_NV, dim=-1) + t  # V times the model's marginal at this level
    logs_NV = mixed_NV.log()
    there, elsewhere = vocab * a + t, t  # V times the true marginal: at the clean token, and at any other
    true_N = torch.where(noisy_N == clean_N, there, elsewhere)
    ours_N, log_ours_N = (x.gather(-1, own_N1).squeeze(-1) for x in (mixed_NV, logs_NV))
    entropy = there * math.log(there) + (vocab - 1) * elsewhere * math.log(elsewhere)
    cross_N = vocab * a * logs_NV.gather(-1, clean_N1).squeeze(-1) + t * logs_NV.sum(dim=-1)
    ratios_N = (vocab * (log_ours_N - true_N.log()) + entropy - cross_N) / true_N
    return -(vocab / true_N - vocab / ours_N - ratios_N) / (vocab * a)


def _split(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Rows of like length together."""
    rows = sorted(rows, key=len)
    for begin in range(0, len(rows), ROWS):
        yield rows[begin : begin + ROWS]


# 3. Repair


@torch.inference_mode()
def repair(
    model: DiffusionGemma, tokenizer: Tokenizer, texts: Sequence[str], block: int, looks: int = 2
) -> dict[float, tuple[float, float]]:
    """By noise level: the share of untouched tokens the model would keep, and of struck ones it would mend."""
    generator, found = torch.Generator().manual_seed(0), {}
    groups = list(_split([tokenizer.encode_prompt(text) for text in texts]))
    for t in LEVELS:
        kept = mended = clean = struck = 0
        for some in groups:
            batch = rows_of(some, block, model.device)
            noisy_BL = strike(batch, t, model.config.vocab_size, generator)
            *_, logits_BLV = look(model, batch, noisy_BL, dense_masks(model.config, batch.layout), looks)
            right_BL = logits_BLV.argmax(dim=-1) == batch.ids_BL
            same_BL, hit_BL = (noisy_BL == batch.ids_BL) & batch.canvas_BL, noisy_BL != batch.ids_BL
            kept, clean = kept + int((right_BL & same_BL).sum()), clean + int(same_BL.sum())
            mended, struck = mended + int((right_BL & hit_BL).sum()), struck + int(hit_BL.sum())
        found[t] = (kept / max(1, clean), mended / max(1, struck))
    return found


# 4. Samples


@dataclass(frozen=True)
class Sampled:
    """Texts and what they cost."""

    texts: list[str]
    ids: list[list[int]]
    tokens_per_forward: float

    @property
    def entropy(self) -> float | None:
        """Of the first WINDOW tokens of all texts that long, taken together, in nats.

        It falls when a text repeats itself, and when all texts are the same; inside one text it hardly falls with the
        temperature, because a story told at low temperature is a usual story, not one that goes round in circles.
        """
        counts = Counter(token for ids in self.ids if len(ids) >= WINDOW for token in ids[:WINDOW])
        total = counts.total()
        return -sum(count / total * math.log(count / total) for count in counts.values()) if total else None

    @property
    def length(self) -> float:
        """Tokens of a text, on average."""
        return sum(map(len, self.ids)) / len(self.ids)


def drafted(
    model: DiffusionGemma, tokenizer: Tokenizer, prompt: str, count: int, sampler: SamplerConfig, seed: int = 0
) -> Sampled:
    """Samples written page by page, as users get them."""
    rows, steps, tokens = [], 0, 0
    for begin in range(0, count, ROWS):
        seeds = [seed + number for number in range(begin, min(begin + ROWS, count))]
        *_, end = generate.generate(model, [tokenizer.encode_prompt(prompt)] * len(seeds), sampler, seeds=seeds)
        for row, stats in enumerate(end.stats):
            rows.append(end.ids_BT[row, : stats.new_tokens].tolist())
            steps, tokens = steps + stats.forwards, tokens + stats.new_tokens
    return _sampled(tokenizer, rows, sampler, tokens / steps)


@torch.inference_mode()
def spoken(
    model: DiffusionGemma,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    sampler: SamplerConfig,
    temperature: float,
    seed: int = 0,
) -> Sampled:
    """Samples of the same weights written token after token by the encoder."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode_prompt(prompt)
    cache = model.new_cache(count, len(ids) + sampler.max_new_tokens)
    last_B1D = model.encode(torch.tensor([ids] * count, device=model.device), cache)[:, -1:]
    rows: list[list[int]] = [[] for _ in range(count)]
    ended = [False] * count
    for _ in range(sampler.max_new_tokens):
        uniform_B1 = torch.rand(count, 1, generator=generator, dtype=torch.float64).to(model.device)
        next_B1 = argmax_entropy_sample(model.head(last_B1D) / temperature, uniform_B1).sampled_BC
        for row, token in enumerate(next_B1.flatten().tolist()):
            if not ended[row]:
                rows[row].append(token)
                ended[row] = token in sampler.eos_token_ids
        if all(ended):
            break
        last_B1D = model.encode(next_B1, cache)
    return _sampled(tokenizer, rows, sampler, 1.0)


def _sampled(tokenizer: Tokenizer, rows: list[list[int]], sampler: SamplerConfig, tokens_per_forward: float) -> Sampled:
    rows = [[token for token in row if token not in sampler.eos_token_ids] for row in rows]
    return Sampled([tokenizer.decode(row) for row in rows], rows, tokens_per_forward)


Judge = Callable[[Sequence[str]], float]  # texts -> perplexity


@dataclass(frozen=True)
class Comparison:
    """Drafted samples beside spoken ones of the same entropy."""

    drafted: float  # perplexity under the judge
    spoken: float | None  # of left-to-right samples of the same entropy; None where no temperature gives it
    curve: list[tuple[float, float | None, float, float]]  # temperature, entropy, perplexity, length of spoken samples

    @property
    def ratio(self) -> float | None:
        """Above 1: drafting costs quality."""
        return self.drafted / self.spoken if self.spoken is not None else None


def compare(pages: Sampled, prompt: str, judge: Judge, generate_autoregressive: Callable[[float], Sampled]) -> Comparison:
    """Perplexity of drafted samples against spoken ones at matched entropy.

    Spoken samples at falling temperatures trace a curve of entropy and perplexity; the log perplexity between two points of
    it is taken on the straight line.
    """
    curve = []
    for temperature in TEMPERATURES:
        voices = generate_autoregressive(temperature)
        perplexity = judge([prompt + text for text in voices.texts])
        curve.append((temperature, voices.entropy, perplexity, voices.length))
    points = sorted((entropy, math.log(perplexity)) for _, entropy, perplexity, _ in curve if entropy is not None)
    matched = _interpolated(points, pages.entropy) if pages.entropy is not None else None
    own = judge([prompt + text for text in pages.texts])
    return Comparison(own, math.exp(matched) if matched is not None else None, curve)


def _interpolated(points: list[tuple[float, float]], at: float) -> float | None:
    """On the line between the neighbours; None beyond the ends."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / max(x1 - x0, 1e-9)
    return None


# 5. Infill


@dataclass(frozen=True)
class Hole:
    """A line taken out of a text, cut where the text's own tokens are: half a token is a riddle of its own."""

    before: list[int]
    line: list[int]
    after: list[int]


def holes(tokenizer: Tokenizer, texts: Sequence[str], longest: int, seed: int = 0) -> list[Hole]:
    """One line of the code of each function: neither its signature nor its docstring nor its last line.

    It has three letters or digits at least and `longest` tokens at most. Texts that are no Python are passed over.
    """
    found = []
    for number, text in enumerate(texts):
        lines, at, fit = text.rstrip("\n").split("\n"), 0, []
        encoded = tokenizer.vocabulary.encode(text, add_special_tokens=False)
        first_line = first_statement(text)
        for count, line in enumerate(lines[:-1], 1):
            begin, end = at + len(line) - len(line.lstrip()), at + len(line)
            inside = [i for i, (first, last) in enumerate(encoded.offsets) if first < end and last > begin]
            if count >= first_line and sum(map(str.isalnum, line)) >= 3 and len(inside) <= longest:
                fit.append(slice(inside[0], inside[-1] + 1))
            at = end + 1
        if fit:
            cut = random.Random(f"{seed} {number}").choice(fit)
            found.append(Hole(encoded.ids[: cut.start], encoded.ids[cut], encoded.ids[cut.stop :]))
    return found


def first_statement(text: str) -> float:
    """The line (1 is the first) on which a function's code begins, behind its docstring; infinite where there is none."""
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return math.inf
    body = next((n.body for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), [])
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return body[0].lineno if body else math.inf


def filled(
    model: DiffusionGemma, tokenizer: Tokenizer, taken: Sequence[Hole], sampler: SamplerConfig, seed: int = 0
) -> list[list[int]]:
    """Every hole filled on one canvas, all that stands around it pinned, its length in tokens known."""
    answers = []
    settings = sampler.changed(max_new_tokens=sampler.canvas_length, t_min=0.2, t_max=0.2)  # one answer is right
    for begin in range(0, len(taken), ROWS):
        some = taken[begin : begin + ROWS]
        plans = [_on_canvas(hole, sampler) for hole in some]
        prompts = [tokenizer.encode_prompt("") + hole.before[: plan.given] for hole, plan in zip(some, plans, strict=True)]
        seeds = [seed + begin + row for row in range(len(plans))]
        constraints = [Constraints(pins=plan.pins) for plan in plans]
        *_, page, _ = generate.generate(model, prompts, settings, seeds=seeds, constraints=constraints)
        for hole, plan, ids in zip(some, plans, page.ids_BC.tolist(), strict=True):
            answers.append(ids[plan.first : plan.first + len(hole.line)])
    return answers


@dataclass(frozen=True)
class _Plan:
    given: int  # tokens before the hole that are prompt
    first: int  # where the hole is on the canvas
    pins: dict[int, int]


def _on_canvas(hole: Hole, sampler: SamplerConfig) -> _Plan:
    """The whole text on the canvas if it fits, else as much as leaves the hole in the middle; the stop token behind it."""
    size, text = sampler.canvas_length, [*hole.before, *hole.line, *hole.after, sampler.eos_token_ids[0]]
    given = 0 if len(text) <= size else max(0, len(hole.before) - (size - len(hole.line)) // 2)
    first, canvas = len(hole.before) - given, text[given : given + size]
    pins = {at: token for at, token in enumerate(canvas) if not first <= at < first + len(hole.line)}
    return _Plan(given, first, pins)


def continued(model: DiffusionGemma, tokenizer: Tokenizer, taken: Sequence[Hole]) -> list[list[int]]:
    """The same lines by the same weights left to right, greedily, up to the newline: what follows is not seen."""
    return [
        greedy(
            model,
            [*tokenizer.encode_prompt(""), *hole.before],
            2 * len(hole.line) + 8,
            lambda said: "\n" in tokenizer.decode(said[-1:]),
        )
        for hole in taken
    ]


def greedy(model: DiffusionGemma, ids: Sequence[int], most: int, over: Callable[[list[int]], bool]) -> list[int]:
    """The likeliest token after token behind these, up to the one with which it is over, that one left out."""
    said: list[int] = []
    for token in generate_autoregressive(model, ids, most):
        if token in model.config.eos_token_ids or over([*said, token]):
            break
        said.append(token)
    return said


def exact(answers: Sequence[list[int]], taken: Sequence[Hole]) -> float:
    """The share of lines put back token for token."""
    return sum(answer == hole.line for answer, hole in zip(answers, taken, strict=True)) / max(1, len(taken))


# 6. Edit


@dataclass(frozen=True)
class Mended:
    """What an edit made of texts in which some tokens were struck."""

    struck: int
    repaired: float  # share of the struck that are what they were
    noticed: float  # share of the struck that are something else now
    spoiled: float  # share of the others that were changed
    forwards: float  # a text


def mended(
    model: DiffusionGemma,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    sampler: SamplerConfig,
    *,
    share: float = 0.05,
    strength: float = 0.1,
    seed: int = 0,
) -> Mended:
    """Texts with a share of their tokens replaced by others at random, then edited."""
    engine, chance, marks = (
        Engine(model),
        torch.Generator().manual_seed(seed),
        tokenizer.ids_without_text(model.config.vocab_size),
    )
    struck = repaired = noticed = spoiled = clean = forwards = 0
    for number, text in enumerate(texts):
        ids = tokenizer.encode(text)
        hit = [bool(roll < share) for roll in torch.rand(len(ids), generator=chance)]
        noise = torch.randint(model.config.vocab_size, (len(ids),), generator=chance).tolist()
        worse = [other if now else token for token, other, now in zip(ids, noise, hit, strict=True)]
        options = {
            "strength": strength,
            "keep_positions": (),
            "forbidden": marks,
            "prompt": tokenizer.encode_prompt(""),
            "seed": seed + number,
        }
        new, passes, _ = redraft_tokens(engine, worse, sampler, **options)
        for token, bad, after in zip(ids, worse, new, strict=True):
            if token == bad:
                clean, spoiled = clean + 1, spoiled + (after != token)
            else:
                struck, repaired, noticed = struck + 1, repaired + (after == token), noticed + (after != bad)
        forwards += passes
    struck_, clean_ = max(1, struck), max(1, clean)
    return Mended(struck, repaired / struck_, noticed / struck_, spoiled / clean_, forwards / max(1, len(texts)))
