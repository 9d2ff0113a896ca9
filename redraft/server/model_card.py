"""ModelCard: what lists of models say about a model, whether it is loaded or not."""

from dataclasses import dataclass
from typing import Any, Self

import torch

from redraft import checkpoint
from redraft.config import BackboneConfig, LlamaConfig
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

GEMMA_FAMILY = "diffusion_gemma"


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """Size and abilities of a model."""

    family: str  # the architecture, as Ollama names it
    context_length: int
    parameters: int
    nbytes: int  # of the weights: in memory, or in the files while the model was never loaded
    precision: str  # a quantization or a dtype; "unknown" while the model was never loaded
    can_chat: bool
    can_call: bool  # tools
    can_think: bool
    can_infill: bool

    @classmethod
    def from_writer(cls, writer: Writer) -> Self:
        """The card of a loaded model."""
        model = writer.model
        return cls(
            parameters=parameter_count(model),
            nbytes=weight_bytes(model),
            precision=model.config.quant or str(model.dtype).removeprefix("torch."),
            **_abilities(model.config, writer.tokenizer),
        )

    @classmethod
    def from_checkpoint(cls, path_or_id: str) -> Self:
        """The card of a checkpoint, read without its weights. A checkpoint that does not exist is refused here."""
        path = checkpoint.find(path_or_id, weights=False)
        config, _ = checkpoint.read_configs(path)
        is_gguf = checkpoint.is_gguf(path)
        tokenizer = checkpoint.open_gguf(path).tokenizer() if is_gguf else Tokenizer.from_folder(path)
        files = [path] if is_gguf else path.glob("*.safetensors")
        return cls(
            parameters=config.parameter_counts()["total"],
            nbytes=sum(file.stat().st_size for file in files),
            precision=config.quant or "unknown",
            **_abilities(config, tokenizer),
        )


def _abilities(config: BackboneConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """What can be told without the weights."""
    return {
        "family": config.family if isinstance(config, LlamaConfig) else GEMMA_FAMILY,
        "context_length": config.max_position_embeddings,
        "can_chat": tokenizer.can_chat,
        "can_call": tokenizer.can_call,
        "can_think": tokenizer.can_think,
        "can_infill": not config.is_causal_only,
    }


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
