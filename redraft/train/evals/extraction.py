"""Records told in words, asked for as JSON under a schema, and without: how many answers are valid, right, and how slow.

    values -> "name is Tom, age is 7." and a schema of as many fields -> an answer -> valid? which fields are right?

Schemas grow from one field to as many as there are kinds of them. Everything is seeded.
"""

import importlib.util
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.config import SamplerConfig
from redraft.constraints import json_schema
from redraft.constraints.constraints import Constraints
from redraft.constraints.token_automaton import AutomatonCompiler
from redraft.engine import Engine
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tokenizer.tokenizer import Tokenizer

FIELDS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "enum": ["Tom", "Lily", "Ben", "Sue", "Max"]},
    "age": {"type": "integer", "minimum": 1, "maximum": 99},
    "pet": {"type": "string", "pattern": "^[a-z]{2,8}$"},
    "happy": {"type": "boolean"},
    "color": {"type": "string", "enum": ["red", "blue", "green", "yellow"]},
    "toys": {"type": "array", "items": {"type": "string", "enum": ["ball", "car", "doll"]}, "minItems": 1, "maxItems": 3},
    "friend": {"type": "object", "properties": {"name": {"type": "string", "enum": ["Amy", "Joe"]}}, "required": ["name"]},
    "day": {"type": "string", "pattern": "^(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day$"},
}
PETS, DAYS = ("dog", "cat", "bird", "fish"), ("Monday", "Tuesday", "Friday", "Sunday")


@dataclass(frozen=True)
class Told:
    """A record in words, and its schema."""

    prompt: str
    schema: dict[str, Any]
    values: dict[str, Any]


def told(count: int, seed: int = 0) -> list[Told]:
    """Records of one field, of two, and so on, as many of each."""
    rng, found = random.Random(seed), []
    for number in range(count):
        size = 1 + number * len(FIELDS) // count
        names = rng.sample(sorted(FIELDS), size)
        values = {name: _value(name, rng) for name in names}
        said = ", ".join(f"{name} is {_words(values[name])}" for name in names)
        schema = {"type": "object", "properties": {name: FIELDS[name] for name in names}, "required": names}
        found.append(Told(f"The {said}.\n", schema, values))
    return found


def _value(name: str, rng: random.Random) -> Any:
    match FIELDS[name]:
        case {"enum": choices}:
            return rng.choice(choices)
        case {"type": "integer", "minimum": low, "maximum": high}:
            return rng.randint(low, high)
        case {"type": "boolean"}:
            return rng.random() < 0.5
        case {"type": "array", "items": {"enum": choices}}:
            return rng.sample(choices, rng.randint(1, len(choices)))
        case {"type": "object", "properties": {"name": {"enum": choices}}}:
            return {"name": rng.choice(choices)}
    return rng.choice(PETS if name == "pet" else DAYS)


def _words(value: Any) -> str:
    if isinstance(value, list):
        return " and ".join(value)
    return value["name"] if isinstance(value, dict) else str(value).lower() if isinstance(value, bool) else str(value)


def score(
    model: DiffusionGemma,
    tokenizer: Tokenizer,
    sampler: SamplerConfig,
    records: Sequence[Told],
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """With the schema and without: valid answers, by number of fields too, right fields, milliseconds of a step."""
    if not importlib.util.find_spec("jsonschema"):
        raise ValueError("answers are scored with jsonschema, which is not installed: pip install jsonschema")
    missing = model.config.vocab_size - tokenizer.size
    words = AutomatonCompiler((*tokenizer.token_bytes, *[None] * missing), sampler.eos_token_ids)
    engine, found = Engine(model), {}
    began = time.perf_counter()
    patterns = [words.compile(json_schema.build_regex(one.schema)) for one in records]
    compiled = time.perf_counter() - began
    for way in ("schema", "free"):
        answers, seconds, steps = [], 0.0, 0
        for number, (one, pattern) in enumerate(zip(records, patterns, strict=True)):
            constraints = Constraints(automaton=pattern if way == "schema" else None)
            request = engine.add(tokenizer.encode_prompt(one.prompt), sampler, seed=number, constraints=constraints)
            began = time.perf_counter()
            end = engine.run([request])[request]
            seconds, steps = seconds + time.perf_counter() - began, steps + end.stats[0].steps
            ids = end.ids_BT[0].tolist()
            stop = next((at for at, token in enumerate(ids) if token in sampler.eos_token_ids), len(ids))
            answers.append(tokenizer.decode(ids[:stop]))
            tell(f"{way}: {number + 1} of {len(records)}")
        found[way] = _counted(records, answers) | {"ms_a_step": 1e3 * seconds / max(1, steps), "steps": steps / len(records)}
    overhead = found["schema"]["ms_a_step"] / found["free"]["ms_a_step"] - 1
    return {"schemas": len(records), **found, "overhead": overhead, "ms_to_compile": 1e3 * compiled / len(records)}


def _counted(records: Sequence[Told], answers: Sequence[str]) -> dict[str, Any]:
    from jsonschema import Draft202012Validator

    valid = right = fields = 0
    sizes: dict[int, list[bool]] = {}
    for one, answer in zip(records, answers, strict=True):
        value = _parsed(answer)
        fits = value is not None and Draft202012Validator(one.schema).is_valid(value)
        valid, fields = valid + fits, fields + len(one.values)
        told_ = value if isinstance(value, dict) else {}
        right += sum(json.dumps(told_.get(name)) == json.dumps(known) for name, known in one.values.items())
        sizes.setdefault(len(one.values), []).append(fits)
    by_size = {f"valid_of_{size}": sum(some) / len(some) for size, some in sorted(sizes.items())}
    return {"valid": valid / max(1, len(records)), "fields_right": right / max(1, fields), **by_size}


def _parsed(answer: str) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return None
