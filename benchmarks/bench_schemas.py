"""JSON schemas of a file: how many compile, whether redraft obeys them, and what compiling costs. The last line is JSON.

    python benchmarks/bench_schemas.py FILE [--vocabulary MODEL] [--made 20] [--seconds 60] [--workers 2]
    python benchmarks/bench_schemas.py FILE --answers MODEL [--count 100] [--max-tokens 64]

FILE has a line of JSON for each schema, `{source, name, schema, instances: [[value, is_valid], ...]}`, and may be compressed
(.xz, .gz). Schemas whose source begins with `bench:` are JSONSchemaBench, `suite-` is JSON-Schema-Test-Suite.

The table counts, for each source: schemas that constrain a canvas, that constrain an answer from left to right, that are
refused; and instances. A valid instance is tried with redraft's spacing and its keys in the order of the schema's properties
("no order": several subschemas name the keys of an object, so that two orders are tried). An invalid one is tried in several
spellings and must be refused in all. The time is the processor time of schemas that compile, over the vocabulary if one is
given.

`--made` also makes at least so many instances for each schema that compiles, valid ones and mutations of them, and random
answers of redraft; jsonschema judges them (tests/schema_instances.py). Each schema may take `--seconds` of processor time.
`--answers` lets a model answer up to `--count` schemas of each kind, picked evenly, and validates what it answers.

The exit status is 1 if redraft accepts an instance that jsonschema finds invalid, if it raises anything but PatternError, or
if a model's answer is not valid.
"""

import argparse
import gzip
import json
import lzma
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from compiled_schemas import KINDS, CompiledSchema, compile_schema
from schema_instances import Judge, Obedience, check_instances, check_made, make_valid

import redraft
from redraft import checkpoint
from redraft.constraints.errors import PatternError
from redraft.constraints.token_automaton import AutomatonCompiler

REFUSED = "refused"
FAULT = "internal fault"
MADE_VALID = 10  # values that are made valid: the others are mutations
SHOWN = 160  # characters of an instance
REASONS = 20
GROUPS: dict[str, Callable[[str], bool]] = {
    "JSONSchemaBench": lambda source: source.startswith("bench:"),
    "JSONSchemaBench without Handwritten, Synthesized": lambda source: (
        source.startswith("bench:") and source not in ("bench:Handwritten", "bench:Synthesized")
    ),
    "tool calls": lambda source: source in ("bench:BFCL", "bench:Glaiveai2K", "bench:JME"),
    "pydantic": lambda source: source.startswith("pydantic"),
    "libraries": lambda source: source.split(".")[0] in ("mcp", "anthropic", "openai"),
    "JSON-Schema-Test-Suite": lambda source: source.startswith("suite-"),
    "all": lambda source: True,
}
COLUMNS = (
    "n", "canvas", "left to right", "refused", "valid accepted", "no order", "invalid accepted", "CPU ms median", "95%",
)  # fmt: skip


class OutOfTimeError(BaseException):  # nothing on the way catches it
    """A schema has used the processor time that it may use."""


@dataclass
class Line:
    """What was found out about one schema."""

    source: str
    name: str
    kind: str = REFUSED
    reason: str = ""
    compile_ms: float = 0.0
    listed: Obedience = field(default_factory=Obedience)
    mislabelled: int = 0  # invalid instances of the file that redraft accepts, and jsonschema does not find invalid
    made: Obedience = field(default_factory=Obedience)


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """The lines of a file of schemas."""
    opener: Any = {".xz": lzma.open, ".gz": gzip.open}.get(Path(path).suffix, open)
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


# 1. Compile and check, in processes


automata: AutomatonCompiler | None = None  # of a worker


def set_up_worker(vocabulary: Sequence[bytes | None], stops: Sequence[int]) -> None:
    """Gives a worker its vocabulary, if there is one."""
    global automata
    automata = AutomatonCompiler(vocabulary, stops) if vocabulary else None
    signal.signal(signal.SIGPROF, _raise_out_of_time)


def _raise_out_of_time(*_: Any) -> None:
    raise OutOfTimeError


def check_line(record: dict[str, Any], made: int, seconds: float) -> Line:
    """Compiles a schema and checks its instances, within some processor time."""
    line = Line(record["source"], record["name"])
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    began = time.process_time()
    try:
        compiled = compile_schema(record["schema"], automata)
    except PatternError as error:
        line.reason = str(error)
    except OutOfTimeError:
        line.reason = f"compiling takes more than {seconds:g} s"
    except Exception as error:  # an internal fault: shown among the reasons, and the run goes on
        line.reason = f"{FAULT}: {type(error).__name__}: {error}"
    else:
        line.kind = compiled.kind
    line.compile_ms = 1e3 * (time.process_time() - began)
    if line.kind == REFUSED:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return line
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        check_obedience(line, compiled, record, made)
    except OutOfTimeError:
        line.made.undecided += 1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return line


