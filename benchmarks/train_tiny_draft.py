"""Trains `tiny` to draft on one GPU: own text, training by the clock, export, measurements. The last line is JSON.

    python benchmarks/train_tiny_draft.py --seconds 1000 --call-seconds 570 --data DATA --out OUT     # call 1
    python benchmarks/train_tiny_draft.py --seconds 1000 --call-seconds 570 --data DATA --out OUT     # call 2 resumes
    python benchmarks/train_tiny_draft.py --smoke --data DATA --out OUT                               # small, on a CPU

`--seconds` is the training time of all calls together, compiling included; the learning rate falls to zero by then. A call
that has used `--call-seconds` writes a checkpoint, exports and measures the averaged weights, and ends. Own text,
checkpoints and compiled kernels stay in the folder `--work`. `--out` gets the model, the metrics and the measurements.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

START_TIME = time.perf_counter()
SMALL_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line, and sets the folders of compiled kernels before torch is imported."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1000, help="training time of all calls together")
    parser.add_argument("--call-seconds", type=float, default=1e9, help="time of this call, everything included")
    parser.add_argument("--measure-seconds", type=float, default=75, help="of a call, kept for export and measurements")
    parser.add_argument("--own-tokens", type=int, default=20_000_000)
    parser.add_argument("--own-rows", type=int, default=2048)
    parser.add_argument("--own-seconds", type=float, default=150, help="sampling ends after this, with fewer tokens")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("REDRAFT_DATA", "data")))
    parser.add_argument("--work", type=Path, default=Path("/tmp/tiny_draft"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="changes", help="a setting of the recipe: key=value")
    parser.add_argument("--start-share", type=float, default=0.3, help="of the weights at the start in the final average")
    parser.add_argument("--baseline", action="store_true", help="measure the weights at the start, too")
    parser.add_argument("--only-measure", type=Path, help="measure this checkpoint and end")
    parser.add_argument("--texts", type=int, default=64, help="texts of each measurement of acceptance")
    parser.add_argument("--smoke", action="store_true", help="a model of 0.3M weights, seconds instead of minutes")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.seconds = min(arguments.seconds, 6)
        arguments.own_tokens = min(arguments.own_tokens, 1000)
        arguments.own_rows = min(arguments.own_rows, 8)
        arguments.texts = min(arguments.texts, 2)
    for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(name, str(arguments.work / folder))
    os.environ["REDRAFT_DATA"] = str(arguments.data)
    os.environ["REDRAFT_OWN_TEXT"] = str(arguments.work / "own_text.jsonl")
    return arguments


def say(text: str) -> None:
    """Prints a line with the seconds since the start."""
    print(f"[{time.perf_counter() - START_TIME:6.1f}s] {text}", flush=True)


# 1. The run


def build_config(arguments: argparse.Namespace) -> Any:
    """Returns the recipe's configuration with this call's settings."""
    from redraft.train.recipe import load_recipe

    changes = [f"max_seconds={arguments.seconds}", *arguments.changes]
    cfg = load_recipe("tiny_draft", arguments.work / "run", changes)
    return shrink(cfg, arguments) if arguments.smoke else cfg


def shrink(cfg: Any, arguments: argparse.Namespace) -> Any:
    """Returns the same run with a model and batches that a CPU trains in seconds. Writes the model it starts from."""
    from redraft import checkpoint
    from redraft.tokenizer.tokenizer import Tokenizer
    from redraft.train.loop import init_model

    init = arguments.work / "init"
    model = replace(cfg.model, **SMALL_SIZES, draft_head_size=0)
    if not init.exists():
        checkpoint.save(init_model(model, 0), init, tokenizer=Tokenizer.from_folder(cfg.init), sampler=cfg.sampler)
    sizes: dict[str, Any] = {"length": 96, "shuffle": 64, "lookahead": 4}
    return replace(
        cfg,
        init=str(init),
        model=replace(model, draft_head_size=16),
        data=replace(cfg.data, **sizes, canvas_lengths=(16, 32)),
        draft_data=replace(cfg.draft_data, **sizes),
        loss=replace(cfg.loss, draft=replace(cfg.loss.draft, rows=2)),
        rows=4,
        streams=1,
        precision="float32",
        compile=False,
        prefetch=False,
        report_every=5,
    )


def write_own_text(cfg: Any, arguments: argparse.Namespace, device: str) -> dict[str, float]:
    """Samples the own text of the weights at the start, unless an earlier call did. Returns its counts."""
    import torch

    from redraft import checkpoint
    from redraft.tokenizer.tokenizer import Tokenizer
    from redraft.train import own_text

    path = arguments.work / "own_text.jsonl"
    counts_path = arguments.work / "own_text.json"
    if counts_path.exists():
        return json.loads(counts_path.read_text())
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = checkpoint.load_model(cfg.init, dtype=dtype, device=device)
    settings = own_text.OwnTextConfig(
        tokens=arguments.own_tokens,
        rows=arguments.own_rows,
        length=64 if arguments.smoke else 512,
        longest_beginning=24 if arguments.smoke else 48,
    )
    tokenizer = Tokenizer.from_folder(cfg.init)
    corpus = cfg.data
    counts = own_text.write_own_text(model, tokenizer, corpus, path, settings, arguments.own_seconds)
    counts_path.write_text(json.dumps(counts))
    return counts


def average_with_start(folder: Path, start: str, share: float) -> None:
    """Replaces a checkpoint's weights by an average with those at the start, which have this share.

    Fine-tuning moves the causal half away from where it was best. On the line between both, drafts stay as good as at the
    end, and the next-token loss falls below both ends' mean (docs/lab.md).
    """
    import torch

    from redraft import checkpoint
    from redraft.tokenizer.tokenizer import Tokenizer

    model = checkpoint.load_model(folder, dtype=torch.float32)
    before = checkpoint.load_model(start, dtype=torch.float32).state_dict()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name in before:  # the draft head is new
                weight.lerp_(before[name], share)
    sampler = checkpoint.read_sampler_config(folder, model.config)
    tokenizer = Tokenizer.from_folder(folder)
    checkpoint.save(model.to(torch.bfloat16), folder, tokenizer=tokenizer, sampler=sampler, force=True)


def train(cfg: Any, arguments: argparse.Namespace, device: str) -> Any:
    """Trains until the end of the run or of this call. Returns the Ended event."""
    from redraft.train.loop import Ended, Report, Trainer

    run = arguments.work / "run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.json").write_text(cfg.to_json())
    trainer = Trainer(cfg, run, device)
    say(f"training from step {trainer.step}, {trainer.seconds:.0f} of {arguments.seconds:.0f} seconds used")
    is_stopping = False
    ended = None
    with (run / "metrics.jsonl").open("a") as metrics:
        for event in trainer.run():
            if isinstance(event, Report):
                metrics.write(json.dumps(asdict(event)) + "\n")
                metrics.flush()
                say(format_report(event))
                remaining = arguments.call_seconds - arguments.measure_seconds - (time.perf_counter() - START_TIME)
                if remaining < 0 and not is_stopping:
                    is_stopping = True
                    os.kill(os.getpid(), signal.SIGTERM)  # the trainer writes a checkpoint and ends
            elif isinstance(event, Ended):
                ended = event
    say(f"{ended.why} at step {ended.step}" if ended else "no end")
    return ended


def format_report(report: Any) -> str:
    """Formats a report in one line, with the acceptance of the first slots."""
    slots = " ".join(f"{share:.2f}" for share in (report.acceptance or ())[:8])
    return (
        f"step {report.step}  denoiser {report.denoiser:.3f}  next token {report.ar:.4f}  drafts {report.draft or 0:.3f}  "
        f"accepted {report.accepted or 0:.2f} [{slots}]  rate {report.rate:.2f}  {report.tokens_per_second:,.0f} tokens/s"
    )


# 2. Measurements


def measure(folder: Path, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measures a checkpoint: bits per byte, the denoiser's bound, acceptance on stories and functions, sample texts."""
    import torch

    from redraft import checkpoint
    from redraft.tokenizer.tokenizer import Tokenizer
    from redraft.train.evals import likelihood, samples
    from redraft.train.evals.tasks import read_functions, read_paragraphs

    model = checkpoint.load_model(folder, dtype=torch.float32, device=device)
    tokenizer = Tokenizer.from_folder(folder)
    sampler = checkpoint.read_sampler_config(folder, model.config)
    paragraphs = read_paragraphs(arguments.data / "stories/tinystories_val_a.txt.xz", 2 if arguments.smoke else 150)
    functions = read_functions(arguments.data / "code/pyfuncs_eval.jsonl.xz")
    bound = likelihood.nelbo(model, tokenizer, paragraphs[:48], 64, levels=2 if arguments.smoke else 8)
    scores: dict[str, Any] = {
        "bits_per_byte": likelihood.autoregressive(model, tokenizer, paragraphs).bits_per_byte,
        "bits_per_byte_functions": likelihood.autoregressive(model, tokenizer, functions[: len(paragraphs)]).bits_per_byte,
        "denoiser_bits_per_byte_48": bound.bits_per_byte,
    }
    prompts = {
        "stories": [tokenizer.encode_prompt(text)[:9] for text in paragraphs],
        "functions": [tokenizer.encode_prompt(text)[:17] for text in functions],
    }
    # bf16 on a GPU, as it runs there; texts are sampled by captured graphs then.
    drafter = checkpoint.load_model(folder, dtype=torch.bfloat16, device=device) if device == "cuda" else model
    for name, ids in prompts.items():
        scores[f"acceptance_{name}"] = measure_acceptance(drafter, sampler, ids[: arguments.texts], arguments.smoke)
    count = 1 if arguments.smoke else 10
    engine = samples.make_engine(model, count)
    scores["samples"] = {}
    for check in ("off", "checked", "exact"):
        cfg = sampler.changed(check=check, max_new_tokens=32 if arguments.smoke else 200)
        scores["samples"][check] = samples.sample(engine, tokenizer, "Once upon a time", count, cfg).texts
    return scores


