"""What an embedding in 8 bits costs in agreement: first canvases of a model as it is and with `pack_embedding`.

Both models get the same prompts and the same random numbers. "rounded" has the numbers of the packed embedding in full
precision, so it shows the rounding of the weights alone; "packed" also rounds activations and probabilities. "another seed"
is the agreement of two unrelated answers. The last line is JSON.

    python benchmarks/bench_embedding.py [--model tiny] [--count 32]
"""

import argparse
import json

import torch
from rich.console import Console
from rich.table import Table

import redraft
from redraft.diffusion.generate import Committed, generate
from redraft.kernels.fp8 import dequantize, quantize
from redraft.model.quant import pack_embedding
from redraft.writer import Writer

PROMPTS = ("Once upon a time", "The dog said", "Tom and his mother went to", "One day, a little girl named Lily found")


def first_canvases(writer: Writer, seeds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [N, C] of a canvas after each prompt and seed, and its number of steps [N]."""
    cfg = writer.sampler.changed(check="off")
    cfg = cfg.changed(max_new_tokens=cfg.canvas_length)
    ids, steps = [], []
    for number, seed in enumerate(seeds):
        prompt = writer.tokenizer.encode(PROMPTS[number % len(PROMPTS)])
        events = list(generate(writer.model, [prompt], cfg, seeds=[seed]))
        ids.append(next(event for event in events if isinstance(event, Committed)).ids_BC)
        steps.append(events[-1].stats[0].steps)
    return torch.cat(ids), torch.tensor(steps, dtype=torch.float32)


def main() -> None:
    """Prints agreement and steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--count", type=int, default=32)
    options = parser.parse_args()
    writer = redraft.load(options.model)
    seeds = list(range(options.count))
    plain_ids, plain_steps = first_canvases(writer, seeds)
    runs = {"another seed": first_canvases(writer, [seed + options.count for seed in seeds])}
    weight = writer.model.embed_tokens.weight
    with torch.no_grad():
        writer.model.embed_tokens.weight = torch.nn.Parameter(dequantize(quantize(weight), weight.dtype), False)
    runs["rounded"] = first_canvases(writer, seeds)
    writer.model.embed_tokens.weight = weight
    writer.model = pack_embedding(writer.model)
    runs["packed"] = first_canvases(writer, seeds)
    table = Table("embedding", "tokens equal", "canvases equal", "steps a canvas")
    table.add_row("as stored", "", "", f"{plain_steps.mean():.2f}")
    result = {"steps": float(plain_steps.mean())}
    for name, (ids, steps) in runs.items():
        equal = ids == plain_ids
        shares = float(equal.float().mean()), float(equal.all(dim=1).float().mean())
        table.add_row(name, f"{shares[0]:.1%}", f"{shares[1]:.1%}", f"{steps.mean():.2f}")
        result[name] = {"tokens_equal": shares[0], "canvases_equal": shares[1], "steps": float(steps.mean())}
    Console(highlight=False).print(table)
    print(json.dumps({"model": options.model, "count": options.count, **result}))


if __name__ == "__main__":
    main()
