"""The tensors of a GGUF file under the names of the published layout. All of them are checked when the file is opened.

A weight is a Tensor if the file has it as one tensor in full precision; otherwise it is a StoredWeight. All of them are
views of the mapped file until they are used.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from redraft.checkpoint.gguf.header import GgufFile
from redraft.checkpoint.gguf.values import ROPE_FREQUENCIES
from redraft.checkpoint.gguf.weights import GgufWeight, PaddedWeight, StackedWeight
from redraft.checkpoint.names import CheckpointError, published_name
from redraft.config import ModelConfig, show_value
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant.stored import StoredWeight

# Names of the file -> our names. Both lack ".weight" here.
MODEL_NAMES = {
    "token_embd": "embed_tokens.weight",
    "output_norm": "norm.weight",
    "self_cond_pre_norm": "self_conditioning.pre_norm.weight",
    "self_cond_norm": "self_conditioning.pre_norm.weight",
    "self_cond_gate": "self_conditioning.gate_proj.weight",
    "self_cond_up": "self_conditioning.up_proj.weight",
    "self_cond_down": "self_conditioning.down_proj.weight",
}
GATE_UP = "experts.gate_up_proj"
DOWN = "experts.down_proj"
PER_EXPERT_SCALE = "router.per_expert_scale"
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
    "post_ffw_norm": "post_feedforward_layernorm.weight",
    "post_ffw_norm_1": "post_feedforward_layernorm_1.weight",
    "post_ffw_norm_2": "post_feedforward_layernorm_2.weight",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2.weight",
    "ffn_gate_inp": "router.proj.weight",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": GATE_UP,
    "ffn_gate_exps": GATE_UP + ".gate",
    "ffn_up_exps": GATE_UP + ".up",
    "ffn_down_exps": DOWN,
    "ffn_down_exps.scale": PER_EXPERT_SCALE,
    "layer_output_scale": "layer_scalar",
    "enc_layer_output_scale": "encoder_layer_scalar",
}
LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,8})\.(.+)", re.ASCII)
# What a file may fill up with zeros to whole blocks: the rows of these weights, which may have two parts, or the inputs.
PADDED_ROWS = {"gate_proj.weight": 1, "up_proj.weight": 1, GATE_UP: 2}
PADDED_INPUTS = ("down_proj.weight", DOWN)
MOST_PADDING = 256  # the largest block

StoredTensor: TypeAlias = Tensor | StoredWeight


class GgufTensors(Mapping[str, StoredTensor]):
    """The tensors of a file by published name. StoredWeights are converted on the device.

    The scale that an NVFP4 weight has beside it becomes its global scale. For `ffn_down_exps` it has the router's scale of
    each expert folded in, so the router's is 1 then.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.file = file
        self.config = config
        self.device = torch.device(device)
        self._names: dict[str, str] = {}  # our name -> the file's
        self._scales: dict[str, str] = {}  # the file's name of an NVFP4 weight -> that of its scale
        self._find_names()
        self._check_layers()
        with torch.device("meta"):
            shapes = {name: tuple(tensor.shape) for name, tensor in DiffusionGemma(config).state_dict().items()}
        self._shapes = {published_name(name): shape for name, shape in shapes.items()}
        self._ours = {published_name(name): name for name in shapes}
        self._refuse_misplaced(set(shapes))
        for name in self:
            self._check(name)

    def __getitem__(self, name: str) -> StoredTensor:
        ours = self._ours[name]
        if ours.endswith(PER_EXPERT_SCALE) and self._is_folded(ours):
            return torch.ones(self._shapes[name])
        if ours not in self._names:
            return StackedWeight(*(self._weight(self._names[f"{ours}.{part}"]) for part in ("gate", "up")))
        weight = self._weight(self._names[ours])
        if weight.shape != self._shapes[name]:
            parts = next((parts for end, parts in PADDED_ROWS.items() if ours.endswith(end)), 1)
            return PaddedWeight(weight, weight.name, self._shapes[name], parts)
        return weight if weight.type.dtype is None else self._plain(weight, weight.type.dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def _weight(self, name: str) -> GgufWeight:
        info = self.file.tensors[name]
        scale = None
        if name in self._scales:
            shape = info.shape[:-2]
            scale = self._plain(self._weight(self._scales[name]), torch.float32).view(shape)
        return GgufWeight(name, info.type, self.file.rows(name), self.device, scale)

    def _plain(self, weight: GgufWeight, dtype: torch.dtype) -> Tensor:
        """A tensor in full precision. Vectors, such as norms and scales, must be finite: one of them would spoil all."""
        tensor = weight.rows.view(dtype)
        if tensor.dim() == 1 and not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{self.file.path}: tensor {weight.name} has a number that is not finite")
        return tensor

    # Checks

    def _find_names(self) -> None:
        """Finds the place of every tensor in the model. Refuses tensors that have none, and places with two tensors."""
        for name, info in self.file.tensors.items():
            stem = name.removesuffix(".weight")
            match = LAYER_NAME.fullmatch(stem)
            known = LAYER_NAMES.get(match[2]) if match else MODEL_NAMES.get(stem)
            owner = self.file.tensors.get(f"{name.removesuffix('.scale')}.weight")
            if name == ROPE_FREQUENCIES or name.endswith(".input_scale"):  # the latter is for activations in 4 bits
                continue
            if name.endswith(".scale") and owner and owner.type.name == "NVFP4" and known != "router.scale":
                self._scales[owner.name] = name
                self._check_scale(name, owner.shape[:-2])
                continue
            if known is None:
                raise CheckpointError(f"{self.file.path} has a tensor that this model does not have: {show_value(name)}")
            ours = f"layers.{match[1]}.{known}" if match else known
            if ours in self._names:
                raise CheckpointError(
                    f"{self.file.path} has the same tensor twice, as {self._names[ours]} and as {show_value(info.name)}"
                )
            self._names[ours] = name
        self._repeat_scalars()

    def _repeat_scalars(self) -> None:
        """Gives `encode` the scalars of `denoise` where a file has no others; released ones are equal."""
        for ours, name in list(self._names.items()):
            if ours.endswith(".layer_scalar"):
                self._names.setdefault(ours.replace(".layer_scalar", ".encoder_layer_scalar"), name)

    def _refuse_misplaced(self, expected: set[str]) -> None:
        """Refuses tensors that only other layers have, such as the values of a full layer."""
        for ours, name in self._names.items():
            if ours.removesuffix(".gate").removesuffix(".up") not in expected:
                raise CheckpointError(f"{self.file.path} has a tensor that this model does not have: {show_value(name)}")

    def _check_layers(self) -> None:
        """Compares the number of layers before a model is built: one of 9,999 layers would take a minute."""
        numbers = [int(match[1]) for name in self._names if (match := re.match(r"layers\.(\d+)\.", name))]
        stored = max(numbers, default=-1) + 1
        if stored != self.config.num_hidden_layers:
            raise CheckpointError(
                f"{self.file.path}: the metadata describes {self.config.num_hidden_layers} layers, the tensors are of "
                f"{stored}"
            )

    def _check_scale(self, name: str, stack: tuple[int, ...]) -> None:
        """The scale of an NVFP4 weight is one number, or one for each matrix of a stack."""
        info = self.file.tensors[name]
        if info.type.name != "F32" or info.shape != (stack or (1,)):
            raise CheckpointError(
                f"{self.file.path}: tensor {show_value(name)} must be F32 of the shape {list(stack or (1,))}, and is "
                f"{info.type.name} {list(info.shape)}"
            )

    def _check(self, name: str) -> None:
        """Compares the shape and the format of a tensor with the model's. Reads no numbers."""
        ours = self._ours[name]
        shape = self._shapes[name]
        if ours.endswith(PER_EXPERT_SCALE) and self._is_folded(ours):
            return
        parts = [ours]
        if ours.endswith(GATE_UP) and ours not in self._names:
            parts = [f"{ours}.gate", f"{ours}.up"]
            shape = (shape[0], shape[1] // 2, shape[2])
        elif f"{ours}.gate" in self._names or f"{ours}.up" in self._names:
            raise CheckpointError(f"{self.file.path} has the gate and up experts of {ours} twice: in one tensor and apart")
        for part in parts:
            if part not in self._names:
                raise CheckpointError(f"{self.file.path} has no tensor for {part}")
            info = self.file.tensors[self._names[part]]
            if info.shape != shape and not (parts == [ours] and self._is_padded(ours, info.shape, shape)):
                raise CheckpointError(
                    f"{self.file.path}: tensor {info.name} has the shape {list(info.shape)}, the metadata describes "
                    f"{list(shape)}"
                )
            if len(shape) == 1 and info.type.dtype is None:
                raise CheckpointError(
                    f"{self.file.path}: tensor {info.name} is a vector and has the format {info.type.name}"
                )

    def _is_folded(self, per_expert_scale: str) -> bool:
        """Whether the down weights of a layer have the router's scale of each expert folded into their own."""
        down = self._names.get(per_expert_scale.replace(PER_EXPERT_SCALE, DOWN), "")
        return down in self._scales and per_expert_scale not in self._names

    def _is_padded(self, ours: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether a tensor has the model's shape but for some rows, or some inputs, where a file may add zeros."""
        if ours.endswith(PADDED_INPUTS):
            return stored[:-1] == shape[:-1] and 0 < stored[-1] - shape[-1] < MOST_PADDING
        parts = next((parts for end, parts in PADDED_ROWS.items() if ours.endswith(end)), 0)
        if not parts or len(stored) != len(shape) or (*stored[:-2], stored[-1]) != (*shape[:-2], shape[-1]):
            return False
        padding, rest = divmod(stored[-2] - shape[-2], parts)
        return not rest and 0 < padding < MOST_PADDING
