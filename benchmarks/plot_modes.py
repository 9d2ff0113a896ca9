"""Measures stories of every mode (off, checked, exact, autoregressive) and draws perplexity against tokens per forward.

Stories begin with "Once upon a time" and have the seeds 0, 1, 2, ...; a Llama checkpoint judges them. The ratio compares the
perplexity with that of autoregressive samples at equal entropy, as `redraft eval --task samples` does. Doubled and unknown
words are per 1,000 words. Prints a Markdown table; the last line is JSON. The picture needs matplotlib: on a machine without
it, measure with --out, and draw from that file elsewhere.

    python benchmarks/plot_modes.py --judge data/teacher [--model FOLDER] [--count 150] [--words FILE] [--out modes.json]
    python benchmarks/plot_modes.py --draw modes.json [--picture docs/verified.svg]
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from redraft import writer
from redraft.config import SamplerConfig, write_text
from redraft.train.evals import samples, words
from redraft.train.evals.judge import LlamaJudge
from redraft.train.evals.tasks import STORY_PROMPT, score_samples
from redraft.train.recipe import change_settings

ROOT = Path(__file__).parent.parent
FAMILIES = {"off": "diffusion, not checked", "checked": "checked", "exact": "exact", "autoregressive": "autoregressive"}
COLUMNS = {
    "perplexity": "perplexity",
    "entropy": "entropy, nats",
    "ratio": "ratio at equal entropy",
    "doubled_words": "doubled words",
    "doubled_adjacent": "doubled, adjacent",
    "unknown_words": "unknown words",
    "tokens_per_forward": "tokens per forward",
}


def list_modes(cfg: SamplerConfig) -> dict[str, tuple[str, SamplerConfig]]:
    """The modes that are measured: family and settings, by name."""
    modes = {f"off, {steps} steps": ("off", cfg.changed(check="off", max_steps=steps)) for steps in (8, 16, 32)}
    for tolerance in (1.0, 2.0, 3.0, 4.0):
        modes[f"checked, {tolerance:g} nats"] = ("checked", cfg.changed(check="checked", tolerance=tolerance))
    modes["exact, T 0.7"] = ("exact", cfg.changed(check="exact", temperature=0.7))
    for temperature in (0.5, 0.7):
        modes[f"autoregressive, T {temperature:g}"] = ("autoregressive", samples.autoregressive(cfg, temperature))
    return modes


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Samples and scores every mode, and the curve of autoregressive samples."""
    subject = writer.load(options.model, device=options.device, dtype=options.dtype)
    cfg = change_settings(subject.sampler, options.set)
    judge = LlamaJudge(options.judge, subject.model.device)
    known = words.find_words(options.words, Path(options.data) / "stories")
    engine = samples.make_engine(subject.model, options.batch)

    def sample(settings: SamplerConfig) -> samples.Samples:
        return samples.sample(engine, subject.tokenizer, STORY_PROMPT, options.count, settings)

    def sample_at(temperature: float) -> samples.Samples:
        report(f"autoregressive samples at temperature {temperature:g}")
        return sample(samples.autoregressive(cfg, temperature))

    curve = samples.measure_curve(STORY_PROMPT, judge, sample_at)
    scores = {}
    for name, (family, settings) in list_modes(cfg).items():
        report(name)
        scores[name] = {"family": family, **score_samples(sample(settings), settings, judge, curve, known)}
        del scores[name]["left_to_right"]  # the same for all
    setup = {
        "model": str(options.model),
        "count": options.count,
        "changes": options.set,
        "device": str(subject.model.device),
    }
    return {**setup, "modes": scores, "left_to_right": curve}


def report(line: str) -> None:
    """Says on stderr what is measured now."""
    print(line, file=sys.stderr, flush=True)


def to_markdown(results: dict[str, Any]) -> str:
    """The scores as a table, one row for each mode."""
    lines = ["| mode | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for name, scores in results["modes"].items():
        cells = ["-" if scores[column] is None else f"{scores[column]:.2f}" for column in COLUMNS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], picture: Path) -> None:
    """Draws perplexity against tokens per forward, one line for each family of modes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import ScalarFormatter
    except ImportError:
        report("no picture: matplotlib is missing (pip install 'redraft[train]'); draw it elsewhere with --draw")
        return
    with matplotlib.rc_context({"svg.hashsalt": "redraft", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for family, label in FAMILIES.items():
            points = [(name, scores) for name, scores in results["modes"].items() if scores["family"] == family]
            across = [scores["tokens_per_forward"] for _, scores in points]
            up = [scores["perplexity"] for _, scores in points]
            axes.plot(across, up, "o-", label=label)
            for (name, _), x, y in zip(points, across, up, strict=True):
                axes.annotate(name.partition(", ")[2], (x, y), textcoords="offset points", xytext=(6, 4), fontsize=8)
        for scale, axis in ((axes.set_xscale, axes.xaxis), (axes.set_yscale, axes.yaxis)):
            scale("log", base=2)
            axis.set_major_formatter(ScalarFormatter())
        axes.margins(x=0.12)
        axes.set_xlabel("tokens per forward")
        axes.set_ylabel("perplexity under the judge")
        axes.set_title(f"{results['count']} stories of each mode, the same weights")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
        figure.savefig(
            picture, format=picture.suffix.lstrip("."), metadata={"Date": None} if picture.suffix == ".svg" else {}
        )
    report(f"wrote {picture}")


def parse_options() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(writer.DEFAULT_MODEL), help="checkpoint folder [tiny, in the package]")
    parser.add_argument("--judge", default="data/teacher", help="a Llama checkpoint with tokens.jsonl")
    parser.add_argument("--data", default="data", help="folder with stories/, for the known words")
    parser.add_argument("--words", help="a file of known words, instead of --data")
    parser.add_argument("--count", type=int, default=150, help="stories of each mode")
    parser.add_argument("--batch", type=int, help="stories in a batch [16; 64 on a GPU]")
    parser.add_argument("--set", action="append", default=[], help="change a sampler setting: --set temperature=0.7")
    parser.add_argument("--device", help="cpu, cuda [a GPU if there is one]")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--out", help="write the scores here, as JSON")
    parser.add_argument("--draw", help="measure nothing: draw the scores of this file")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/verified.svg")
    return parser.parse_args()


def main() -> None:
    """Measures or reads the scores, prints them, and draws the picture."""
    options = parse_options()
    results = json.loads(Path(options.draw).read_text(encoding="utf-8")) if options.draw else measure(options)
    if options.out:
        write_text(options.out, json.dumps(results, indent=1) + "\n")
    print(to_markdown(results))
    draw(results, options.picture)
    print(json.dumps({name: {c: scores[c] for c in COLUMNS} for name, scores in results["modes"].items()}))


if __name__ == "__main__":
    main()
