"""TrainConfig: the frozen record that describes one training run."""

import json
import math
from dataclasses import asdict, dataclass, field

from redraft.config import BackboneConfig, SamplerConfig
from redraft.model.drafter import DrafterConfig
from redraft.model.lora import AdapterConfig
from redraft.model.page import PageConfig
from redraft.train.loss import LossConfig
from redraft.train.optim import OptimConfig
from redraft.train.records import DataConfig
from redraft.train.sudoku_data import PuzzleConfig


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. `recipes/` has functions that return one."""

    model: BackboneConfig
    data: DataConfig | PuzzleConfig
    held_out: DataConfig | None = None  # records on which the run is evaluated; never learned
    draft_data: DataConfig | None = None  # texts of the draft rows, the last `loss.draft.rows` of a microbatch
    sampler: SamplerConfig  # saved with the model
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    tokenizer: str = "bpe"  # "bpe": trained on the data; "bytes"; or a folder that holds one
    init: str = ""  # checkpoint with the initial weights and tokenizer; empty: random weights
    adapter: AdapterConfig | None = None  # train this adapter for `init`, whose weights stay as they are
    start_adapter: str = ""  # folder of an adapter or drafter of the same shape to start with; empty: a new one
    drafter: DrafterConfig | None = None  # train this drafter for `init`, which then drafts for itself
    page: PageConfig | None = None  # train this page adapter for `init`, which then denoises canvases
    quant: str | None = None  # pack the weights of `init` like this; for adapters and drafters
    steps: int = 1000
    rows: int = 16  # of a microbatch
    microbatches: int = 1  # of a step, over all processes
    seed: int = 0
    precision: str = "float32"  # of the computation; weights are always float32. "bfloat16" on GPUs
    recompute: bool = False  # gradient checkpointing: less memory, a third more work
    compile: bool = False
    prefetch: bool = False  # make batches in separate processes
    streams: int = 1  # of rows, for each microbatch; one process each with prefetch
    report_every: int = 10
    save_every: int = 500
    evaluate_every: int = 100  # on the held-out records
    keep: int = 2  # checkpoints on disk
    max_seconds: float = math.inf  # stop with a checkpoint when this call has run as long
    by_clock: bool = False  # the learning rate cools down by time: the run, over all its calls, ends after max_seconds

    def __post_init__(self) -> None:
        if self.streams < 1 or self.rows % self.streams:
            raise ValueError(f"{self.rows} rows cannot be taken from {self.streams} streams in turn")
        if self.drafter is None:
            self._check_drafts()
        parts = [part for part in (self.adapter, self.drafter, self.page) if part is not None]
        if parts and not self.init:
            raise ValueError("an adapter or a drafter needs a model: set init")
        if self.start_adapter and not parts:
            raise ValueError(
                f"start_adapter is {self.start_adapter!r}, but no adapter is trained: set adapter, drafter or page"
            )
        if len(parts) > 1:
            raise ValueError("train an adapter, a drafter or a page adapter, not two at once")
        for name in ("steps", "rows", "microbatches", "report_every", "save_every", "evaluate_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}")
        if self.by_clock and math.isinf(self.max_seconds):
            raise ValueError("by_clock needs max_seconds")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision is float32 or bfloat16, got {self.precision!r}")

    def _check_drafts(self) -> None:
        """Refuses draft rows without texts, or that do not fit into a microbatch."""
        rows = self.loss.draft.rows
        if bool(rows) != (self.draft_data is not None):
            raise ValueError(f"draft rows need draft_data and draft_data needs draft rows; loss.draft.rows is {rows}")
        if not rows or self.draft_data is None:
            return
        if rows >= self.rows or rows % self.streams:
            raise ValueError(f"{rows} draft rows must be fewer than {self.rows} and a multiple of {self.streams} streams")
        if self.draft_data.length != self.data.length:
            raise ValueError(f"rows have {self.data.length} tokens, draft rows {self.draft_data.length}: give one length")
        if self.loss.draft.token >= self.model.vocab_size:
            raise ValueError(f"loss.draft.token is {self.loss.draft.token}, the vocabulary has {self.model.vocab_size}")

    @property
    def step_tokens(self) -> int:
        """Clean tokens of one step, padding included."""
        return self.rows * self.microbatches * self.data.length

    def to_json(self) -> str:
        """Returns the whole configuration as JSON, for the run's folder."""
        return json.dumps(asdict(self), indent=2, default=str) + "\n"
