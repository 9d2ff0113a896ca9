"""Teaches `tiny` another style with an adapter: old fairy tales instead of small children's stories.

Reads stories/fairytaleqa.jsonl.xz in the folder REDRAFT_DATA (default: data) and writes the sections of its training tales
to the run's folder; every twentieth is held out.
Cost: 150 steps of 4,096 tokens.
"""

import json
import os
from pathlib import Path
from typing import Any

from redraft import checkpoint
from redraft.model.lora import AdapterConfig
from redraft.train.config import TrainConfig
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig
from redraft.train.records import DataConfig, Source, open_text

HELD_OUT = 20  # every so many-th section


def write_sections(tales: Path, records: Path) -> None:
    """Writes each section of the training tales as a record with a text."""
    records.parent.mkdir(parents=True, exist_ok=True)
    part = records.with_name(records.name + ".part")
    with open_text(tales) as file, part.open("w", encoding="utf-8") as out:
        for tale in map(json.loads, file):
            for section in tale["sections"] if tale["split"] == "train" else ():
                out.write(json.dumps({"text": " ".join(section.split())}) + "\n")
    part.replace(records)


def recipe(folder: Path) -> TrainConfig:
    """Returns the configuration."""
    base = checkpoint.PACKAGED / "tiny"
    tales = Path(os.environ.get("REDRAFT_DATA", "data")) / "stories/fairytaleqa.jsonl.xz"
    records = folder / "tales.jsonl"
    if tales.is_file() and not records.exists():
        write_sections(tales, records)
    model, sampler = checkpoint.read_configs(base)
    lengths = tuple(sampler.canvas_lengths)
    usual: dict[str, Any] = {"length": 512, "canvas_lengths": lengths, "keeps_bos": True}
    files = (str(records),)
    return TrainConfig(
        model=model,
        sampler=sampler,
        init="tiny",
        adapter=AdapterConfig(rank=16, alpha=32.0),
        data=DataConfig(sources=(Source(files=files, every=HELD_OUT, prompt_share=0.3),), **usual),
        held_out=DataConfig(sources=(Source(files=files, every=HELD_OUT, is_held_out=True),), shuffle=1, **usual),
        loss=LossConfig(t_power=1.5, balance_weight=0.0),
        optim=OptimConfig(muon=False, adamw_lr=2e-3, weight_decay=0.0, warmup=10, cooldown=0.9, ema=0.0),
        steps=150,
        rows=8,
        save_every=50,
        evaluate_every=15,
    )
