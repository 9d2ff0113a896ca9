"""The training loop: batches in, checkpoints and reports out.

    streams -> batch -> draw -> objective -> gradients -> optimizer -> report, now and then a checkpoint

A step is `microbatches` passes. Each has a stream of rows and a source of chance of its own, numbered through all processes:
the same seed gives the same losses however the microbatches are spread over them. Nothing random outlives a step, so a
checkpoint is tensors, positions in the data, and the step. Knows nothing of terminals: it yields events.
"""

import json
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from redraft import checkpoint
from redraft.config import ModelConfig, SamplerConfig
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import checkpoints, data, sudoku_task
from redraft.train.data import MARKS, DataConfig
from redraft.train.loss import LossConfig, Losses
from redraft.train.optim import OptimConfig, Optimizer, rate
from redraft.train.sudoku_task import Boards, PuzzleConfig
from redraft.train.text_task import Texts

VOCABULARY_BYTES = 40_000_000  # of text that a vocabulary is trained on


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole training run. `recipes/` has functions that return one."""

    model: ModelConfig
    data: DataConfig | PuzzleConfig
    sampler: SamplerConfig  # saved with the model
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tokenizer: str = "bpe"  # "bpe": trained on the data; "bytes"; or a folder that has one
    init: str = ""  # a checkpoint folder to start from, its tokenizer with it; empty: from nothing
    steps: int = 1000
    rows: int = 16  # of a microbatch
    microbatches: int = 1  # of a step, over all processes
    seed: int = 0
    precision: str = "float32"  # of the computation; weights are float32 always. "bfloat16" on GPUs
    compile: bool = False
    read_ahead: bool = False  # make batches in processes of their own
    streams: int = 1  # of rows, for each microbatch; a process each when reading ahead
    report_every: int = 10
    save_every: int = 500
    keep: int = 2
    max_seconds: float = math.inf  # stop, with a checkpoint, when this call has taken as long
    by_clock: bool = False  # cool down by the clock: the run, all its calls together, is done after max_seconds

    def __post_init__(self) -> None:
        if self.streams < 1 or self.rows % self.streams:
            raise ValueError(f"{self.rows} rows cannot be taken from {self.streams} streams in turn")
        for name in ("steps", "rows", "microbatches", "report_every", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.by_clock and math.isinf(self.max_seconds):
            raise ValueError("by_clock needs max_seconds")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision is float32 or bfloat16, got {self.precision!r}")

    @property
    def step_tokens(self) -> int:
        """Clean tokens a step reads, padding included."""
        return self.rows * self.microbatches * self.data.length


@dataclass(frozen=True)
class Report:
    """How it goes, averaged since the last report."""

    step: int
    steps: int
    loss: float
    denoiser: float  # nats per token
    ar: float
    balance: float  # the busiest expert's share of tokens over its fair share, worst layer
    idle: float  # the idlest expert's
    gradient: float
    rate: float
    tokens: int
    tokens_per_second: float
    seconds: float
    epoch: int  # of the first source
    bad: int  # records skipped
    lost: int  # passes of these steps whose loss was not finite: they moved nothing
    solved: float | None = None  # of puzzles that were given up or solved since the last report


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Ended:
    """The run is over, or was told to stop; the averaged weights lie in `model`, ready to be loaded."""

    step: int
    model: Path
    why: str  # "done", "stopped" or "out of time"


Event = Report | Saved | Ended


# 1. What a run is made of


def build_tokenizer(cfg: TrainConfig, out: Path) -> Tokenizer:
    """The vocabulary of a run; one that is trained is kept in the run's folder."""
    if isinstance(cfg.data, PuzzleConfig):
        return sudoku_task.tokenizer()
    if cfg.init or cfg.tokenizer not in ("bpe", "bytes"):
        return Tokenizer.from_folder(cfg.init or cfg.tokenizer)
    if cfg.tokenizer == "bytes":
        return Tokenizer.byte_level(MARKS)
    kept = out / "tokenizer"
    if checkpoints.first() and not (kept / "tokenizer.json").exists():
        data.train_tokenizer(_sample(cfg.data), cfg.model.vocab_size, MARKS).save(kept)
    checkpoints.barrier()
    return Tokenizer.from_folder(kept)


def _sample(cfg: DataConfig) -> Iterator[str]:
    """Texts from every source, each about as much."""
    for source in cfg.sources:
        left = VOCABULARY_BYTES // len(cfg.sources)
        for _, record in data.ordered(cfg, source, 0):
            if left <= 0:
                break
            record = data.cut(record, source, random.Random(0))
            if isinstance(record, dict) and isinstance(record.get("text"), str):
                left -= len(record["text"])
                yield record["text"]


def build_model(cfg: TrainConfig) -> DiffusionGemma:
    """From a checkpoint, or with fresh weights."""
    if cfg.init:
        return checkpoint.load_model(cfg.init, dtype=torch.float32).requires_grad_(True)
    return fresh(cfg.model, cfg.seed)


