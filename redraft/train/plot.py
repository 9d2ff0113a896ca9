"""Plots the metrics of a run: losses, learning rate and expert balance over tokens."""

import json
import os
from pathlib import Path


def draw_metrics(metrics: Path, picture: Path) -> None:
    """Reads the JSON lines of a run and writes a PNG. Needs matplotlib, which the extra redraft[train] installs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("the picture of the losses needs matplotlib: pip install 'redraft[train]'") from None
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    evaluations = [line["held_out"] for line in lines if "held_out" in line]
    lines = [line for line in lines if "held_out" not in line]
    if not lines:
        raise ValueError(f"{metrics} has no reports yet")
    tokens = [line["tokens"] / 1e6 for line in lines]
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, schedule = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name, score, label in (
        ("denoiser", "denoiser", "denoiser"),
        ("ar", "next_token", "next token"),
        ("draft", "draft", "drafts"),
    ):
        if any(line.get(name) for line in lines):
            losses.plot(tokens, [line[name] for line in lines], label=label)
        scored = [e for e in evaluations if score in e["scores"]]
        if scored:
            step_tokens = lines[-1]["tokens"] / lines[-1]["step"] / 1e6
            steps = [e["step"] * step_tokens for e in scored]
            losses.plot(steps, [e["scores"][score] for e in scored], "o-", label=f"{label}, held out")
    losses.set_ylabel("cross-entropy, nats per token")
    losses.set_yscale("log")
    losses.legend()
    losses.grid(alpha=0.3)
    schedule.plot(tokens, [line["rate"] for line in lines], color="tab:green", label="factor on the learning rate")
    schedule.plot(tokens, [line["balance"] for line in lines], color="tab:red", label="busiest expert, times an even share")
    if lines[-1].get("solved") is not None:
        solved = [line["solved"] or 0.0 for line in lines]
        schedule.plot(tokens, solved, color="tab:blue", label="share of puzzles solved")
    if lines[-1].get("accepted") is not None:
        accepted = [line["accepted"] or 0.0 for line in lines]
        schedule.plot(tokens, accepted, color="tab:blue", label="drafts accepted")
    schedule.set_xlabel("million tokens")
    schedule.legend()
    schedule.grid(alpha=0.3)
    part = picture.with_name(picture.name + ".part")
    figure.savefig(part, dpi=110, format="png")
    os.replace(part, picture)
