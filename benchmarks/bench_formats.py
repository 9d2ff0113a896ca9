"""What each weight format costs a model: bits per byte of the causal half and of the denoiser, and perplexity of samples.

Every format scores the same texts with the same noise, and samples with the same seeds. The cost is the difference to the
stored weights; its error bar is the standard error of the mean over batches of texts. "all layers": attention, dense MLP
and experts are rounded, then computed in float32. "as run": what `--quant` gives, with fp8 layers that round their
activations too. The perplexity of samples is that of a judge, with the standard error over batches. The last line is
JSON.

    python benchmarks/bench_formats.py --data DATA [--count 160] [--levels 8] [--judge DATA/teacher --samples 256]
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from redraft import writer
from redraft.kernels.packed import PackedTensor, dequantize_packed
from redraft.model.moe import Experts
from redraft.model.quant.quantizers import measure_error, quantize_int4, quantize_nvfp4, quantize_weight
from redraft.train.evals import likelihood, samples, tasks
from redraft.train.evals.judge import LlamaJudge

Quantizer = Callable[[Tensor], PackedTensor]
ALL_LAYERS: dict[str, Quantizer] = {
    "fp8": lambda weight: quantize_weight(weight, "fp8"),
    "NVFP4, max": lambda weight: quantize_nvfp4(weight, search=False),
    "NVFP4, searched": quantize_nvfp4,
    "int4, max": lambda weight: quantize_int4(weight, search=False),
    "int4, searched": quantize_int4,
    "int4 with minimum, max": lambda weight: quantize_int4(weight, with_minimum=True, search=False),
    "int4 with minimum, searched": lambda weight: quantize_int4(weight, with_minimum=True),
}
AS_RUN = ("fp8", "nvfp4", "int4")


@dataclass(frozen=True)
class Scores:
    """Bits per byte of each batch of texts; nats per token of each batch of samples, if there is a judge."""

    causal: list[float]
    denoiser: list[float]
    samples: list[float]
    error: float | None = None  # of the weights, relative


@torch.no_grad()
def round_layers(model: nn.Module, quantizer: Quantizer) -> float:
    """Rounds attention, dense MLP and experts of a model in place. Returns the relative error of the weights."""
    total = None
    for layer in model.layers:
        weights = [
            child.weight
            for part in (layer.self_attn, layer.mlp)
            for child in part.children()
            if isinstance(child, nn.Linear)
        ]
        assert isinstance(layer.experts, Experts)
        for weight in (*weights, layer.experts.gate_up_proj, layer.experts.down_proj):
            packed = quantizer(weight)
            error = measure_error(weight, packed)
            total = error if total is None else total + error
            weight.copy_(dequantize_packed(packed, weight.shape[-1], weight.dtype))
    assert total is not None
    return total.relative


def score(subject: writer.Writer, texts: list[str], options: argparse.Namespace, error: float | None = None) -> Scores:
    """Scores the texts batch by batch, with the same noise for every format."""
    causal = []
    denoiser = []
    for begin in range(0, len(texts), options.batch):
        batch = texts[begin : begin + options.batch]
        causal.append(likelihood.autoregressive(subject.model, subject.tokenizer, batch).bits_per_byte)
        bound = likelihood.nelbo(subject.model, subject.tokenizer, batch, options.canvas, options.levels)
        denoiser.append(bound.bits_per_byte)
    nats = []
    if options.judge:
        engine = samples.make_engine(subject.model)
        stories = samples.sample(engine, subject.tokenizer, tasks.STORY_PROMPT, options.samples, subject.sampler)
        judge = LlamaJudge(options.judge, subject.model.device)
        texts = [tasks.STORY_PROMPT + text for text in stories.texts]
        nats = [math.log(judge(texts[begin : begin + options.batch])) for begin in range(0, len(texts), options.batch)]
    return Scores(causal, denoiser, nats, error)


def difference(scores: list[float], stored: list[float]) -> tuple[float, float]:
    """The mean difference of two lists of scores of the same batches, and its standard error."""
    differences = [ours - theirs for ours, theirs in zip(scores, stored, strict=True)]
    spread = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return statistics.fmean(differences), spread


def measure(options: argparse.Namespace, console: Console) -> dict[str, Scores]:
    """Scores every format."""
    texts = tasks.read_paragraphs(Path(options.data) / "stories/tinystories_val_a.txt.xz", options.count)

    def load(**changes: Any) -> writer.Writer:
        return writer.load(options.model, device=options.device, dtype="float32", **changes)

    found = {"as stored": score(load(), texts, options)}
    for name, quantizer in ALL_LAYERS.items():
        subject = load()
        error = round_layers(subject.model, quantizer)
        found[f"all layers: {name}"] = score(subject, texts, options, error)
        console.print(f"{name}: done", style="bright_black")
    for name in AS_RUN:
        found[f"as run: --quant {name}"] = score(load(quant=name), texts, options)
    return found


def main() -> None:
    """Prints the table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default=None)
    parser.add_argument("--count", type=int, default=160)
    parser.add_argument("--levels", type=int, default=8)
    parser.add_argument("--canvas", type=int, default=64)
    parser.add_argument("--judge", default=None)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16, help="texts in a batch: error bars are over batches")
    options = parser.parse_args()
    console = Console(stderr=True, highlight=False, width=140)
    found = measure(options, console)
    stored = found["as stored"]
    table = Table("format", "weight error", "causal, bits per byte", "cost", "denoiser, bits per byte", "cost", "perplexity")
    rows = {}
    for name, scores in found.items():
        costs = [
            difference(ours, theirs) for ours, theirs in ((scores.causal, stored.causal), (scores.denoiser, stored.denoiser))
        ]
        shown = [f"{cost:+.5f} ± {spread:.5f}" for cost, spread in costs]
        means = [statistics.fmean(scores.causal), statistics.fmean(scores.denoiser)]
        error = "" if scores.error is None else f"{scores.error:.2%}"
        perplexity = None
        if scores.samples:
            mean, spread = difference(scores.samples, [0.0] * len(scores.samples))
            perplexity = (math.exp(mean), math.exp(mean) * spread)
        judged = "" if perplexity is None else f"{perplexity[0]:.2f} ± {perplexity[1]:.2f}"
        table.add_row(name, error, f"{means[0]:.4f}", shown[0], f"{means[1]:.4f}", shown[1], judged)
        rows[name] = {
            "causal": means[0],
            "causal_cost": costs[0],
            "denoiser": means[1],
            "denoiser_cost": costs[1],
            "weight_error": scores.error,
            "perplexity": perplexity,
        }
    console.print(table)
    settings = {name: getattr(options, name) for name in ("model", "count", "levels", "canvas", "samples", "batch")}
    print(json.dumps({**settings, "formats": rows}))


if __name__ == "__main__":
    main()