def measure_acceptance(model: Any, sampler: Any, prompts: Sequence[list[int]], is_smoke: bool) -> list[dict[str, Any]]:
    """Measures acceptance at each temperature, with canvases of 8 and 16, on texts sampled at that temperature."""
    from redraft.train.evals import acceptance

    rows = []
    for temperature in acceptance.TEMPERATURES:
        texts = acceptance.sample_texts(model, prompts, temperature, 48 if is_smoke else 256)
        for length in (8, 16):
            result = acceptance.measure(
                model,
                texts,
                [len(ids) for ids in prompts],
                temperature,
                canvas_length=length,
                draft_token=sampler.draft_token,
                tolerance=sampler.tolerance,
            )
            scores = {name: value for name, value in asdict(result).items() if value is not None}
            rows.append({"canvas": length, **scores})
    return rows


def print_scores(name: str, scores: dict[str, Any]) -> None:
    """Prints the scores of a checkpoint as tables."""
    print(f"\n== {name}")
    for key, value in scores.items():
        if isinstance(value, float):
            print(f"{key:32} {value:.4f}")
    for key, rows in scores.items():
        if key.startswith("acceptance_"):
            print(f"{key:24} canvas    T   tokens  exact  checked  by slot, from slot 2 on")
            for row in rows:
                slots = " ".join(f"{share:.2f}" for share in row["slots"][:9])
                print(
                    f"{'':24} {row['canvas']:6} {row['temperature']:4.1f} {row['tokens']:8} {row['exact']:6.2f} "
                    f"{row['checked']:8.2f}  {slots}"
                )
    for key, texts in scores["samples"].items():
        for text in texts:
            print(f"-- {key}: {text!r}")
    sys.stdout.flush()