def check_obedience(line: Line, compiled: CompiledSchema, record: dict[str, Any], made: int) -> None:
    """Fills in what redraft makes of the instances of the file, and of those that are made."""
    schema = record["schema"]
    judge = Judge(schema)
    instances = [(value, is_valid) for value, is_valid in record["instances"]]
    line.listed = check_instances(compiled, schema, instances, judge)
    if line.listed.disobeyed:
        invalid = [(value, False) for value, is_valid in instances if not is_valid and judge.is_valid(value) is not False]
        line.mislabelled = len(check_instances(compiled, schema, invalid, judge).disobeyed)
    if made:
        seed = random.Random(record["name"]).getrandbits(32)
        bases = [*make_valid(schema, MADE_VALID), *(value for value, is_valid in instances if is_valid)]
        line.made = check_made(compiled, schema, bases, max(made, 2 * len(bases)), judge, seed)


# 2. Tables


def count_row(lines: Sequence[Line], obedience: str) -> dict[str, Any]:
    """The figures of one source."""
    found = [getattr(line, obedience) for line in lines if line.kind != REFUSED]
    kinds = Counter(line.kind for line in lines)
    times = sorted(line.compile_ms for line in lines if line.kind != REFUSED)
    return {
        "n": len(lines),
        **{kind: kinds[kind] for kind in (*KINDS, REFUSED)},
        "valid": [sum(each.valid_accepted for each in found), sum(each.valid_tried for each in found)],
        "no order": [sum(each.uncertain_accepted for each in found), sum(each.uncertain_tried for each in found)],
        "invalid": [sum(len(each.disobeyed) for each in found), sum(each.invalid_tried for each in found)],
        "mislabelled": sum(line.mislabelled for line in lines) if obedience == "listed" else 0,
        "undecided": sum(each.undecided for each in found),
        "median_ms": round(statistics.median(times), 1) if times else 0.0,
        "p95_ms": round(times[int(0.95 * len(times))], 1) if times else 0.0,
    }


def print_table(title: str, rows: dict[str, dict[str, Any]]) -> None:
    """A markdown table."""
    print(f"\n### {title}\n")
    print(f"| source | {' | '.join(COLUMNS)} |")
    print(f"|---|{'---:|' * len(COLUMNS)}")
    for name, row in rows.items():
        counts = [row["n"], *(row[kind] for kind in (*KINDS, REFUSED))]
        counts += [f"{accepted} of {tried}" for accepted, tried in (row["valid"], row["no order"], row["invalid"])]
        print(f"| {name} | {' | '.join(map(str, [*counts, row['median_ms'], row['p95_ms']]))} |")


def summarize_reason(sentence: str) -> str:
    """A refusal without its path, numbers and values: the keyword, and what is said of it."""
    reason = re.sub(
        r"^(?:the schema|(?:\.\.\.)?#?/.*?)(?= has | is an? | must | refers | allows | requires | makes | would |: )",
        "",
        sentence,
    )
    reason = re.sub(r"^(?:\.\.\.)?#?/(?:.*/)?([^/ ]+) ", r"\1 ", reason).strip(" :")
    if not reason.startswith("has ") and "is not supported" not in reason[:40]:
        reason = re.sub(r"(^format is '[^']*')|'[^']*'", lambda match: match[1] or "'...'", reason)
    return re.sub(r"\d[\d,.]*", "N", reason)


def keyword_of(reason: str) -> str:
    """The keyword that a refusal names first, or the whole sentence."""
    match = re.search(r"^has '([^']+)'", reason) or re.search(
        r"^(\w*[pP]attern|format|additionalProperties|m[ia][nx]\w+) ", reason
    )
    return match[1] if match else reason


def print_counts(title: str, counts: Counter[str], most: int | None = None) -> None:
    """A list with the most frequent first."""
    print(f"\n### {title}\n\n| | n |\n|---|---:|")
    for name, count in counts.most_common(most):
        print(f"| {name.replace('|', '/')} | {count} |")


def print_failures(lines: Sequence[Line]) -> int:
    """Prints internal faults and the schemas that redraft does not obey. Returns the number of failures."""
    failures = 0
    for line in lines:
        if line.reason.startswith(FAULT):
            print(f"FAULT {line.source} {line.name}: {line.reason}")
        counted = len(line.listed.disobeyed) - line.mislabelled
        for origin, texts in (("listed", line.listed.disobeyed), ("made", line.made.disobeyed)):
            if texts:
                label = " (jsonschema does not find all of them invalid)" if origin == "listed" and line.mislabelled else ""
                shown = texts[0] if len(texts[0]) <= SHOWN else f"{texts[0][: SHOWN - 3]}..."
                print(f"INVALID BUT ACCEPTED {line.source} {line.name}, {len(texts)} {origin}{label}: {shown}")
        failures += counted + len(line.made.disobeyed) + line.reason.startswith(FAULT)
    return failures


def group_rows(lines: Sequence[Line], obedience: str) -> dict[str, dict[str, Any]]:
    """The figures of every source, and of the groups."""
    sources = sorted({line.source for line in lines})
    rows = {source: count_row([line for line in lines if line.source == source], obedience) for source in sources}
    for name, belongs in GROUPS.items():
        members = [line for line in lines if belongs(line.source)]
        if members:
            rows[f"**{name}**"] = count_row(members, obedience)
    return rows


