"""A model with its drafter against the same model alone, on chat prompts, one request at a time. The last line is JSON.

    python benchmarks/bench_adapt.py MODEL [--prompts 32] [--tokens 256] [--temperatures 0 0.7 1] [--device cuda]
        [--dtype bfloat16] [--peer 8] [--out FILE.md|FILE.json]

MODEL is the folder of a drafter, or a model for which the package has one. All run in one process, through `redraft.load`:

autoregressive   the model without its drafter, in the same engine
exact            the model with its drafter: the same text in fewer forwards
transformers     with `--peer N`: `generate` with the same weights in the same precision, for the first N prompts

The three take turns, prompt by prompt. Before the first timed prompt each answers WARM_UP others at every temperature, which
builds kernels and captures graphs. Seconds are those of whole answers: chat template, prefill, tokens. At the end the greedy
answers of all three are compared token by token, in float32. `everyday_prompts.txt` has 64 prompts; the first ones are
timed, the last ones warm up.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import redraft
from redraft import checkpoint
from redraft.writer import Writer

HERE = Path(__file__).parent
PROMPTS = (HERE / "everyday_prompts.txt").read_text(encoding="utf-8").splitlines()
WARM_UP = 2  # prompts
TEMPERATURES = (0.0, 0.7, 1.0)
ALONE, EXACT, PEER = "autoregressive", "exact", "transformers"


@dataclass
class Cost:
    """What answers have cost so far."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    forwards: int = 0

    def add(self, other: "Cost") -> None:
        """Adds the cost of another answer."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


# Answers a prompt at a temperature with a seed: the tokens of the answer, and its cost without the seconds.
Answering = Callable[[str, float, int], tuple[list[int], Cost]]


def answer_with(writer: Writer, tokens: int) -> Answering:
    """Answers of redraft. A model without a chat template continues the prompt."""
    ask = writer.chat if writer.tokenizer.can_chat else writer.write

    def answer(prompt: str, temperature: float, seed: int) -> tuple[list[int], Cost]:
        result = ask(prompt, temperature=temperature, seed=seed, max_tokens=tokens)
        stats = result.stats
        return list(result.ids), Cost(stats.new_tokens, 0.0, stats.rounds, stats.forwards)

    return answer


def answer_with_transformers(writer: Writer, path: Path, tokens: int) -> Answering:
    """Answers of transformers with the weights, the precision, the prompts and the stop tokens of a Writer."""
    from transformers import AutoModelForCausalLM

    is_file = checkpoint.is_gguf(path)
    source = {"pretrained_model_name_or_path": str(path.parent if is_file else path)}
    source |= {"gguf_file": path.name} if is_file else {}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=writer.model.dtype).to(writer.model.device).eval()
    stops = list(writer.sampler.eos_token_ids)
    sampling = {"top_k": writer.sampler.top_k, "top_p": writer.sampler.top_p, "min_p": writer.sampler.min_p or None}
    options = {"max_new_tokens": tokens, "eos_token_id": stops, "pad_token_id": stops[0]}
    options |= {"repetition_penalty": writer.sampler.repetition_penalty}

    @torch.inference_mode()
    def answer(prompt: str, temperature: float, seed: int) -> tuple[list[int], Cost]:
        messages = [{"role": "user", "content": prompt}]
        ids = torch.tensor([writer.encode_prompt(messages if writer.tokenizer.can_chat else prompt)], device=model.device)
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": temperature, **sampling} if temperature else {"do_sample": False}
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **how)[0, ids.shape[1] :].tolist()
        return found[:-1] if found[-1] in stops else found, Cost(len(found), 0.0, len(found), len(found))

    return answer


def load_all(options: argparse.Namespace, dtype: str | None) -> tuple[dict[str, Answering], Writer]:
    """The ways to answer by their names, and the Writer with the drafter."""
    loading = {"device": options.device, "dtype": dtype}
    drafting = redraft.load(options.model, **loading)
    if drafting.model.drafter is None:
        raise SystemExit(f"{options.model} has no drafter: give the folder of one, which redraft adapt writes")
    alone = redraft.load(options.model, **loading, drafter=False)
    ways = {ALONE: answer_with(alone, options.tokens), EXACT: answer_with(drafting, options.tokens)}
    if options.peer:
        ways[PEER] = answer_with_transformers(alone, checkpoint.find_base(options.model)[0], options.tokens)
    return ways, drafting


def time_answers(
    ways: dict[str, Answering], prompts: Sequence[str], temperature: float, peer_prompts: int
) -> tuple[dict[str, Cost], dict[str, list[list[int]]]]:
    """The cost of all answers, and the answers themselves, by the name of the way."""
    costs = {name: Cost() for name in ways}
    answers: dict[str, list[list[int]]] = {name: [] for name in ways}
    for seed, prompt in enumerate(prompts):
        for name, answer in ways.items():
            if name == PEER and seed >= peer_prompts:
                continue
            began = time.perf_counter()
            ids, cost = answer(prompt, temperature, seed)  # tokens on the host: the GPU is done
            cost.seconds = time.perf_counter() - began
            costs[name].add(cost)
            answers[name].append(ids)
    return costs, answers


def count_equal(answers: dict[str, list[list[int]]]) -> dict[str, int]:
    """How many answers are those of the model alone, token for token."""
    others = {name: found for name, found in answers.items() if name != ALONE}
    return {name: sum(map(list.__eq__, found, answers[ALONE])) for name, found in others.items()}


def compare_greedy(options: argparse.Namespace, prompts: Sequence[str]) -> dict[str, int]:
    """Compares greedy answers in float32."""
    ways, _ = load_all(options, "float32")
    return count_equal(time_answers(ways, prompts, 0.0, options.peer)[1])


def describe(costs: dict[str, Cost]) -> list[dict[str, Any]]:
    """The figures of one temperature, a row for each way."""
    rows = []
    for name, cost in costs.items():
        row: dict[str, Any] = {"way": name, **asdict(cost), "tokens_per_second": cost.speed}
        row |= {"tokens_per_round": cost.tokens / cost.rounds, "tokens_per_forward": cost.tokens / cost.forwards}
        row |= {f"times_{other}": cost.speed / costs[other].speed for other in (ALONE, PEER) if other in costs}
        rows.append(row)
    return rows


def headings(result: dict[str, Any]) -> list[str]:
    """The columns of the table."""
    names = ["T", "", "tokens/s", "seconds", "tokens", "tokens a round", "tokens a forward", f"times {ALONE}"]
    return [*names, f"times {PEER}"] if result["peer"] else names


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table as text."""
    speed, seconds, tokens = f"{row['tokens_per_second']:,.1f}", f"{row['seconds']:.2f}", f"{row['tokens']:,}"
    ratios = [f"{row[name]:.2f}" for name in ("tokens_per_round", "tokens_per_forward")]
    ratios += [f"{row[name]:.2f}" for name in (f"times_{ALONE}", f"times_{PEER}") if name in row]
    return [f"{row['temperature']:g}", row["way"], speed, seconds, tokens, *ratios]


