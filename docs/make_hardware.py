"""Writes the tables of docs/hardware.md: `python docs/make_hardware.py` (or `make docs`). A test compares the two.

What fits is computed by the memory plan that `--gpu-memory` uses. Speeds are computed: a step's lower bound from the card's
published bandwidth and arithmetic, times the share of such a bound that was measured on an H200.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from redraft.config import ModelConfig
from redraft.engine.memory_plan import (
    Demand,
    MemoryLimitError,
    MemoryPlan,
    WeightBytes,
    choose_policy,
    find_longest_context,
)
from redraft.model.quant.policy import ATTENTION, DENSE_MLP, EMBEDDING, EXPERT_DOWN, EXPERTS, QuantPolicy
from redraft.model.quant.stored import StoredFormat

PAGE = Path(__file__).with_name("hardware.md")
CONFIG = ModelConfig()
STEPS = 16
ATTENTION_FLOPS = 0.218e12  # of a step over 1,024 tokens, at 60% of the peak
SHARE = 0.63  # of the bound: 6.7 of 10.7 ms, fp8 on an H200 (benchmarks/results/engine_h200_202611.md)
PARTS = (EXPERT_DOWN, ATTENTION, DENSE_MLP, EMBEDDING)
# Files: the formats of the parts that are not stored in bf16.
NVIDIA = dict.fromkeys(EXPERTS, StoredFormat("NVFP4 (ModelOpt)", "nvfp4"))
FP8 = dict.fromkeys((*EXPERTS, ATTENTION, DENSE_MLP), StoredFormat("float-quantized", "fp8"))
OURS = FP8 | NVIDIA  # as `redraft quantize --to nvfp4` writes it
Q8_0 = dict.fromkeys((*EXPERTS, *PARTS), StoredFormat("Q8_0", None))  # GGUF


@dataclass(frozen=True)
class Card:
    """A card, by its published figures: bytes/s, FLOP/s with float32 sums, and bytes/s of the bus, 80% of the nominal."""

    name: str
    gigabytes: int
    bandwidth: float
    bf16: float
    fp8: float
    bus: float
    file: Mapping[str, StoredFormat] = field(default_factory=lambda: OURS)


CARDS = (
    Card("RTX 4060", 8, 272e9, 30e12, 60e12, 13e9),
    Card("RTX 4070", 12, 504e9, 58e12, 117e12, 25e9),
    Card("RTX 4080", 16, 717e9, 97e12, 195e12, 25e9),
    Card("RTX 4090 with a limit", 18, 1008e9, 165e12, 330e12, 25e9),
    Card("RTX 4090, NVIDIA's file", 24, 1008e9, 165e12, 330e12, 25e9, NVIDIA),
    Card("RTX 4090", 24, 1008e9, 165e12, 330e12, 25e9),
    Card("RTX 4090, a GGUF file in Q8_0", 24, 1008e9, 165e12, 330e12, 25e9, Q8_0),
    Card("RTX 5090", 32, 1792e9, 209e12, 419e12, 50e9),
    Card("H100", 80, 3350e9, 790e12, 1500e12, 50e9, FP8),
    Card("DGX Spark (128 GB, shared with the host)", 100, 273e9, 62e12, 125e12, 50e9),
)


def plan(card: Card, **wishes: bool) -> tuple[dict[str, str], MemoryPlan]:
    """The format of each part of the card's file in memory, and the plan, as `--gpu-memory` makes them."""
    policies = QuantPolicy(runs_packed=True, **wishes).alternatives
    weights = WeightBytes.by_policy(CONFIG, card.file, policies)
    policy, memory_plan = choose_policy(CONFIG, weights, card.gigabytes * 10**9, Demand())
    stored = {part: card.file[part].format if part in card.file else None for part in PARTS}
    return {part: policy.target(part, stored[part]).format or "bf16" for part in PARTS}, memory_plan


def bound_ms(card: Card, formats: Mapping[str, str], weights: WeightBytes) -> float:
    """A lower bound of a step of one canvas: for each part the larger of its memory time and its arithmetic."""
    counts = CONFIG.parameter_counts()
    used = counts["experts"] * CONFIG.top_k_experts / CONFIG.num_experts

    def part(size: int, parameters: float, format: str) -> float:
        speed = card.fp8 if format == "fp8" else card.bf16
        return max(size / card.bandwidth, 2 * CONFIG.canvas_length * parameters / speed)

    seconds = part(sum(weights.experts), used, formats[EXPERT_DOWN])
    seconds += part(weights.attention, counts["attention"], formats[ATTENTION])
    seconds += part(weights.dense, counts["dense MLP"], formats[DENSE_MLP])
    seconds += 2 * part(weights.embedding, counts["embedding"], formats[EMBEDDING])  # the head and the soft embedding
    return 1e3 * (seconds + ATTENTION_FLOPS / (0.6 * card.bf16))


def row(card: Card) -> str:
    """One line of the table."""
    formats, chosen = plan(card)
    one = replace(chosen, canvases=1)
    longest = find_longest_context(one, CONFIG.max_position_embeddings)
    with_fp8 = replace(one, demand=replace(one.demand, kv="fp8"))
    longest_fp8 = find_longest_context(with_fp8, CONFIG.max_position_embeddings)
    copies = 1e3 * chosen.step_bytes / card.bus
    step = max(bound_ms(card, formats, chosen.weights) / SHARE, copies)
    host = f"{chosen.offloaded} layers, {chosen.host_bytes / 1e9:.1f} GB" if chosen.offloaded else "none"
    cells = (
        f"{card.gigabytes} GB",
        card.name,
        " / ".join(formats[part] for part in PARTS if part != DENSE_MLP),
        host,
        str(chosen.canvases),
        f"{longest:,}",
        f"{longest_fp8:,}",
        f"{copies:.0f}" if chosen.offloaded else "",
        f"{step:.0f}",
        f"{1e3 * CONFIG.canvas_length / (STEPS * step):,.0f}",
    )
    return f"| {' | '.join(cells)} |"


def cards_table() -> str:
    """What fits on each card, and how fast it should be."""
    columns = {
        "memory": "---:",
        "card": "---",
        "experts / attention and dense / embedding": "---",
        "experts in host memory": "---",
        "canvases at once": "---:",
        "longest context": "---:",
        "with `--kv fp8`": "---:",
        "copies, ms a step": "---:",
        "ms a step": "---:",
        "tokens/s": "---:",
    }
    head = f"| {' | '.join(columns)} |\n|{'|'.join(columns.values())}|\n"
    return head + "\n".join(row(card) for card in CARDS)


def at_home(gigabytes: int) -> Card:
    """A card of which only the memory matters, with NVIDIA's file."""
    return Card("", gigabytes, 0.0, 0.0, 0.0, 0.0, NVIDIA)


def plan_table(gigabytes: int) -> str:
    """The plan that `--gpu-memory` prints for NVIDIA's file, as a table."""
    _, chosen = plan(at_home(gigabytes))
    return "| GPU memory | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in chosen.rows())


def misfit() -> str:
    """What is printed where nothing fits."""
    try:
        plan(at_home(6), keep_bf16=True)
    except MemoryLimitError as error:
        return f"```text\n{error}\n```"
    raise AssertionError("6 GB must not be enough")


def document() -> str:
    """The page with its tables as the plan computes them now."""
    tables = {"cards": cards_table(), "plan": plan_table(18), "misfit": misfit()}
    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, rest = text.split(f"<!-- {name} -->\n")
        after = rest.split("<!-- end -->", 1)[1]
        text = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
