"""The training loop: batches in, checkpoints and reports out.

    streams -> batch -> noise -> objective -> gradients -> optimizer -> report, sometimes a checkpoint

A step runs `microbatches` forwards. Each microbatch has its own stream of rows and its own random seed, numbered over all
processes, so the same seed gives the same losses however the microbatches are spread over processes. No random state
outlives a step: a checkpoint holds tensors, positions in the data, and the step. The loop yields events; the caller displays
them.
"""

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from redraft import checkpoint
from redraft.config import ModelConfig
from redraft.model.backbone import Backbone
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.drafter import Drafter, DraftHead, init_draft_head, new_drafter
from redraft.model.lora import Adapter, AdapterError, new_adapter
from redraft.model.page import PageAdapter, new_page_adapter
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train import checkpoints, data, sudoku_data
from redraft.train.config import TrainConfig
from redraft.train.data import SPECIAL_TOKENS
from redraft.train.documents import crop_text
from redraft.train.draft_task import DraftHeldOut, DraftTask
from redraft.train.export import LAST, PartExport, export_model, load_base
from redraft.train.held_out import Evaluated, HeldOut
from redraft.train.loss import Losses
from redraft.train.meter import Meter, Report
from redraft.train.optim import Optimizer, learning_rate_scale
from redraft.train.page_task import PageTask
from redraft.train.records import DataConfig, read_shuffled
from redraft.train.sudoku_data import PuzzleConfig
from redraft.train.sudoku_task import SudokuTask
from redraft.train.text_task import TextTask

EXPORT = "model"  # the folder of the averaged weights, in the run's folder
MOST_NAMED = 20  # records in a message
VOCABULARY_BYTES = 40_000_000  # of text that a BPE vocabulary is trained on


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    step: int
    folder: Path


@dataclass(frozen=True)
class Ended:
    """The run ended. The folder `model` holds the averaged weights, or the best adapter, ready to load."""

    step: int
    model: Path
    why: str  # "done", "stopped" or "out of time"


Event = Report | Evaluated | Saved | Ended


class LostLossError(ValueError):
    """A loss that is not finite ended the training of an adapter. The message names the records of that step."""


# 1. Tokenizer and model


def build_tokenizer(cfg: TrainConfig, out: Path) -> Tokenizer:
    """Returns the tokenizer of a run. A newly trained one is saved in the run's folder."""
    if isinstance(cfg.data, PuzzleConfig):
        return sudoku_data.build_tokenizer()
    if cfg.init or cfg.tokenizer not in ("bpe", "bytes"):
        return Tokenizer.from_folder(cfg.init or cfg.tokenizer)
    if cfg.tokenizer == "bytes":
        return Tokenizer.byte_level(SPECIAL_TOKENS)
    folder = out / "tokenizer"
    if checkpoints.is_main_process() and not (folder / "tokenizer.json").exists():
        data.train_tokenizer(_sample_texts(cfg.data), cfg.model.vocab_size, SPECIAL_TOKENS).save(folder)
    checkpoints.barrier()
    return Tokenizer.from_folder(folder)


def _sample_texts(cfg: DataConfig) -> Iterator[str]:
    """Yields texts from every source, about the same amount from each."""
    for source in cfg.sources:
        remaining = VOCABULARY_BYTES // len(cfg.sources)
        for _, record in read_shuffled(cfg, source, 0):
            if remaining <= 0:
                break
            record = crop_text(record, source, random.Random(0))
            if isinstance(record, dict) and isinstance(record.get("text"), str):
                remaining -= len(record["text"])
                yield record["text"]


def build_model(cfg: TrainConfig) -> Backbone:
    """Loads the initial checkpoint, or initializes random weights."""
    if not cfg.init:
        assert isinstance(cfg.model, ModelConfig)
        return init_model(cfg.model, cfg.seed)
    model = checkpoint.load_model(cfg.init, dtype=torch.float32)
    model.require_denoiser("training")
    model.requires_grad_(True)
    if cfg.model.draft_head_size and model.draft_head is None:
        model = add_draft_head(model, cfg.model.draft_head_size, cfg.seed)
    return model