def to_markdown(result: dict[str, Any]) -> str:
    """The report: command, machine, table, equal answers."""
    names = headings(result)
    lines = ["# A model with its drafter, one request at a time", "", f"    {result['command']}", ""]
    lines += [f"{result['device']}, {result['dtype']}; {result['versions']}; commit {result['commit']}.", ""]
    peer = f" transformers: the first {result['peer']} of them." if result["peer"] else ""
    lines += [f"{result['prompts']} chat prompts, at most {result['tokens']} new tokens each.{peer}", ""]
    lines += [f"| {' | '.join(names)} |", f"|---:|---|{'---:|' * (len(names) - 2)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in result["rows"]]
    return "\n".join([*lines, "", *say_equal(result), ""])


def say_equal(result: dict[str, Any]) -> list[str]:
    """One sentence for each way about its greedy answers."""
    end = "greedy answers in float32 equal those of the model alone, token for token."
    compared = {name: result["peer" if name == PEER else "prompts"] for name in result["equal"]}
    return [f"{name}: {count} of {compared[name]} {end}" for name, count in result["equal"].items()]


def describe_run(writer: Writer) -> dict[str, str]:
    """Command, commit, versions and machine."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if "transformers" in sys.modules:
        versions.append(f"transformers {sys.modules['transformers'].__version__}")
    is_gpu = writer.model.device.type == "cuda"
    device = torch.cuda.get_device_name(writer.model.device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
    return {
        "command": " ".join(["python", "benchmarks/bench_adapt.py", *sys.argv[1:]]),
        "commit": git.stdout.strip() or "unknown",
        "versions": ", ".join(versions),
        "device": device,
        "dtype": str(writer.model.dtype).removeprefix("torch."),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Warms up, times everything and prints the table, then compares the greedy answers."""
    prompts = PROMPTS[: options.prompts]
    ways, writer = load_all(options, options.dtype)
    run = describe_run(writer)
    for temperature in options.temperatures:
        time_answers(ways, PROMPTS[-WARM_UP:], temperature, WARM_UP)
    rows, equal = [], None
    for temperature in options.temperatures:
        costs, answers = time_answers(ways, prompts, temperature, options.peer)
        rows += [{"temperature": temperature, **row} for row in describe(costs)]
        if temperature == 0 and writer.model.dtype == torch.float32:
            equal = count_equal(answers)
    counts = {"prompts": len(prompts), "tokens": options.tokens}
    result = {"what": "drafter", **run, "peer": options.peer, **counts, "rows": rows, "equal": equal}
    show(result)
    if equal is None:
        del ways, writer
        gc.collect()
        result["equal"] = compare_greedy(options, prompts)
    return result


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(*headings(result))
    for row in result["rows"]:
        table.add_row(*cells(row))
    Console(width=140, highlight=False).print(table)


def main() -> None:
    """Prints the table, then the figures as JSON; writes one of the two to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="the folder of a drafter, or a model with one in the package")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperatures", nargs="+", type=float, default=list(TEMPERATURES))
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--peer", type=int, default=0, metavar="N", help="time transformers too, with the first N prompts")
    parser.add_argument("--out", type=Path, help="a file for the report (.md) or the figures (.json)")
    options = parser.parse_args()
    most = len(PROMPTS) - WARM_UP
    if not 1 <= options.prompts <= most:
        parser.error(f"--prompts must be from 1 to {most}, got {options.prompts}")
    if not 0 <= options.peer <= options.prompts:
        parser.error(f"--peer must be from 0 to the {options.prompts} prompts, got {options.peer}")
    if options.out is not None and options.out.suffix not in (".md", ".json"):
        parser.error(f"--out is a .md or a .json file, got {options.out}")
    result = measure(options)
    print("\n".join(say_equal(result)))
    if options.out is not None:
        is_json = options.out.suffix == ".json"
        options.out.write_text(json.dumps(result, indent=1) if is_json else to_markdown(result), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