def main() -> None:
    """Runs the phases one after another."""
    arguments = parse_arguments()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random.seed(0)
    if arguments.smoke:
        torch.set_num_threads(1)  # more threads only wait for one another
    arguments.work.mkdir(parents=True, exist_ok=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.only_measure:
        scores = measure(arguments.only_measure, arguments, device)
        print_scores(str(arguments.only_measure), scores)
        (arguments.out / "scores.json").write_text(json.dumps(scores))
        return
    cfg = build_config(arguments)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else device}
    results["own_text"] = write_own_text(cfg, arguments, device)
    say(f"own text: {results['own_text']}")
    if arguments.baseline:
        results["baseline"] = measure(Path(cfg.init), arguments, device)
        print_scores("at the start", results["baseline"])
    ended = train(cfg, arguments, device)
    if ended.why == "done" and arguments.start_share:
        average_with_start(ended.model, cfg.init, arguments.start_share)
    for path in (arguments.work / "run" / "metrics.jsonl", arguments.work / "run" / "recipe.json"):
        shutil.copy(path, arguments.out)
    shutil.copytree(ended.model, arguments.out / "model", dirs_exist_ok=True)
    sizes = {path.name: path.stat().st_size for path in sorted(ended.model.iterdir())}
    results |= {"step": ended.step, "why": ended.why, "bytes": sum(sizes.values()), "files": sizes}
    say(f"exported {results['bytes']:,} bytes: {sizes}")
    results["scores"] = measure(ended.model, arguments, device)
    print_scores(f"step {ended.step}, {ended.why}", results["scores"])
    (arguments.out / "scores.json").write_text(json.dumps(results))
    results["scores"] = {key: value for key, value in results["scores"].items() if isinstance(value, float)}
    results.pop("baseline", None)
    say("end")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