def fresh(config: ModelConfig, seed: int) -> DiffusionGemma:
    """Random weights under which every layer hands on about what it is given.

    Norms behind the sublayers start small: with them at one, the residual stream would be made of its last layers. Norms
    of queries and keys start at what makes their product as large as elsewhere, where it is divided by sqrt(K): at one,
    attention would begin all but decided, and take long to change its mind.
    """
    generator = torch.Generator().manual_seed(seed)
    model = DiffusionGemma(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2:
                scale = 1.0 if "router" in name else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
            elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                p.fill_((2 * config.num_hidden_layers) ** -0.5)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                p.fill_(len(p) ** -0.25)
    return model


def shard(objective: nn.Module, precision: str) -> None:
    """FSDP2: every layer's weights are spread over the processes and gathered when it is its turn."""
    dtype = getattr(torch, precision) if precision != "float32" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for layer in objective.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(objective, mp_policy=policy)


def computed_in(objective: nn.Module, precision: str) -> Callable[..., Losses]:
    """The objective with its float32 weights rounded for the computation; gradients arrive in float32."""
    named = dict(objective.named_parameters())
    dtype = getattr(torch, precision)

    def run(*arguments: Any) -> Losses:
        rounded = {name: p.to(dtype) for name, p in named.items()}
        return torch.func.functional_call(objective, rounded, arguments)

    return run


# 2. The loop


class Trainer:
    """One run in one folder; begins where the folder's last checkpoint ends."""

    def __init__(self, cfg: TrainConfig, out: str | Path, device: torch.device | str = "cpu") -> None:
        self.cfg, self.out, self.device = cfg, Path(out), torch.device(device)
        if self.device.type == "cuda":
            torch.set_num_threads(1)  # what is left to the CPU is small, and many threads only wait for one another
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if cfg.microbatches % self.world:
            raise ValueError(f"{cfg.microbatches} microbatches cannot be shared by {self.world} processes: set a multiple")
        self.tokenizer = build_tokenizer(cfg, self.out)
        model = build_model(cfg)
        self.config = model.config
        kind = Boards if isinstance(cfg.data, PuzzleConfig) else Texts
        self.task = kind(cfg, self.config, self.tokenizer, self.device, self.mine)
        self.objective = self.task.objective(model).to(self.device)
        self.constants = {name: tensor.clone() for name, tensor in model.named_buffers()}  # as they will be saved
        for layer in model.layers:  # float32 ones would lift everything behind them to float32
            layer.layer_scalar.data = layer.layer_scalar.to(getattr(torch, cfg.precision))
            layer.encoder_layer_scalar.data = layer.encoder_layer_scalar.to(getattr(torch, cfg.precision))
        if self.world > 1:
            shard(self.objective, cfg.precision)
        self.optimizer = Optimizer(self.objective.model, cfg.optim)
        plain = cfg.precision == "float32" or self.world > 1
        self.compute = self.objective if plain else computed_in(self.objective, cfg.precision)
        if cfg.compile:
            self.objective.compile(dynamic=False)
        self.step, self.before = 0, 0.0
        self.began = time.perf_counter()
        self._resume()

    def _resume(self) -> None:
        folder = checkpoints.latest(self.out)
        if folder is None:
            return
        state = checkpoints.load(folder, self._tensors())
        if state["batch"] != self._batch:
            raise ValueError(f"{folder} was made with {state['batch']}, this run has {self._batch}: give another folder")
        self.step, self.before, self.task.positions = state["step"], state["seconds"], state["positions"]

    def _tensors(self) -> dict[str, Tensor]:
        return self.optimizer.state() | self.task.tensors()

    @property
    def seconds(self) -> float:
        """Of training so far, earlier runs included."""
        return self.before + time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """The share of the run that is left, by steps or by the clock; all processes must agree on it."""
        left = 1 - self.step / self.cfg.steps
        if not self.cfg.by_clock:
            return left
        left = min(left, 1 - self.seconds / self.cfg.max_seconds)
        return -self._most(-left)

    @property
    def _batch(self) -> dict[str, int]:
        """What positions in the data depend on."""
        return {name: getattr(self.cfg, name) for name in ("rows", "microbatches", "streams")}

    @property
    def mine(self) -> range:
        """The microbatches of a step that are this process's."""
        return range(self.rank, self.cfg.microbatches, self.world)

    def run(self) -> Iterator[Event]:
        """Trains to the end, to the time limit, or until told to stop; a checkpoint is written in every case."""
        self.task.open()
        self.began = time.perf_counter()
        try:
            with _told_to_stop() as told:
                yield from self._steps(told)
        finally:
            self.task.close()

    def _steps(self, told: dict[str, bool]) -> Iterator[Event]:
        cfg, meter, saved = self.cfg, Meter(self), self.step
        while self.step < cfg.steps and not (cfg.by_clock and self.left <= 0):
            meter.add(*self.one_step())
            spent = self.seconds if cfg.by_clock else self.seconds - self.before
            over = self._most(float(bool(told) or spent > cfg.max_seconds)) > 0
            if self.step % cfg.report_every == 0 or self.step == cfg.steps or over:
                yield meter.report()
            if over:
                break
            if self.step % cfg.save_every == 0 and self.step < cfg.steps:
                yield self._save()
                saved = self.step
        if saved != self.step:
            yield self._save()
        done = self.step >= cfg.steps or (cfg.by_clock and not told)
        why = "done" if done else "stopped" if told else "out of time"
        yield Ended(self.step, self.export(), why)

    def one_step(self) -> tuple[list[Losses], Tensor]:
        """Gradients of this process's microbatches, then the optimizer's move."""
        found = []
        for m in self.mine:
            chance = random.Random(f"{self.cfg.seed} {self.step} {m}").getrandbits(62)
            losses = self.task.losses(self.compute, m, torch.Generator().manual_seed(chance))
            # FSDP averages over processes; what is left is to average over this process's passes.
            (losses.total / len(self.mine)).backward()
            found.append(Losses(*(t.detach() for t in losses)))
        self.share = rate(self.step, self.left, self.cfg.optim)
        norm = self.optimizer.step(self.step, self.share)
        self.step += 1
        return found, norm

    def _most(self, number: float) -> float:
        """The largest of all processes' numbers: what they do next must not differ."""
        if self.world == 1:
            return number
        largest = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def _save(self) -> Saved:
        positions = self.task.positions
        if self.world > 1:
            everyone: list[Any] = [None] * self.world
            dist.all_gather_object(everyone, positions)
            positions = {m: position for part in everyone for m, position in part.items()}
        state = {"step": self.step, "seconds": self.seconds, "positions": positions}
        state["batch"] = self._batch
        return Saved(self.step, checkpoints.save(self.out, self.step, self._tensors(), state, self.cfg.keep))

    def export(self) -> Path:
        """The averaged weights in the published layout, bf16, with tokenizer and sampler settings."""
        folder = self.out / "model"
        whole = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.optimizer.average.items()}
        if checkpoints.first():
            model = DiffusionGemma(self.config)
            model.load_state_dict(whole | self.constants)
            checkpoint.save(model.to(torch.bfloat16), folder, sampler=self.cfg.sampler)
            self.tokenizer.save(folder)
        checkpoints.barrier()
        return folder


