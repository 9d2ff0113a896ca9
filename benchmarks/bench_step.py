"""Times one denoising step of redraft and of transformers (eager): same weights, same machine, same run.

A step is everything from one draft to the next: embedding, self-conditioning, layers, head, sampler. Both denoise one canvas
after a short prompt. With random weights it never settles, so every step is timed. Rounds alternate between the two; the
figure is the median step of each. The last line is JSON; `ratio` is transformers' time over redraft's.

    python benchmarks/bench_step.py [--threads 2] [--steps 12] [--rounds 5] [--dtype float32] [--experts grouped_mm]
"""

import argparse
import json
import statistics
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from redraft import checkpoint
from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.diffusion.generate import Draft, generate

CONFIG = ModelConfig(
    vocab_size=8192,
    hidden_size=384,
    intermediate_size=384,
    moe_intermediate_size=128,
    num_experts=16,
    top_k_experts=4,
    layer_types=((SLIDING,) * 3 + (FULL,)) * 2,
    num_attention_heads=6,
    num_key_value_heads=3,
    num_global_key_value_heads=1,
    head_dim=64,
    global_head_dim=128,
    sliding_window=512,
    max_position_embeddings=4096,
    eos_token_ids=(1,),
    image_token_ids=(8189, 8190, 8191),
)
PROMPT = list(range(100, 356))


class StepTimes:
    """A transformers streamer that records when each draft arrives."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put_draft(self, value: torch.Tensor) -> None:
        """Called after every denoising step."""
        self.at.append(time.perf_counter())

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt and each finished canvas, which are not timed."""

    def end(self) -> None:
        """Nothing to close."""


def their_steps(model: DiffusionGemmaForBlockDiffusion, cfg: SamplerConfig) -> list[float]:
    """Seconds of each step of transformers' generate."""
    times = StepTimes()
    model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=cfg.canvas_length,
        max_denoising_steps=cfg.max_steps,
        streamer=times,
        pad_token_id=cfg.pad_token_id,
    )
    return [b - a for a, b in pairwise(times.at)]


def our_steps(model: torch.nn.Module, cfg: SamplerConfig) -> list[float]:
    """Seconds of each step of redraft's generate."""
    at = [time.perf_counter() for e in generate(model, [PROMPT], cfg, seeds=[0]) if isinstance(e, Draft)]
    return [b - a for a, b in pairwise(at)]


def main() -> None:
    """Builds both models, times them in turn, prints a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--experts", choices=("grouped_mm", "eager"), default="grouped_mm", help="transformers' experts")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cfg = SamplerConfig(max_steps=args.steps, eos_token_ids=(1,))

    config = DiffusionGemmaConfig.from_dict(checkpoint.publish_model_config(CONFIG, args.dtype))
    theirs = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=getattr(torch, args.dtype)).eval()
    theirs.set_experts_implementation(args.experts)
    ours = checkpoint.from_state_dict(CONFIG, theirs.state_dict(), dtype=getattr(torch, args.dtype))

    times: dict[str, list[float]] = {"transformers": [], "redraft": []}
    their_steps(theirs, cfg)  # warm-up
    our_steps(ours, cfg)
    for _ in range(args.rounds):
        times["transformers"] += their_steps(theirs, cfg)
        times["redraft"] += our_steps(ours, cfg)
    report(times, args)


def report(times: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Prints a table and a JSON line."""
    median = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    table = Table("", "ms per step, median", "fastest", "slowest", "steps timed")
    for name, values in times.items():
        fastest = 1e3 * min(values)
        slowest = 1e3 * max(values)
        table.add_row(name, f"{median[name]:.1f}", f"{fastest:.1f}", f"{slowest:.1f}", str(len(values)))
    Console().print(table)
    here = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    print(
        json.dumps(
            {
                "what": "denoising step",
                "parameters": CONFIG.parameter_counts()["total"],
                "dtype": args.dtype,
                "threads": args.threads,
                "commit": git.stdout.strip(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "transformers_experts": args.experts,
                "ms": {name: round(value, 2) for name, value in median.items()},
                "ratio": round(median["transformers"] / median["redraft"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
