"""JSON extraction: records in words, answered as JSON with a schema constraint and without.

    values -> "name is Tom, age is 7." and a schema with these fields -> an answer -> valid? which fields are right?

Scores valid answers, right fields, and milliseconds per step. Schemas have one to eight fields. Everything is seeded.
"""

import importlib.util
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.config import SamplerConfig, parse_json
from redraft.constraints.budget import Budget
from redraft.constraints.constraints import Constraints
from redraft.constraints.pattern_compiler import Pattern, compile_one
from redraft.constraints.token_automaton import AutomatonCompiler, TokenAutomaton
from redraft.engine import Engine
from redraft.model.backbone import Backbone
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
PETS = ("dog", "cat", "bird", "fish")
DAYS = ("Monday", "Tuesday", "Friday", "Sunday")


@dataclass(frozen=True)
class Record:
    """A record in words, its schema and its values."""

    prompt: str
    schema: dict[str, Any]
    values: dict[str, Any]


def make_records(count: int, seed: int = 0) -> list[Record]:
    """Makes records of one field, of two, and so on, the same number of each."""
    rng = random.Random(seed)
    records = []
    for number in range(count):
        size = 1 + number * len(FIELDS) // count
        names = rng.sample(sorted(FIELDS), size)
        values = {name: _draw_value(name, rng) for name in names}
        sentence = ", ".join(f"{name} is {_to_words(values[name])}" for name in names)
        schema = {"type": "object", "properties": {name: FIELDS[name] for name in names}, "required": names}
        records.append(Record(f"The {sentence}.\n", schema, values))
    return records


def _draw_value(name: str, rng: random.Random) -> Any:
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


def _to_words(value: Any) -> str:
    match value:
        case list():
            return " and ".join(value)
        case dict():
            return value["name"]
        case bool():
            return str(value).lower()
    return str(value)


def score(
    model: Backbone,
    tokenizer: Tokenizer,
    sampler: SamplerConfig,
    records: Sequence[Record],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Scores answers with the schema and without: valid answers, also by number of fields, right fields, time per step."""
    if not importlib.util.find_spec("jsonschema"):
        raise ValueError("scoring needs jsonschema, which is not installed: pip install jsonschema")
    missing = model.config.vocab_size - tokenizer.size
    compiler = AutomatonCompiler((*tokenizer.token_bytes, *[None] * missing), sampler.eos_token_ids)
    engine = Engine(model)
    scores: dict[str, dict[str, Any]] = {}
    start_time = time.perf_counter()
    patterns = [compile_one(compiler, Pattern(schema=record.schema), Budget()) for record in records]
    automata = [pattern for pattern in patterns if isinstance(pattern, TokenAutomaton)]
    if len(automata) < len(records):
        raise ValueError("a schema of the records has no finite automaton: leave out schemas that refer to themselves")
    compile_seconds = time.perf_counter() - start_time
    for mode in ("schema", "free"):
        answers = []
        seconds = 0.0
        steps = 0
        for number, (record, pattern) in enumerate(zip(records, automata, strict=True)):
            constraints = Constraints(automaton=pattern) if mode == "schema" else Constraints()
            request = engine.add(tokenizer.encode_prompt(record.prompt), sampler, seed=number, constraints=constraints)
            start_time = time.perf_counter()
            finished = engine.run([request])[request]
            seconds += time.perf_counter() - start_time
            steps += finished.stats[0].steps
            ids = finished.ids_BT[0].tolist()
            stop = next((position for position, token in enumerate(ids) if token in sampler.eos_token_ids), len(ids))
            answers.append(tokenizer.decode(ids[:stop]))
            progress(f"{mode}: {number + 1} of {len(records)}")
        speed = {"ms_a_step": 1e3 * seconds / max(1, steps), "steps": steps / len(records)}
        scores[mode] = score_answers(records, answers) | speed
    overhead = scores["schema"]["ms_a_step"] / scores["free"]["ms_a_step"] - 1
    return {"schemas": len(records), **scores, "overhead": overhead, "ms_to_compile": 1e3 * compile_seconds / len(records)}


def score_answers(records: Sequence[Record], answers: Sequence[str]) -> dict[str, Any]:
    """Returns the shares of valid answers, of right fields, and of valid answers by number of fields."""
    from jsonschema import Draft202012Validator

    valid = right = fields = 0
    valid_by_size: dict[int, list[bool]] = {}
    for record, answer in zip(records, answers, strict=True):
        value = _parse_json(answer)
        is_valid = value is not None and Draft202012Validator(record.schema).is_valid(value)
        valid += is_valid
        fields += len(record.values)
        answered = value if isinstance(value, dict) else {}
        right += sum(json.dumps(answered.get(name)) == json.dumps(expected) for name, expected in record.values.items())
        valid_by_size.setdefault(len(record.values), []).append(is_valid)
    by_size = {f"valid_of_{size}": sum(flags) / len(flags) for size, flags in sorted(valid_by_size.items())}
    return {"valid": valid / max(1, len(records)), "fields_right": right / max(1, fields), **by_size}


def _parse_json(answer: str) -> Any:
    try:
        return parse_json(answer)
    except ValueError:
        return None