def check_schemas(options: argparse.Namespace) -> int:
    """Checks all schemas and prints the tables. Returns the exit status."""
    records = list(read_lines(options.file))
    vocabulary: Sequence[bytes | None] = ()
    stops: Sequence[int] = ()
    if options.vocabulary:
        opened = checkpoint.open_checkpoint(checkpoint.find(options.vocabulary))  # without its weights
        vocabulary, stops = opened.tokenizer.token_bytes, opened.sampler.eos_token_ids
    check = partial(check_line, made=options.made, seconds=options.seconds)
    with ProcessPoolExecutor(options.workers, initializer=set_up_worker, initargs=(vocabulary, stops)) as pool:
        lines = list(pool.map(check, records))
    result: dict[str, Any] = {"listed": group_rows(lines, "listed")}
    print_table("Instances of the file", result["listed"])
    if options.made:
        result["made"] = group_rows([line for line in lines if line.kind != REFUSED], "made")
        print_table(f"Made instances, {options.made} or more for each schema that compiles", result["made"])
    reasons = Counter(summarize_reason(line.reason) for line in lines if line.kind == REFUSED)
    keywords = Counter(keyword_of(summarize_reason(line.reason)) for line in lines if line.kind == REFUSED)
    print_counts("Refused, by the keyword that is named first", keywords)
    print_counts(f"The {REASONS} most frequent reasons", reasons, REASONS)
    print()
    failures = print_failures(lines)
    result |= {"keywords": dict(keywords.most_common()), "reasons": dict(reasons.most_common()), "failures": failures}
    if options.lines:
        with open(options.lines, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(line), ensure_ascii=False) + "\n" for line in lines)
    print(json.dumps(result))
    return int(failures > 0)


# 3. Answers of a model


def pick_evenly(records: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Up to `count` of the records, at equal distances."""
    return [records[number * len(records) // count] for number in range(count)] if len(records) > count else list(records)


def answer_schema(writer: redraft.Writer, record: dict[str, Any], max_tokens: int, seed: int) -> dict[str, Any]:
    """Lets the model answer one schema, with more tokens where the shortest match needs them."""
    schema = record["schema"]
    for tokens in (max_tokens, 4 * max_tokens, 16 * max_tokens):
        try:
            answer = writer.write("An example in JSON: ", schema=schema, max_tokens=tokens, seed=seed)
        except ValueError as error:
            if "the answer may have" not in str(error):
                return {"verdict": "refused", "reason": str(error)}
            continue
        return {"verdict": judge_answer(schema, answer.text), "reason": answer.reason, "text": answer.text}
    return {"verdict": "refused", "reason": f"a match takes more than {16 * max_tokens} tokens"}


def judge_answer(schema: Any, text: str) -> str:
    """Whether an answer is JSON that jsonschema finds valid."""
    try:
        value = json.loads(text)
    except ValueError:
        return "no JSON"
    return {True: "valid", False: "invalid", None: "undecided"}[Judge(schema).is_valid(value)]


def answer_schemas(options: argparse.Namespace) -> int:
    """Lets a model answer schemas of each kind and prints how many answers are valid. Returns the exit status."""
    writer = redraft.load(options.answers, device=options.device)
    by_kind: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for record in read_lines(options.file):
        try:
            by_kind[compile_schema(record["schema"], writer.automaton_compiler).kind].append(record)
        except PatternError:
            continue
    result: dict[str, Any] = {}
    failures = 0
    for kind, records in by_kind.items():
        verdicts: Counter[str] = Counter()
        for number, record in enumerate(pick_evenly(records, options.count)):
            found = answer_schema(writer, record, options.max_tokens, number)
            is_failure = found["verdict"] in ("no JSON", "invalid")
            failures += is_failure
            verdicts[found["verdict"] + (", cut off" if found["reason"] == "length" else "")] += 1
            if is_failure or found["verdict"] == "refused":
                shown = found.get("text", "")[:SHOWN]
                print(f"{found['verdict'].upper()} {record['source']} {record['name']} ({found['reason']}): {shown}")
        result[kind] = {"compile": len(records), **verdicts}
        print(f"{kind}: {len(records)} compile; {', '.join(f'{count} {verdict}' for verdict, count in verdicts.items())}")
    print(json.dumps({**result, "failures": failures}))
    return int(failures > 0)


def main(arguments: Iterable[str] | None = None) -> None:
    """Checks schemas, or lets a model answer them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--vocabulary", help="a checkpoint, whose vocabulary the schemas are compiled over")
    parser.add_argument("--made", type=int, default=0, help="instances made for each schema")
    parser.add_argument("--seconds", type=float, default=60.0, help="processor time for each schema")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lines", help="a file for what was found out about each schema, as lines of JSON")
    parser.add_argument("--answers", help="a model that answers the schemas")
    parser.add_argument("--device", help="of that model")
    parser.add_argument("--count", type=int, default=100, help="schemas of each kind that the model answers")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(None if arguments is None else list(arguments))
    status = answer_schemas(options) if options.answers else check_schemas(options)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
