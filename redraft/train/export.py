"""What a run leaves behind: a model in the published layout, an adapter in peft's, a drafter, or a page adapter."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft import checkpoint
from redraft.checkpoint.parts import open_checkpoint
from redraft.config import BackboneConfig
from redraft.model.architectures import build_model
from redraft.model.backbone import Backbone
from redraft.model.drafter import Drafter
from redraft.model.lora import Adapter
from redraft.model.page import PageAdapter
from redraft.model.quant import QuantPolicy
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.config import TrainConfig
from redraft.train.records import DataConfig

LAST = "last"  # the folder of the last adapter, in the run's folder, which holds the best one


def export_model(
    config: BackboneConfig, weights: Mapping[str, Tensor], folder: Path, tokenizer: Tokenizer, cfg: TrainConfig
) -> None:
    """Writes a model in the published layout, bf16, with tokenizer and sampler settings.

    An earlier export of the run is replaced as a whole.
    """
    model = build_model(config)
    model.load_state_dict(dict(weights))
    model.to(torch.bfloat16)
    checkpoint.save(model, folder, tokenizer=tokenizer, sampler=cfg.sampler, force=True)


def load_base(cfg: TrainConfig, device: torch.device) -> tuple[Backbone, Tokenizer]:
    """The model that an adapter or a drafter is trained for, in the precision of the run; packed weights stay packed."""
    opened = open_checkpoint(checkpoint.find(cfg.init), device)
    model = checkpoint.from_state_dict(
        opened.config,
        opened.tensors,
        dtype=getattr(torch, cfg.precision),
        device=device,
        policy=QuantPolicy.for_device(device, quant=cfg.quant),
    )
    if cfg.adapter is not None:
        model.require_denoiser("training an adapter")
    return model, opened.tokenizer


class PartExport:
    """Writes the adapter or drafter of a run: the best one to the run's folder, the last one to a folder in it."""

    def __init__(self, part: Adapter | Drafter | PageAdapter, cfg: TrainConfig, model: Backbone) -> None:
        self.part = copy.deepcopy(part)  # the run's own may be sharded
        self.cfg = cfg
        self.fingerprint = checkpoint.fingerprint(model)

    def write(self, weights: Mapping[str, Tensor], folder: Path, step: int, scores: dict[str, Any] | None) -> None:
        """Writes the part with these weights, which are those of its parameters by name."""
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise ValueError(f"there are weights that are not finite at step {step}; the last good ones stay")
        self.part.load_state_dict(dict(weights))
        described = self._describe(step, scores)
        if not isinstance(self.part, Adapter):
            options = {"base": self.cfg.init, "fingerprint": self.fingerprint}
            checkpoint.save_drafter(self.part, folder, **options, metadata=described)
        else:
            described = {"fingerprint": self.fingerprint, **described}
            checkpoint.save_adapter(self.part, folder, base=self.cfg.init, metadata=described)

    def _describe(self, step: int, scores: dict[str, Any] | None) -> dict[str, Any]:
        assert isinstance(self.cfg.data, DataConfig)
        described = {
            "data": [Path(file).name for source in self.cfg.data.sources for file in source.files],
            "steps": step,
            "tokens": step * self.cfg.step_tokens,
            "seed": self.cfg.seed,
        }
        if self.cfg.start_adapter:
            described["from"] = Path(self.cfg.start_adapter).name
        return described | ({"scores": {"held_out": scores}} if scores else {})
