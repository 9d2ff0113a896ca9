"""ModelCard: what lists of models say about a model, whether it is loaded or not."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from redraft import checkpoint
from redraft.checkpoint.vision_check import find_image_config
from redraft.config import FAMILIES, BackboneConfig, LlamaConfig
from redraft.config.vision import ImageConfig
from redraft.model.drafter import DrafterConfig
from redraft.model.page import PageConfig
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

DIFFUSION_FAMILY = "diffusion_gemma"
CAUSAL_FAMILY = "gemma4"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Size and abilities of a model."""

    family: str  # the architecture, as Ollama names it
    context_length: int
    parameters: int
    nbytes: int  # of the weights: in memory, or in the files while the model was never loaded
    precision: str  # a quantization or a dtype; "unknown" while the model was never loaded
    can_chat: bool
    can_think: bool
    is_diffusion: bool  # it denoises canvases, if only to infill and edit; else it is causal-only and does neither
    drafter: DrafterConfig | None  # lets a causal-only model draft for itself
    images: ImageConfig | str  # how its pictures become patches; a few words about what the model is if it takes none

    @classmethod
    def from_writer(cls, writer: Writer) -> Self:
        """The card of a loaded model."""
        model = writer.model
        return cls(
            parameters=parameter_count(model),
            nbytes=weight_bytes(model),
            precision=model.config.quant or str(model.dtype).removeprefix("torch."),
            drafter=model.drafter.cfg if model.drafter is not None else None,
            is_diffusion=model.has_denoiser,
            images=image_config_of(writer.images.path_or_id, writer.tokenizer),
            **_abilities(model.config, writer.tokenizer),
        )

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> Self:
        """The card of a checkpoint on this machine, of which headers are read. One that is not complete is refused here."""
        base, given = checkpoint.find_base(path)
        opened = checkpoint.open_checkpoint(base)
        folders = checkpoint.find_drafters(opened.config, opened.tensors, given)
        parts = [checkpoint.read_drafter_config(folder)[0] for folder in folders]
        files = [base] if checkpoint.is_gguf(base) else base.glob("*.safetensors")
        return cls(
            parameters=opened.config.parameter_counts()["total"],
            nbytes=sum(file.stat().st_size for file in files),
            precision=opened.config.quant or "unknown",
            drafter=next((cfg for cfg in parts if isinstance(cfg, DrafterConfig)), None),
            is_diffusion=not opened.config.is_causal_only or any(isinstance(cfg, PageConfig) for cfg in parts),
            images=image_config_of(base, opened.tokenizer),
            **_abilities(opened.config, opened.tokenizer),
        )

    @property
    def loaded_bytes(self) -> int:
        """What the weights take in memory, about. A Llama is dequantized when it is loaded."""
        return max(self.nbytes, 2 * self.parameters) if self.family in FAMILIES else self.nbytes

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        return not isinstance(self.images, str)

    @property
    def drafter_fields(self) -> dict[str, Any]:
        """The drafter as lists of models show it; nothing where there is none."""
        return {} if self.drafter is None else {"drafter": {"longest_draft": self.drafter.canvas_length - 1}}


def _abilities(config: BackboneConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What can be told without the weights."""
    family = CAUSAL_FAMILY if config.is_causal_only else DIFFUSION_FAMILY
    if isinstance(config, LlamaConfig):
        family = config.family
    return {
        "family": family,
        "context_length": config.max_position_embeddings,
        "can_chat": tokenizer.can_chat,
        "can_think": tokenizer.can_think,
    }


def image_config_of(path_or_id: str | Path | None, tokenizer: Tokenizer) -> ImageConfig | str:
    """How a model's pictures become patches; a few words about what the model is if it takes none."""
    if importlib.util.find_spec("PIL") is None:
        return "on a server without Pillow"
    config = find_image_config(path_or_id)
    if not isinstance(config, str) and (tokenizer.image_ids is None or not tokenizer.can_chat):
        return "one whose vocabulary has no image tokens" if tokenizer.can_chat else "one without a chat template"
    return config


def parameter_count(model: torch.nn.Module) -> int:
    """Counts parameters, weights in fp8 included: those are buffers, because they are not trained."""
    packed = (buffer for buffer in model.buffers() if _is_packed_weight(buffer))
    return sum(tensor.numel() for tensor in (*model.parameters(), *packed))


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of parameters, and of weights in fp8 with their scales."""
    tensors = [*model.parameters()]
    for module in model.modules():
        own_buffers = list(module.buffers(recurse=False))
        if any(_is_packed_weight(buffer) for buffer in own_buffers):
            tensors += own_buffers
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_packed_weight(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() and buffer.element_size() == 1
