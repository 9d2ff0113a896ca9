"""Fine-tuning: from a base model and files of records to the configuration of a run that trains an adapter.

Only what the assistant says is learned: the denoiser on canvases behind each turn, the causal half on the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from redraft import checkpoint
from redraft.config import SamplerConfig
from redraft.kernels.backend import has_bf16
from redraft.model.lora import AdapterConfig
from redraft.train.config import TrainConfig
from redraft.train.data_check import DataCheck, TokenEstimate
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig
from redraft.train.records import DataConfig, Source

LARGE_MODEL = 10**9  # parameters: layers of larger models are recomputed, to save memory
MOST_WARMUP = 100  # steps
EVALUATIONS = 20  # in a run, about


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What a user chooses. Fields that are None depend on the model, the device or the data."""

    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    length: int | None = None  # tokens of a row; 2048, or the model's context
    batch: int = 8  # rows of a step
    rows: int = 1  # of them in a forward
    epochs: float = 3.0
    steps: int | None = None  # instead of epochs
    rate: float = 2e-4
    ar_weight: float = 1.0
    held_out: float = 0.05  # share of the records
    save_every: int | None = None  # steps; a twentieth of the run
    seed: int = 0
    quant: str | None = None
    skip_bad: bool = False
    start_adapter: str = ""  # an adapter to start with; empty: a new one

    def __post_init__(self) -> None:
        for name in ("batch", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.batch % self.rows:
            raise ValueError(f"batch {self.batch} is no multiple of the {self.rows} rows of a forward")
        if not self.epochs > 0:
            raise ValueError(f"epochs must be above 0, got {self.epochs}")
        if not 0 <= self.held_out <= 0.5:
            raise ValueError(f"held_out is a share from 0 to 0.5, got {self.held_out}")
        if not self.rate > 0:
            raise ValueError(f"rate must be above 0, got {self.rate}")


def tuning_data(files: Sequence[str], options: TuneOptions, sampler: SamplerConfig, context: int) -> DataConfig:
    """The records that are learned, packed with canvases of the lengths with which the model generates."""
    lengths = sampler.canvas_lengths or (sampler.canvas_length,)
    length = options.length or min(2048, context)
    if length < 2 * max(lengths):
        raise ValueError(f"length {length} has no room for a prompt and a canvas of {max(lengths)}: give {2 * max(lengths)}")
    every = round(1 / options.held_out) if options.held_out else 0
    return DataConfig(
        sources=(Source(files=tuple(files), every=every),),
        length=length,
        canvas_lengths=tuple(lengths),
        seed=options.seed,
        keeps_bos=True,
        skip_bad=options.skip_bad,
    )


def tuning_config(
    base: str, data: DataConfig, options: TuneOptions, check: DataCheck, estimate: TokenEstimate, device: torch.device
) -> TrainConfig:
    """The configuration of the run. Its length comes from the number of tokens in the records."""
    model, sampler = checkpoint.read_configs(checkpoint.find(base, weights=False))
    per_epoch = estimate.steps(options.batch * data.length)
    steps = options.steps or max(1, round(options.epochs * per_epoch))
    (source,) = data.sources
    held_out = None
    if check.held_out:
        held_out = replace(data, sources=(replace(source, is_held_out=True),), lookahead=1, shuffle=1)
    is_large = model.parameter_counts()["total"] >= LARGE_MODEL
    return TrainConfig(
        model=model,
        sampler=sampler,
        data=data,
        held_out=held_out,
        init=str(Path(base).resolve()) if Path(base).exists() else base,
        adapter=options.adapter,
        start_adapter=options.start_adapter,
        quant=options.quant,
        loss=LossConfig(ar_weight=options.ar_weight, balance_weight=0.0, learns_prompts=False),
        optim=OptimConfig(
            muon=False,
            adamw_lr=options.rate,
            weight_decay=0.0,
            betas=(0.9, 0.99),
            warmup=min(MOST_WARMUP, steps // 10),
            cooldown=0.9,
            ema=0.0,
        ),
        steps=steps,
        rows=options.rows,
        microbatches=options.batch // options.rows,
        seed=options.seed,
        precision="bfloat16" if device.type == "cuda" and has_bf16(device) else "float32",
        recompute=is_large,
        report_every=max(1, min(10, steps // 50)),
        save_every=options.save_every or max(1, steps // EVALUATIONS),
        evaluate_every=max(1, steps // EVALUATIONS),
        keep=1,
    )
