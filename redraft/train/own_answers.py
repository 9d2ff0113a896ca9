"""Own answers: what a model answers to prompts, in large batches, as training data for its drafter.

    prompts of a file, or user turns that a chat model writes itself -> conversations -> answers -> JSON lines

A model without a chat template continues the prompts of the file, or writes texts from its start token. Records hold tokens,
{"prompt_ids", "ids"}: tokenizing a sampled text again could give other tokens than the model wrote. They are written in
parts, so that an interrupted run goes on behind its last whole part.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from redraft.checkpoint import fingerprint
from redraft.config import parse_json, read_json, replace_file, write_text
from redraft.model.backbone import Backbone
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.own_text import OwnTextConfig, OwnTextSampler

PART = "own-{:04}.jsonl"
SETTINGS = "settings.json"
MARK = "\ue000\ue001\ue002"  # stands for what the user says while the template writes the conversation around it
MOST_EMPTY = 4  # batches without a usable text before the model is given up


@dataclass(frozen=True, kw_only=True)
class OwnAnswerConfig:
    """How own answers are sampled."""

    tokens: int = 50_000_000  # of answers, to write
    part_tokens: int = 1_000_000  # of answers in a part
    rows: int = 1024  # of a batch
    length: int = 512  # most tokens of a conversation
    user_length: int = 96  # most tokens of a user's turn
    temperatures: tuple[float, ...] = (0.3, 0.7, 1.0)  # of answers, drawn for each row
    user_temperature: float = 1.0  # of user turns that the model writes itself
    most_repeats: int = 6  # texts with a 4-gram that occurs more often are dropped
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.part_tokens, self.rows, self.most_repeats) < 1:
            raise ValueError("tokens, part_tokens, rows and most_repeats must be at least 1")
        if self.length < 2 * self.user_length:
            raise ValueError(f"conversations of {self.length} tokens have no room behind user turns of {self.user_length}")
        if not self.temperatures or min(*self.temperatures, self.user_temperature) <= 0:
            raise ValueError("temperatures must be above 0")

    def within(self, context: int) -> "OwnAnswerConfig":
        """The same settings, with conversations that fit into a model's context."""
        length = min(self.length, context)
        return replace(self, length=length, user_length=min(self.user_length, length // 4))

    @property
    def parts(self) -> int:
        """The number of files."""
        return -(-self.tokens // self.part_tokens)

    def sampler(self, length: int, longest_beginning: int) -> OwnTextConfig:
        """The settings of a sampler of texts of this length."""
        return OwnTextConfig(
            rows=self.rows,
            length=length,
            longest_beginning=longest_beginning,
            most_repeats=self.most_repeats,
            seed=self.seed,
        )


# 1. Prompts


def chat_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids before and behind what the user says, up to where the assistant begins."""
    before, mark, behind = tokenizer.render([{"role": "user", "content": MARK}]).partition(MARK)
    if not mark:
        raise ValueError("the chat template changes what the user says: give prompts in a file")
    return tokenizer.encode(before), tokenizer.encode(behind)


def read_prompts(path: Path, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """The prompts of a file as ids: a line of text each, or JSON lines with "prompt". Too long ones are left out."""
    prompts = []
    frame = chat_frame(tokenizer) if tokenizer.can_chat else None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = _read_prompt(line, f"{path}:{number}")
        if not text:
            continue
        ids = [*frame[0], *tokenizer.encode(text), *frame[1]] if frame else tokenizer.encode_prompt(text)
        if len(ids) <= longest:
            prompts.append(ids)
    if not prompts:
        raise ValueError(f"{path} has no prompt of at most {longest} tokens")
    return prompts


def _read_prompt(line: str, where: str) -> str:
    """The text of a line; empty if there is none."""
    if not line.lstrip().startswith("{"):
        return line.strip()
    try:
        prompt = parse_json(line).get("prompt")
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(prompt, str):
        raise ValueError(f'{where} has no text under "prompt"')
    return prompt


class OwnPrompts:
    """Prompts without end: those of a list in a shuffled order, or those that the model writes itself."""

    def __init__(
        self,
        model: Backbone,
        tokenizer: Tokenizer,
        cfg: OwnAnswerConfig,
        stops: Sequence[int],
        given: Sequence[list[int]] | None,
    ) -> None:
        self.model = model
        self.stops = stops
        self.cfg = cfg
        self.given = given
        self.frame = chat_frame(tokenizer) if tokenizer.can_chat and given is None else None
        self.start = [model.config.bos_token_id if tokenizer.bos_id is None else tokenizer.bos_id]
        self.sampler: OwnTextSampler | None = None

    @property
    def longest(self) -> int:
        """The most tokens of a prompt."""
        if self.given is not None:
            return max(map(len, self.given))
        return len(self.frame[0]) + self.cfg.user_length + len(self.frame[1]) if self.frame else 1

    def read(self, part: int) -> Iterator[list[int]]:
        """The prompts of a part of the run."""
        rng = random.Random(f"own prompts {self.cfg.seed} {part}")
        if self.given is not None:
            return cycle(rng.sample(self.given, len(self.given)))
        return self._write_turns() if self.frame else cycle([self.start])

    def _write_turns(self) -> Iterator[list[int]]:
        """User turns that the model writes where the template expects one. One that does not end is left out."""
        assert self.frame is not None
        before, behind = self.frame
        if self.sampler is None:
            settings = self.cfg.sampler(len(before) + self.cfg.user_length, len(before))
            self.sampler = OwnTextSampler(self.model, settings, self.stops)
        empty = 0
        while empty < MOST_EMPTY:
            rows = self.sampler.sample_rows([before] * self.cfg.rows, [self.cfg.user_temperature] * self.cfg.rows)
            turns = [row[len(before) : -1] for row in rows if row is not None and row[-1] in self.stops]
            empty = 0 if any(turns) else empty + 1
            yield from ([*before, *turn, *behind] for turn in turns if turn)
        raise ValueError("the model writes no user turns of its own: give prompts in a file")


# 2. Answers


def write_own_answers(
    model: Backbone,
    tokenizer: Tokenizer,
    folder: Path,
    cfg: OwnAnswerConfig,
    stops: Sequence[int],
    given: Sequence[list[int]] | None = None,
) -> Iterator[int]:
    """Samples answers into the folder, part by part. Yields the tokens written so far, those of earlier runs included.

    A folder that was begun with another model, other prompts or other settings is refused. `stops` end an answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = OwnPrompts(model, tokenizer, cfg, stops, given)
    settings = {
        "model": fingerprint(model),
        "prompts": hashlib.sha256(json.dumps(given).encode()).hexdigest(),
        **asdict(replace(cfg, tokens=cfg.part_tokens)),  # more tokens only add parts
    }
    require_same_settings(folder / SETTINGS, json.loads(json.dumps(settings)))
    sampler: OwnTextSampler | None = None
    for part in range(cfg.parts):
        path = folder / PART.format(part)
        begin = part * cfg.part_tokens
        if not path.exists():
            sampler = sampler or OwnTextSampler(model, cfg.sampler(cfg.length, prompts.longest), stops)
            torch.manual_seed(random.Random(f"{cfg.seed} {part}").getrandbits(62))
            with replace_file(path) as file:
                for lines, tokens in _sample_part(sampler, prompts.read(part), part, cfg, tokenizer.size):
                    file.writelines(lines)
                    yield begin + min(tokens, cfg.part_tokens)
        yield begin + cfg.part_tokens


def require_same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of the answers in a folder, or compares them with those that it was begun with."""
    if not path.exists():
        write_text(path, json.dumps(settings, indent=2) + "\n")
        return
    before = read_json(path)
    different = sorted(name for name in settings if before.get(name) != settings[name])
    if different:
        name = different[0]
        raise ValueError(
            f"{path.parent} holds answers with another {name}, {before.get(name)} and not {settings[name]}: "
            "give another folder, or the same settings"
        )


def _sample_part(
    sampler: OwnTextSampler, prompts: Iterator[list[int]], part: int, cfg: OwnAnswerConfig, vocab_size: int
) -> Iterator[tuple[list[str], int]]:
    """Yields the lines of each batch, and how many tokens of answers the part has, until it has enough.

    The model's vocabulary may be padded: an answer with a token that the tokenizer does not have is left out.
    """
    rng = random.Random(f"own answers {cfg.seed} {part}")
    tokens = empty = 0
    while tokens < cfg.part_tokens:
        batch = list(islice(prompts, cfg.rows))
        rows = sampler.sample_rows(batch, rng.choices(cfg.temperatures, k=cfg.rows))
        answers = [
            (prompt, row[len(prompt) :])
            for prompt, row in zip(batch, rows, strict=True)
            if row is not None and len(row) > len(prompt) + 1 and max(row) < vocab_size
        ]
        empty = 0 if answers else empty + 1
        if empty == MOST_EMPTY:
            raise ValueError("every answer loops: this model has nothing to learn from its own text")
        tokens += sum(len(answer) for _, answer in answers)
        yield [json.dumps({"prompt_ids": p, "ids": a}, separators=(",", ":")) + "\n" for p, a in answers], tokens
