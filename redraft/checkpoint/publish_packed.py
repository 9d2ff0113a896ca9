"""Packed weights in the layout of compressed-tensors, and the `quantization_config` that describes them.

Experts are written apart, as vLLM and transformers expect. The global scale of NVFP4 is written as its reciprocal.
Shapes: E matrices of a stack, O rows, I inputs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.checkpoint.compressed import EXPERT_PARTS
from redraft.checkpoint.names import CheckpointError
from redraft.checkpoint.quantization import COMPRESSED_TENSORS, FLOAT_QUANTIZED, INT4_PACKED, MIXED, NVFP4_PACKED
from redraft.config import ModelConfig
from redraft.kernels import int4, nvfp4
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor
from redraft.kernels.nibbles import pack_pairs, unpack_e2m1, unpack_nibbles
from redraft.kernels.nvfp4 import Nvfp4Tensor
from redraft.kernels.packed import PackedTensor
from redraft.model.quant.quantizers import FP8_SCALE_DTYPE

FILE_FORMATS = {"fp8": FLOAT_QUANTIZED, "nvfp4": NVFP4_PACKED, "int4": INT4_PACKED}
FP8_ARGUMENTS = {"num_bits": 8, "type": "float", "symmetric": True}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {
        "weights": {**FP8_ARGUMENTS, "strategy": "channel", "dynamic": False},
        "input_activations": {**FP8_ARGUMENTS, "strategy": "token", "dynamic": True},
    },
    "nvfp4": {
        "weights": {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": nvfp4.GROUP,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        },
        "input_activations": None,
    },
    "int4": {
        "weights": {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": int4.GROUP,
            "dynamic": False,
        },
        "input_activations": None,
    },
}


class TensorHeader(NamedTuple):
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


# 1. Tensors


def publish_packed(
    name: str, packed: PackedTensor, inputs: int, first_expert: int = 0, scale_dtype: torch.dtype = FP8_SCALE_DTYPE
) -> Iterator[tuple[str, Tensor]]:
    """Yields the published tensors of a packed weight, or of some experts of a stack, by the name of the weight.

    `scale_dtype` is that of the scales of fp8; those of other formats have one dtype each.
    """
    for modules, matrix in zip(_module_names(name, len(packed[0]), first_expert), _matrices(name, packed), strict=True):
        for part, module in enumerate(modules):
            for kind, tensor in _publish_rows(module, matrix, inputs, part, len(modules)).items():
                if isinstance(matrix, Fp8Tensor) and kind == "weight_scale":
                    tensor = tensor.to(scale_dtype)
                yield f"{module}.{kind}", tensor


def choose_scale_dtype(packed: PackedTensor) -> torch.dtype:
    """The smallest dtype that holds the scales of fp8 exactly. Some files have them in float32."""
    is_exact = not isinstance(packed, Fp8Tensor) or torch.equal(packed.scale.to(FP8_SCALE_DTYPE).float(), packed.scale)
    return FP8_SCALE_DTYPE if is_exact else torch.float32


def plan_packed(
    name: str, to: str, shape: tuple[int, ...], scale_dtype: torch.dtype = FP8_SCALE_DTYPE
) -> list[TensorHeader]:
    """The headers of the tensors that `publish_packed` will yield for a weight of this shape, quantized by redraft."""
    *stack, all_rows, inputs = shape
    headers = []
    for modules in _module_names(name, stack[0] if stack else 0, 0):
        rows = all_rows // len(modules)
        for module in modules:
            require_whole_groups(f"{module}.weight", to, inputs)
            kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]]
            if to == "fp8":
                kinds = {"weight": (FP8_DTYPE, (rows, inputs)), "weight_scale": (scale_dtype, (rows, 1))}
            elif to == "nvfp4":
                kinds = {
                    "weight_packed": (torch.uint8, (rows, inputs // 2)),
                    "weight_scale": (FP8_DTYPE, (rows, inputs // nvfp4.GROUP)),
                    "weight_global_scale": (torch.float32, (1,)),
                }
            else:
                kinds = {
                    "weight_packed": (torch.int32, (rows, inputs // 8)),
                    "weight_scale": (torch.bfloat16, (rows, inputs // int4.GROUP)),
                    "weight_shape": (torch.int64, (2,)),
                }
            headers += [TensorHeader(f"{module}.{kind}", dtype, size) for kind, (dtype, size) in kinds.items()]
    return headers


def require_whole_groups(name: str, to: str, inputs: int) -> None:
    """Refuses a weight that compressed-tensors has no layout for."""
    group = {"nvfp4": nvfp4.GROUP, "int4": int4.GROUP}.get(to, 1)
    if inputs % group:
        raise CheckpointError(
            f"{name} has {inputs} inputs, and {to} needs a multiple of {group}: quantize this model to fp8"
        )


def _module_names(name: str, experts: int, first_expert: int) -> Iterator[list[str]]:
    """The modules of each matrix of a weight."""
    prefix, _, last = name.rpartition(".")
    if last == "weight":
        yield [prefix]
        return
    for expert in range(first_expert, first_expert + experts):
        yield [f"{prefix}.{expert}.{part}" for part in EXPERT_PARTS[last]]


def _matrices(name: str, packed: PackedTensor) -> Iterator[PackedTensor]:
    if name.endswith(".weight"):
        yield packed
        return
    for expert in range(len(packed[0])):
        yield packed.select(expert)


def _publish_rows(module: str, matrix: PackedTensor, inputs: int, part: int, parts: int) -> dict[str, Tensor]:
    """The tensors of one module: one of the equal parts of the rows of a matrix."""
    rows = slice(part * len(matrix[0]) // parts, (part + 1) * len(matrix[0]) // parts)
    if isinstance(matrix, Fp8Tensor):
        return {"weight": matrix.qdata[rows], "weight_scale": matrix.scale[rows]}
    if isinstance(matrix, Nvfp4Tensor):
        require_whole_groups(f"{module}.weight", "nvfp4", inputs)
        whole = matrix.global_scale[part * len(matrix.global_scale) // parts]
        return {
            "weight_packed": pack_pairs(unpack_e2m1(matrix.codes[rows], inputs)),
            "weight_scale": matrix.scale[rows, : inputs // nvfp4.GROUP].contiguous(),
            "weight_global_scale": (1 / whole).reshape(1),
        }
    require_whole_groups(f"{module}.weight", "int4", inputs)
    codes = unpack_nibbles(matrix.codes[rows], inputs)
    groups = inputs // int4.GROUP
    tensors = {
        "weight_packed": pack_pairs(codes).contiguous().view(torch.int32),
        "weight_scale": matrix.scale[rows, :groups].contiguous(),
        "weight_shape": torch.tensor([len(codes), inputs]),
    }
    if matrix.minimum is not None:
        tensors["weight_zero_point"] = _publish_zero_points(
            module, matrix.scale[rows, :groups], matrix.minimum[rows, :groups]
        )
    return tensors


def _publish_zero_points(module: str, scale: Tensor, minimum: Tensor) -> Tensor:
    """Zero points, eight rows to a word. compressed-tensors has integers only; minimums of other files may fit none."""
    zero = torch.where(scale > 0, -minimum.float() / scale.float(), 0).round().clamp(0, 15)
    if not torch.equal((-zero * scale.float()).bfloat16(), minimum):
        raise CheckpointError(
            f"{module} has 4-bit weights with a minimum that compressed-tensors cannot store; keep the file it came from"
        )
    codes = torch.nn.functional.pad(zero.to(torch.uint8).t(), (0, -len(zero) % 8), value=int4.ZERO)
    return pack_pairs(codes.contiguous()).contiguous().view(torch.int32).t().contiguous()


# 2. quantization_config


def publish_quantization(
    config: ModelConfig, formats: Mapping[str, str | None], has_zero_points: bool = False
) -> dict[str, Any]:
    """Makes `quantization_config`. `formats` are those of all matrices in the layers, by our names; None: full precision.

    The modules of the experts' format are found by their class ("Linear"), all others by name, and what stays is ignored:
    so vLLM, which wants experts to be of the class, and transformers both read it. Names go before the class.
    """
    by_format: dict[str | None, dict[str, set[int]]] = {}  # format -> projection -> layers
    for name, its_format in formats.items():
        _, layer, projection = name.removesuffix(".weight").split(".", 2)
        by_format.setdefault(its_format, {}).setdefault(projection, set()).add(int(layer))
    layers_of: dict[str, set[int]] = {}
    for projections in by_format.values():
        for projection, layers in projections.items():
            layers_of[projection] = layers_of.get(projection, set()) | layers
    packed = [its_format for its_format in by_format if its_format is not None]
    of_class = next((f for f in packed if "experts.gate_up_proj" in by_format[f]), None)
    groups = {}
    for index, its_format in enumerate(sorted(packed, key=lambda f: f == of_class)):
        targets = ["Linear"] if its_format == of_class else _patterns(by_format[its_format], layers_of)
        scheme = SCHEMES[its_format]
        if its_format == "int4" and has_zero_points:
            scheme = scheme | {"weights": scheme["weights"] | {"symmetric": False}}
        own = {"format": FILE_FORMATS[its_format]} if len(packed) > 1 else {}
        groups[f"group_{index}"] = {"targets": targets, **scheme, **own}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": MIXED if len(packed) > 1 else FILE_FORMATS[packed[0]],
        "quantization_status": "compressed",
        "config_groups": groups,
        "kv_cache_scheme": None,
        "ignore": [*_unquantized_modules(config), *_patterns(by_format.get(None, {}), layers_of)],
    }


def _patterns(projections: Mapping[str, set[int]], layers_of: Mapping[str, set[int]]) -> list[str]:
    """Regular expressions for these projections of these layers: one for all that have the same layers."""
    by_layers: dict[str, list[str]] = {}
    for projection, layers in projections.items():
        numbers = r"\d+" if layers == layers_of[projection] else f"({'|'.join(map(str, sorted(layers)))})"
        pattern = projection.replace("experts.gate_up_proj", r"experts.\d+.(gate|up)_proj")
        pattern = pattern.replace("experts.down_proj", r"experts.\d+.down_proj").replace(".", r"\.")
        by_layers.setdefault(numbers, []).append(pattern)
    return [rf"re:.*\.layers\.{numbers}\.({'|'.join(patterns)})$" for numbers, patterns in by_layers.items()]


def _unquantized_modules(config: ModelConfig) -> list[str]:
    """The modules that every format leaves as they are. A causal-only model is published as Gemma4ForCausalLM."""
    halves = ("model",) if config.is_causal_only else ("model.encoder.language_model", "model.decoder")
    routers = [f"{half}.layers.{n}.router.proj" for half in halves for n in range(config.num_hidden_layers)]
    if config.is_causal_only:
        return [*routers, "lm_head"]
    conditioning = [f"model.decoder.self_conditioning.{part}_proj" for part in ("gate", "up", "down")]
    return [*routers, *conditioning, "re:.*vision_tower.*", "re:.*embed_vision.*", "lm_head"]