class Meter:
    """Adds up losses where they are, and looks at them only when a report is due: looking makes the GPU wait."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._clear()

    def _clear(self) -> None:
        self.passes: list[Losses] = []
        self.norm: Tensor | None = None
        self.steps, self.since = 0, time.perf_counter()

    def add(self, passes: list[Losses], norm: Tensor) -> None:
        """One step's results."""
        self.passes += passes
        self.norm, self.steps = norm, self.steps + 1

    def report(self) -> Report:
        """What was added since the last report. Where no loss was finite the run ends with a sentence."""
        trainer, cfg = self.trainer, self.trainer.cfg
        terms = torch.stack([torch.stack(one[:3]) for one in self.passes])
        good = terms[:, 0].isfinite()
        sums = torch.cat([terms.where(good[:, None], 0.0).sum(dim=0), good.sum()[None]])
        share = torch.stack([one.share_E for one in self.passes]).mean(dim=0)
        if trainer.world > 1:
            for tensor in (sums, share):
                dist.all_reduce(tensor)
            share /= trainer.world
        *totals, finite = sums.tolist()
        if not finite:
            raise ValueError(
                f"the loss is {float(terms[-1, 0])} at step {trainer.step}: lower the rates, or look at the data"
            )
        loss, denoiser, ar = (total / finite for total in totals)
        fair = share * share.shape[1]
        tokens = cfg.step_tokens
        report = Report(
            step=trainer.step,
            steps=cfg.steps,
            loss=loss,
            denoiser=denoiser,
            ar=ar,
            balance=float(fair.max()),
            idle=float(fair.min()),
            gradient=float(self.norm),
            rate=trainer.share,
            tokens=trainer.step * tokens,
            tokens_per_second=self.steps * tokens / (time.perf_counter() - self.since),
            seconds=trainer.seconds,
            lost=self.steps * cfg.microbatches - int(finite),
            **trainer.task.told(),
        )
        self._clear()
        return report


@contextmanager
def _told_to_stop() -> Iterator[dict[str, bool]]:
    """Holds Ctrl-C and SIGTERM back until a checkpoint is written; a second one is obeyed at once."""
    told: dict[str, bool] = {}
    before = {}

    def note(number: int, frame: Any) -> None:
        told["stop"] = True
        signal.signal(number, before[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:
        pass  # not in the main thread: whoever runs us there has other ways to stop
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe(cfg: TrainConfig) -> str:
    """The whole configuration as JSON, for the run's folder."""
    return json.dumps(asdict(cfg), indent=2, default=str) + "\n"
