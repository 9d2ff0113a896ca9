"""Samples: texts of any mode against autoregressive texts of the same weights, under a judge model.

Perplexity under a judge can be lowered by repeating usual phrases, so samples are compared at equal entropy. All texts come
out of the engine, as users get them, the autoregressive ones too: exact mode without drafts. Everything is seeded.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redraft.config import EngineConfig, SamplerConfig
from redraft.engine import Engine
from redraft.model.backbone import Backbone
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.evals.words import drop_last_word

CPU_ROWS, GPU_ROWS = 16, 64  # texts in a batch
WINDOW = 100  # tokens of each text that entropy is computed over: entropy grows with length, and lengths differ
TEMPERATURES = (1.2, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1)  # of the autoregressive samples
COUNTS = ("rounds", "drafted", "accepted", "corrected")

Judge = Callable[[Sequence[str]], float]  # texts -> perplexity
Curve = list[tuple[float, float | None, float, float]]  # temperature, entropy, perplexity, length of autoregressive samples


@dataclass(frozen=True)
class Samples:
    """Texts and their cost."""

    texts: list[str]
    ids: list[list[int]]
    tokens_per_forward: float
    counts: dict[str, int] = field(default_factory=dict)  # of all texts together: rounds, drafted, accepted, corrected
    cut: frozenset[int] = frozenset()  # texts that ended at max_new_tokens

    @property
    def whole_words(self) -> list[str]:
        """The texts without words that were cut in two at the end."""
        return [drop_last_word(text) if number in self.cut else text for number, text in enumerate(self.texts)]

    @property
    def entropy(self) -> float | None:
        """Unigram entropy in nats of the first WINDOW tokens, over all texts of that length together.

        It falls when a text repeats itself and when all texts are alike. Inside one text it hardly falls with the
        temperature, because a story at low temperature is an ordinary story, not a repetitive one.
        """
        counts = Counter(token for ids in self.ids if len(ids) >= WINDOW for token in ids[:WINDOW])
        total = counts.total()
        return -sum(count / total * math.log(count / total) for count in counts.values()) if total else None

    @property
    def length(self) -> float:
        """Mean number of tokens."""
        return sum(map(len, self.ids)) / len(self.ids)


def make_engine(model: Backbone, rows: int | None = None) -> Engine:
    """An engine that runs `rows` texts at once. It keeps no prefixes: a text does not depend on those before it."""
    rows = rows or (GPU_ROWS if model.device.type == "cuda" else CPU_ROWS)
    return Engine(model, EngineConfig(max_running=rows, prefix_cache_entries=0))


def sample(engine: Engine, tokenizer: Tokenizer, prompt: str, count: int, cfg: SamplerConfig, seed: int = 0) -> Samples:
    """Samples texts through the engine, a batch at a time; text number i has the seed `seed + i`."""
    ids = tokenizer.encode_prompt(prompt)
    rows = engine.config.max_running
    ends = []
    for begin in range(0, count, rows):
        seeds = range(seed + begin, seed + min(begin + rows, count))
        requests = [engine.add(ids, cfg, seed=number) for number in seeds]
        batch = engine.run(requests)
        ends += [batch[request] for request in requests]
    stats = [end.stats[0] for end in ends]
    answers = []
    for end in ends:
        tokens = end.ids_BT[0, : end.stats[0].new_tokens].tolist()
        answers.append([token for token in tokens if token not in cfg.eos_token_ids])
    return Samples(
        texts=[tokenizer.decode(answer) for answer in answers],
        ids=answers,
        tokens_per_forward=sum(row.new_tokens for row in stats) / max(1, sum(row.forwards for row in stats)),
        counts={name: sum(getattr(row, name) for row in stats) for name in COUNTS},
        cut=frozenset(number for number, end in enumerate(ends) if end.reasons[0] != "stop"),
    )


def autoregressive(cfg: SamplerConfig, temperature: float) -> SamplerConfig:
    """The settings of plain autoregressive sampling: exact mode without drafts, and no filter but the temperature."""
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": ()}
    return cfg.changed(check="exact", draft_length=0, temperature=temperature, **plain)


@dataclass(frozen=True)
class Comparison:
    """Samples against autoregressive samples of the same entropy."""

    perplexity: float  # under the judge
    autoregressive: float | None  # perplexity at the same entropy; None if no temperature reaches it
    curve: Curve

    @property
    def ratio(self) -> float | None:
        """Above 1: the mode costs quality."""
        return self.perplexity / self.autoregressive if self.autoregressive is not None else None


def measure_curve(prompt: str, judge: Judge, sample_at: Callable[[float], Samples]) -> Curve:
    """Entropy and perplexity of autoregressive samples at falling temperatures."""
    curve = []
    for temperature in TEMPERATURES:
        samples = sample_at(temperature)
        perplexity = judge([prompt + text for text in samples.texts])
        curve.append((temperature, samples.entropy, perplexity, samples.length))
    return curve


def compare(samples: Samples, prompt: str, judge: Judge, curve: Curve) -> Comparison:
    """Compares the perplexity of samples with that of autoregressive samples at equal entropy.

    Between the points of the curve, log perplexity is interpolated linearly.
    """
    points = sorted((entropy, math.log(perplexity)) for _, entropy, perplexity, _ in curve if entropy is not None)
    log_perplexity = _interpolate(points, samples.entropy) if samples.entropy is not None else None
    perplexity = judge([prompt + text for text in samples.texts])
    return Comparison(perplexity, math.exp(log_perplexity) if log_perplexity is not None else None, curve)


def _interpolate(points: list[tuple[float, float]], x: float) -> float | None:
    """Interpolates linearly between neighbours; None outside the points."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1e-9)
    return None