def add_draft_head(model: Backbone, size: int, seed: int) -> Backbone:
    """Returns the model with a new draft head. It changes no logits until it has learned something."""
    model.config = replace(model.config, draft_head_size=size)
    model.draft_head = DraftHead(model.config.hidden_size, size, model.config.rms_norm_eps)
    init_draft_head(model.draft_head, torch.Generator().manual_seed(seed))
    return model


def init_model(config: ModelConfig, seed: int) -> DiffusionGemma:
    """Initializes random weights under which every layer keeps the scale of its input.

    Post-norms start small: at one, the last layers would dominate the residual stream. Query and key norms start at K^-1/4,
    which gives the usual attention scale of 1/sqrt(K): at one, attention would start almost one-hot and change slowly.
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


def start_adapter(cfg: TrainConfig, model: Backbone) -> Adapter:
    """The adapter before the first step: a new one, or one that was trained before, whose weights become float32."""
    assert cfg.adapter is not None
    adapter = new_adapter(cfg.adapter, model.config, cfg.seed)
    if not cfg.start_adapter:
        return adapter
    earlier = checkpoint.load_adapter(cfg.start_adapter, model)
    shapes, earlier_shapes = (
        {(half, matrix): (pair.a.shape, pair.scale) for half, matrix, pair in each.pairs()} for each in (adapter, earlier)
    )
    different = sorted(place for place in shapes | earlier_shapes if shapes.get(place) != earlier_shapes.get(place))
    if different or adapter.is_tied != earlier.is_tied:
        where = f", see {different[0][1]}" if different else ""
        raise AdapterError(f"{cfg.start_adapter} has another rank, alpha, targets or halves than this run{where}")
    with torch.no_grad():
        for half, matrix, pair in earlier.pairs():
            new = adapter.pair(half, matrix)
            assert new is not None
            new.a.copy_(pair.a)
            new.b.copy_(pair.b)
    return adapter


def start_drafter(cfg: TrainConfig, model: Backbone) -> Drafter | PageAdapter:
    """The drafter or page adapter before the first step: a new one, or an earlier one, whose weights become float32."""
    if cfg.start_adapter:
        earlier = checkpoint.load_drafter(cfg.start_adapter, model)
        if earlier.cfg != (cfg.drafter or cfg.page):
            raise AdapterError(f"{cfg.start_adapter} has {earlier.cfg}, but this run trains {cfg.drafter or cfg.page}")
        return earlier.float().train().requires_grad_(True)
    embedding_D = model.embed_tokens.weight.float().mean(dim=0).cpu()
    if cfg.page is not None:
        return new_page_adapter(cfg.page, model.config, embedding_D, cfg.seed)
    assert cfg.drafter is not None
    return new_drafter(cfg.drafter, model.config, embedding_D, cfg.seed)


def choose_task(cfg: TrainConfig) -> type[SudokuTask] | type[TextTask]:
    """What a run trains on, and with which objective."""
    if isinstance(cfg.data, PuzzleConfig):
        return SudokuTask
    if cfg.drafter is not None:
        return DraftTask
    return PageTask if cfg.page is not None else TextTask


def shard_objective(objective: nn.Module, precision: str) -> None:
    """Shards the weights of every layer over the processes with FSDP2, which gathers a layer when it runs."""
    dtype = getattr(torch, precision) if precision != "float32" else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for layer in objective.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(objective, mp_policy=policy)


def compile_parts(objective: nn.Module) -> None:
    """Compiles the parts of the model, and the functions that the objective holds, one by one.

    One graph then serves all layers of a kind. One graph for everything would compile for minutes.
    """
    model = objective.model
    for part in (*model.layers, *(part for name, part in model.named_children() if name in ("self_conditioning", "norm"))):
        part.compile(dynamic=False)
    for name, function in list(vars(objective).items()):
        if isinstance(function, FunctionType):
            setattr(objective, name, torch.compile(function, dynamic=False))


def with_compute_dtype(objective: nn.Module, precision: str) -> Callable[..., Any]:
    """Returns the objective with its float32 weights cast for the computation; gradients arrive in float32."""
    weights = dict(objective.named_parameters())
    dtype = getattr(torch, precision)

    def run(*arguments: Any) -> Any:
        cast_weights = {name: p.to(dtype) for name, p in weights.items()}
        return torch.func.functional_call(objective, cast_weights, arguments)

    return run


# 2. The loop


class Trainer:
    """One run in one folder. It resumes from the folder's last checkpoint."""

    def __init__(self, cfg: TrainConfig, out: str | Path, device: torch.device | str = "cpu") -> None:
        self.cfg = cfg
        self.out = Path(out)
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.set_num_threads(1)  # the CPU's part is small, and more threads only wait for one another
        self.rank: int = dist.get_rank() if dist.is_initialized() else 0
        self.world: int = dist.get_world_size() if dist.is_initialized() else 1
        if cfg.microbatches % self.world:
            raise ValueError(f"{cfg.microbatches} microbatches cannot be shared by {self.world} processes: set a multiple")
        model: Backbone
        adapter: Adapter | None = None
        self.part: nn.Module | None = None  # what is trained beside a frozen model; None: the model itself
        if cfg.adapter is not None:
            model, self.tokenizer = load_base(cfg, self.device)
            self.part = adapter = start_adapter(cfg, model)
            self.part_export = PartExport(adapter, cfg, model)
        elif cfg.drafter is not None or cfg.page is not None:
            model, self.tokenizer = load_base(cfg, self.device)
            self.part = part = start_drafter(cfg, model)
            if isinstance(part, Drafter):
                model.drafter = part
            else:
                model.page = part
            self.part_export = PartExport(part, cfg, model)
        else:
            checkpoint.check_target(self.out / EXPORT, force=True)  # now, and not after days of training
            self.tokenizer = build_tokenizer(cfg, self.out)
            model = build_model(cfg)
        self.config = model.config
        self.task = choose_task(cfg)(cfg, self.config, self.tokenizer, self.device, self.microbatches)
        self.held_out: HeldOut | None = None
        if cfg.held_out and isinstance(self.task, TextTask):
            self.held_out = (DraftHeldOut if cfg.drafter else HeldOut)(cfg, self.task)
        self.objective = self.task.objective(model, adapter).to(self.device)
        self.buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}  # as they will be saved
        for layer in model.layers:  # a float32 scalar would promote all later activations to float32
            for scalar in layer.buffers(recurse=False):
                scalar.data = scalar.to(getattr(torch, cfg.precision))
        if self.world > 1:
            shard_objective(self.objective, cfg.precision)
        self.optimizer = Optimizer(self.part or self.objective.model, cfg.optim)
        # FSDP casts by its own policy. Adapters and drafters cast themselves: what is recomputed would not see cast weights.
        needs_cast = cfg.precision != "float32" and self.world == 1 and self.part is None
        self.compute = with_compute_dtype(self.objective, cfg.precision) if needs_cast else self.objective
        if cfg.compile:
            compile_parts(self.objective)
        self.step = 0
        self.best: dict[str, Any] | None = None  # the best evaluation so far
        self.earlier_seconds = 0.0
        self.start_time = time.perf_counter()
        self.rate_scale = 0.0
        self._resume()

    def _resume(self) -> None:
        folder = checkpoints.latest(self.out)
        if folder is None:
            return
        state = checkpoints.read_state(folder)
        if state["batch"] != self._batch:
            changed = [
                name for name in {**state["batch"], **self._batch} if state["batch"].get(name) != self._batch.get(name)
            ]
            then, now = (
                ", ".join(f"{name} {batch[name]}" if name in batch else f"no {name}" for name in changed)
                for batch in (state["batch"], self._batch)
            )
            raise ValueError(f"{folder} was made with {then}, this run has {now}: give another folder")
        checkpoints.load(folder, self._tensors())
        self.step = state["step"]
        self.best = state["best"]
        self.earlier_seconds = state["seconds"]
        self.task.positions = state["positions"]

    def _tensors(self) -> dict[str, Tensor]:
        return self.optimizer.state() | self.task.tensors()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, earlier calls included."""
        return self.earlier_seconds + time.perf_counter() - self.start_time

    @property
    def remaining(self) -> float:
        """The share of the run that is left, by steps or by the clock; the same in all processes."""
        by_steps = 1 - self.step / self.cfg.steps
        if not self.cfg.by_clock:
            return by_steps
        by_time = 1 - self.seconds / self.cfg.max_seconds
        return -self._max_over_processes(-min(by_steps, by_time))

    @property
    def _batch(self) -> dict[str, Any]:
        """The settings that positions in the data, and the tensors of an adapter, depend on."""
        batch = {name: getattr(self.cfg, name) for name in ("rows", "microbatches", "streams")}
        if self.cfg.adapter is not None:
            batch |= {name: getattr(self.cfg.adapter, name) for name in ("rank", "targets", "layers", "halves")}
        if self.cfg.drafter is not None:
            batch |= {name: getattr(self.cfg.drafter, name) for name in ("rank", "head_size", "canvas_length")}
            batch |= {"init": self.cfg.init}
        if self.cfg.page is not None:
            batch |= {"rank": self.cfg.page.rank, "page": self.cfg.page.canvas_lengths, "init": self.cfg.init}
        if self.cfg.start_adapter and self.cfg.adapter is None:
            batch |= {"start_adapter": self.cfg.start_adapter}
        return json.loads(json.dumps(batch))

    @property
    def microbatches(self) -> range:
        """The indices of this process's microbatches."""
        return range(self.rank, self.cfg.microbatches, self.world)

    def run(self) -> Iterator[Event]:
        """Trains to the end, to the time limit, or until a signal; writes a checkpoint in every case."""
        self.task.open()
        self.start_time = time.perf_counter()
        try:
            with _catch_stop_signals() as stop:
                yield from self._run_steps(stop)
        finally:
            self.task.close()

    def _run_steps(self, stop: "StopFlag") -> Iterator[Event]:
        cfg = self.cfg
        meter = Meter(self)
        saved_step = self.step
        while self.step < cfg.steps and not (cfg.by_clock and self.remaining <= 0):
            meter.add(*self.train_step())
            seconds = self.seconds if cfg.by_clock else self.seconds - self.earlier_seconds
            must_stop = self._max_over_processes(float(stop.is_set or seconds > cfg.max_seconds)) > 0
            if self.step % cfg.report_every == 0 or self.step == cfg.steps or must_stop:
                yield meter.report()
            if self.held_out and (self.step % cfg.evaluate_every == 0 or self.step == cfg.steps):
                yield self._evaluate()
            if must_stop:
                break
            if self.step % cfg.save_every == 0 and self.step < cfg.steps:
                yield self._save()
                saved_step = self.step
        if saved_step != self.step:
            yield self._save()
        is_done = self.step >= cfg.steps or (cfg.by_clock and not stop.is_set)
        why = "done" if is_done else "stopped" if stop.is_set else "out of time"
        yield Ended(self.step, self.export(), why)

    def train_step(self) -> tuple[list[Losses], Tensor]:
        """Computes the gradients of this process's microbatches and updates the weights.

        Returns losses and gradient norm.
        """
        step_losses = []
        for m in self.microbatches:
            seed = random.Random(f"{self.cfg.seed} {self.step} {m}").getrandbits(62)
            if self.part is not None:
                torch.manual_seed(seed)  # for dropout, which has no generator of its own
            losses = self.task.losses(self.compute, m, torch.Generator().manual_seed(seed))
            if self.part is not None:
                self._require_finite(losses.total)
            # FSDP averages over processes; the division averages over this process's microbatches.
            (losses.total / len(self.microbatches)).backward()
            step_losses.append(Losses(*(t.detach() for t in losses)))
        self.rate_scale = learning_rate_scale(self.step, self.remaining, self.cfg.optim)
        norm = self.optimizer.step(self.step, self.rate_scale)
        self.step += 1
        return step_losses, norm

    def _require_finite(self, loss: Tensor) -> None:
        """Stops at a loss that is not finite, before it reaches the weights: fine-tuning has few steps to lose."""
        if self._max_over_processes(float(not loss.isfinite())) > 0:
            names = [where for of_microbatch in getattr(self.task, "records", {}).values() for where in of_microbatch]
            records = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
            raise LostLossError(
                f"the loss is {float(loss.detach())} at step {self.step + 1}, in the rows of {records}; "
                "the last checkpoint is kept: lower the learning rate, or look at these records, and start again"
            )

    def _evaluate(self) -> Evaluated:
        """Scores the averaged weights on the held-out records; writes the trained part if it is the best so far."""
        assert self.held_out is not None
        with self.optimizer.averaged_weights():
            self.objective.eval()
            scores = self.held_out.evaluate(self.compute)
            self.objective.train()
        score = self._max_over_processes(self.held_out.weigh(scores))  # the same in all processes, to the last bit
        is_best = self.best is None or score < self.best["score"]
        if is_best:
            self.best = {"score": score, "step": self.step, **scores}
            if self.part is not None:
                self._export_part(self.out, {"step": self.step, **scores})
        return Evaluated(self.step, scores, is_best)

    def _max_over_processes(self, number: float) -> float:
        """Returns the largest of all processes' numbers, so that all of them decide alike."""
        if self.world == 1:
            return number
        largest = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def _save(self) -> Saved:
        positions = self.task.positions
        if self.world > 1:
            gathered: list[Any] = [None] * self.world
            dist.all_gather_object(gathered, positions)
            positions = {m: position for part in gathered for m, position in part.items()}
        state = {"step": self.step, "seconds": self.seconds, "positions": positions, "batch": self._batch, "best": self.best}
        return Saved(self.step, checkpoints.save(self.out, self.step, self._tensors(), state, self.cfg.keep))

    def export(self) -> Path:
        """Writes what the run has learned. Returns the folder to load: the model, or the best adapter or drafter."""
        if self.part is not None:
            if self.best is None:
                self._export_part(self.out, None)
            else:
                self._export_part(self.out / LAST, None)
            return self.out
        folder = self.out / EXPORT
        weights = self._gather_average() | self.buffers
        if checkpoints.is_main_process():
            export_model(self.config, weights, folder, self.tokenizer, self.cfg)
        checkpoints.barrier()
        return folder

    def _export_part(self, folder: Path, scores: dict[str, Any] | None) -> None:
        weights = self._gather_average()
        if checkpoints.is_main_process():
            self.part_export.write(weights, folder, self.step, scores)
        checkpoints.barrier()

    def _gather_average(self) -> dict[str, Tensor]:
        """The averaged weights, whole in every process."""
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in self.optimizer.average.items()}


@dataclass
class StopFlag:
    """Whether a signal asked the run to stop."""

    is_set: bool = False


@contextmanager
def _catch_stop_signals() -> Iterator[StopFlag]:
    """Turns the first Ctrl-C or SIGTERM into a flag, so that a checkpoint is written; a second one acts at once."""
    flag = StopFlag()
    old_handlers: dict[int, Any] = {}

    def set_flag(number: int, frame: Any) -> None:
        flag.is_set = True
        signal.signal(number, old_handlers[number])

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            old_handlers[number] = signal.signal(number, set_flag)
    except ValueError:
        pass  # signals can be caught in the main thread only; a caller in another thread closes the generator instead
    try:
        yield flag
    finally:
        for caught, handler in old_handlers.items():
            signal.signal(caught, handler)
