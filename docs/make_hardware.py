"""Writes the tables of docs/hardware.md: `python docs/make_hardware.py` (or `make docs`). A test compares the two.

What fits is computed by the memory plan that `--gpu-memory` uses. Speeds are computed: a step's lower bound from the card's
published bandwidth and arithmetic, times the share of such a bound that was measured on an H200.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from redraft.config import ModelConfig
from redraft.engine.memory_plan import (
    Demand,
    Formats,
    MemoryLimitError,
    WeightBytes,
    find_longest_context,
    home_formats,
    plan_memory,
)

PAGE = Path(__file__).with_name("hardware.md")
CONFIG = ModelConfig()
STEPS = 16
ATTENTION_FLOPS = 0.218e12  # of a step over 1,024 tokens, at 60% of the peak
SHARE = 0.63  # of the bound: 6.7 of 10.7 ms, fp8 on an H200 (benchmarks/results/engine_h200_202611.md)
NVIDIA = Formats(experts="nvfp4")


@dataclass(frozen=True)
class Card:
    """A card, by its published figures: bytes/s, FLOP/s with float32 sums, and bytes/s of the bus, 80% of the nominal."""

    name: str
    gigabytes: int
    bandwidth: float
    bf16: float
    fp8: float
    bus: float
    formats: Formats | None = None  # None: those for this much memory


CARDS = (
    Card("RTX 4060", 8, 272e9, 30e12, 60e12, 13e9),
    Card("RTX 4070", 12, 504e9, 58e12, 117e12, 25e9),
    Card("RTX 4080", 16, 717e9, 97e12, 195e12, 25e9),
    Card("RTX 4090 with a limit", 18, 1008e9, 165e12, 330e12, 25e9),
    Card("RTX 4090", 24, 1008e9, 165e12, 330e12, 25e9, NVIDIA),
    Card("RTX 4090", 24, 1008e9, 165e12, 330e12, 25e9),
    Card("RTX 5090", 32, 1792e9, 209e12, 419e12, 50e9),
    Card("H100", 80, 3350e9, 790e12, 1500e12, 50e9, Formats(experts="fp8", attention="fp8", dense="fp8")),
    Card("DGX Spark (128 GB, shared with the host)", 100, 273e9, 62e12, 125e12, 50e9),
)


def describe(formats: Formats) -> str:
    """The formats of experts, attention and dense MLP, embedding."""
    return f"{formats.experts} / {formats.attention} / {formats.embedding}"


def bound_ms(card: Card, formats: Formats, weights: WeightBytes) -> float:
    """A lower bound of a step of one canvas: for each part the larger of its memory time and its arithmetic."""
    counts = CONFIG.parameter_counts()
    used = counts["experts"] * CONFIG.top_k_experts / CONFIG.num_experts

    def part(size: int, parameters: float, format: str) -> float:
        speed = card.fp8 if format == "fp8" else card.bf16
        return max(size / card.bandwidth, 2 * CONFIG.canvas_length * parameters / speed)

    seconds = part(sum(weights.experts), used, formats.experts)
    seconds += part(weights.attention, counts["attention"], formats.attention)
    seconds += part(weights.dense, counts["dense MLP"], formats.dense)
    seconds += 2 * part(weights.embedding, counts["embedding"], formats.embedding)  # the head and the soft embedding
    return 1e3 * (seconds + ATTENTION_FLOPS / (0.6 * card.bf16))


def row(card: Card) -> str:
    """One line of the table."""
    limit = card.gigabytes * 10**9
    formats = card.formats or home_formats(limit)
    weights = WeightBytes.from_formats(CONFIG, formats)
    plan = plan_memory(CONFIG, weights, limit)
    one = replace(plan, canvases=1)
    longest = find_longest_context(one, CONFIG.max_position_embeddings)
    with_fp8 = replace(one, demand=replace(one.demand, kv="fp8"))
    longest_fp8 = find_longest_context(with_fp8, CONFIG.max_position_embeddings)
    copies = 1e3 * plan.step_bytes / card.bus
    step = max(bound_ms(card, formats, weights) / SHARE, copies)
    host = f"{plan.offloaded} layers, {plan.host_bytes / 1e9:.1f} GB" if plan.offloaded else "none"
    cells = (
        f"{card.gigabytes} GB",
        card.name,
        describe(formats),
        host,
        str(plan.canvases),
        f"{longest:,}",
        f"{longest_fp8:,}",
        f"{copies:.0f}" if plan.offloaded else "",
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


def plan_table(gigabytes: int) -> str:
    """The plan that `--gpu-memory` prints for the released shape, as a table."""
    limit = gigabytes * 10**9
    plan = plan_memory(CONFIG, WeightBytes.from_formats(CONFIG, home_formats(limit)), limit)
    return "| GPU memory | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in plan.rows())


def misfit() -> str:
    """What is printed where nothing fits."""
    try:
        plan_memory(CONFIG, WeightBytes.from_formats(CONFIG, NVIDIA), 6 * 10**9, Demand())
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
