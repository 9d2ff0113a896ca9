"""The tensors of a GGUF file of Llama, Qwen2 or Qwen3 under the published names.

Files of "llama" have the rows of queries and keys in another order: llama.cpp rotates neighbouring elements of a head where
transformers rotates the two halves, so its converter interleaves the halves of every head. Here they are put back.
Blocks lie along the inputs of a row, so rows can change places without touching a number.
"""

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from redraft.checkpoint.gguf.header import GgufFile, TensorInfo
from redraft.checkpoint.gguf.llama_settings import HEAD
from redraft.checkpoint.gguf.tensors import LAYER_NAME, StoredTensor
from redraft.checkpoint.gguf.values import ROPE_FREQUENCIES
from redraft.checkpoint.gguf.weights import GgufWeight
from redraft.checkpoint.names import LLAMA, CheckpointError, published_name
from redraft.config import LlamaConfig, show_value
from redraft.model.llama import Llama

MODEL_NAMES = {"token_embd.weight": "embed_tokens.weight", "output_norm.weight": "norm.weight", HEAD: "lm_head.weight"}
LAYER_MODULES = {  # of the file -> ours; each has a weight, and some have a bias
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
INTERLEAVED = (".q_proj.weight", ".k_proj.weight")


class LlamaTensors(Mapping[str, StoredTensor]):
    """The tensors of a file by published name, all checked when the file is opened. StoredWeights convert on the device."""

    def __init__(self, file: GgufFile, config: LlamaConfig, device: torch.device | str = "cpu") -> None:
        self.file = file
        self.config = config
        self.device = torch.device(device)
        names = {self._our_name(name): name for name in file.tensors if name != ROPE_FREQUENCIES}
        self._check_layers(names)
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in Llama(config).state_dict().items()}
        for ours, name in names.items():
            if ours not in shapes:
                raise CheckpointError(f"{file.path} has a tensor that this model does not have: {show_value(name)}")
        for ours, shape in shapes.items():
            if ours not in names:
                raise CheckpointError(f"{file.path} has no tensor for {ours}")
            self._check(file.tensors[names[ours]], shape)
        self._names = {published_name(ours, LLAMA): name for ours, name in names.items()}

    def __getitem__(self, name: str) -> StoredTensor:
        info = self.file.tensors[self._names[name]]
        rows = self.file.rows(info.name)
        if name.endswith(INTERLEAVED) and self.config.family == "llama":
            rows = _join_halves(rows, self.config.head_dim)
        if info.type.dtype is None:
            return GgufWeight(info.name, info.type, rows, self.device)
        tensor = rows.view(info.type.dtype)
        if tensor.dim() == 1 and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self.file.path}: tensor {info.name} has a number that is not finite")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _our_name(self, name: str) -> str:
        if name in MODEL_NAMES:
            return MODEL_NAMES[name]
        module, _, kind = name.rpartition(".")
        match = LAYER_NAME.fullmatch(module)
        if match is None or match[2] not in LAYER_MODULES or kind not in ("weight", "bias"):
            raise CheckpointError(f"{self.file.path} has a tensor that this model does not have: {show_value(name)}")
        return f"layers.{match[1]}.{LAYER_MODULES[match[2]]}.{kind}"

    def _check_layers(self, names: Mapping[str, str]) -> None:
        """Compares the number of layers before a model is built: one of 9,999 layers would take a minute."""
        numbers = [int(match[1]) for name in names if (match := re.match(r"layers\.(\d+)\.", name))]
        stored = max(numbers, default=-1) + 1
        if stored != self.config.num_hidden_layers:
            raise CheckpointError(
                f"{self.file.path}: the metadata describes {self.config.num_hidden_layers} layers, the tensors are of "
                f"{stored}"
            )

    def _check(self, info: TensorInfo, shape: tuple[int, ...]) -> None:
        """Compares the shape and the format of a tensor with the model's. Reads no numbers."""
        if info.shape != shape:
            raise CheckpointError(
                f"{self.file.path}: tensor {info.name} has the shape {list(info.shape)}, the metadata describes "
                f"{list(shape)}"
            )
        if len(shape) == 1 and info.type.dtype is None:
            raise CheckpointError(f"{self.file.path}: tensor {info.name} is a vector and has the format {info.type.name}")


def _join_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of queries or keys with the halves of every head one after the other: 0 2 4 ... 1 3 5 ... of each head."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
