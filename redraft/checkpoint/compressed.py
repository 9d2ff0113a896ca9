"""Quantized weights of safetensors files: compressed-tensors' NVFP4, 4-bit integers and fp8, and ModelOpt's NVFP4.

Published files store each expert apart. `QuantizedTensors` shows them under the names of the bf16 layout; each stack is a
StoredWeight, which reads its tensors when it is asked for numbers. Headers are checked before that.
Shapes: E matrices of a stack, O rows, I inputs, K groups of inputs that share a scale.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.checkpoint.names import CheckpointError
from redraft.checkpoint.quantization import FLOAT_QUANTIZED, INT4_PACKED, NVFP4_PACKED, Quantization
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.config import show_value
from redraft.kernels import int4, nvfp4
from redraft.kernels.fp8 import Fp8Tensor
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.nibbles import BLOCK, pack_e2m1, pack_nibbles, unpack_pairs
from redraft.kernels.nvfp4 import E2M1, Nvfp4Tensor
from redraft.kernels.packed import PackedTensor
from redraft.model.quant.stored import PLAIN_FORMATS, StoredWeight

EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # stacked name -> published names
PER_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,9})\.(gate_proj|up_proj|down_proj)")
QUANTIZED_KINDS = {
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
}
IGNORED_KINDS = {"input_scale", "input_global_scale"}  # for activations in 4 bits, which redraft does not have
SCALE_DTYPES = ("BF16", "F16", "F32")


# 1. Stored weights


@dataclass(frozen=True)
class StoredMatrices(ABC):
    """A matrix, or a stack of matrices. The rows of a matrix are those of its modules: gate and up of an expert, or one."""

    tensors: CheckpointTensors = field(repr=False)
    modules: tuple[tuple[str, ...], ...] = field(repr=False)  # of each matrix
    is_stack: bool
    module_shape: tuple[int, int]  # rows and inputs of one module
    device: torch.device  # where numbers are converted
    rows: range | None = field(default=None, kw_only=True)  # of the file's matrix, if it is some of them only
    file_format: ClassVar[str]

    @property
    def format(self) -> str:
        """The file's word for the format."""
        return self.file_format

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, not of its bytes."""
        rows, inputs = self.module_shape
        matrix = (rows * len(self.modules[0]), inputs)
        return (len(self.modules), *matrix) if self.is_stack else matrix

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales included."""
        kinds = [kind for kind in ("weight", *sorted(QUANTIZED_KINDS)) if f"{self.modules[0][0]}.{kind}" in self.tensors]
        each = sum(self.tensors.nbytes(f"{self.modules[0][0]}.{kind}") for kind in kinds)
        return each * sum(map(len, self.modules))

    def select(self, part: slice) -> "StoredMatrices":
        """Some matrices of a stack, or some rows of a matrix: of 4-bit integers beginning at a multiple of 8."""
        if self.is_stack:
            return replace(self, modules=self.modules[part])
        rows = range(self.module_shape[0])[part]
        return replace(self, rows=rows, module_shape=(len(rows), self.module_shape[1]))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of the format's own library, to the bit, then rounded to the dtype."""
        numbers = self._dequantize(dtype)
        return numbers if self.is_stack else numbers[0]

    def pack(self) -> PackedTensor | None:
        """The weight in a format that the kernels run; None if none fits."""
        packed = self._pack()
        return packed if self.is_stack or packed is None else packed.select(0)

    @property
    @abstractmethod
    def packed_format(self) -> str | None:
        """The format that `pack` returns."""

    @abstractmethod
    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        """The numbers of the matrices as a stack."""

    @abstractmethod
    def _pack(self) -> PackedTensor | None:
        """The packed matrices as a stack."""

    def _stack(self, kind: str, prepare: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """The tensors of one kind [E, O, ...]: those of the modules of a matrix one below the other."""
        for name in (f"{module}.{kind}" for modules in self.modules for module in modules):
            if name not in self.tensors:
                raise CheckpointError(f"the checkpoint has no tensor {name}")
        return torch.stack(
            [torch.cat([prepare(self._read(module, kind)) for module in modules]) for modules in self.modules]
        )

    def _read(self, module: str, kind: str) -> Tensor:
        tensor = self.tensors[f"{module}.{kind}"]
        if self.rows is not None and tensor.numel() > 1:  # a global scale is one number
            rows_of_word = 8 if kind == "weight_zero_point" else 1
            tensor = tensor[self.rows.start // rows_of_word : -(-self.rows.stop // rows_of_word)]
        return tensor.to(self.device)

    def _stack_scales(self, kind: str, smallest: float = 0.0) -> Tensor:
        """Scales [E, O, K], checked: a scale that is NaN, infinite or below the smallest is refused."""
        scales = self._stack(kind, lambda tensor: tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor)
        numbers = scales.float()
        is_good = (numbers >= smallest) & numbers.isfinite()
        if not bool(is_good.all()):
            matrix, row, _ = (int(index) for index in (~is_good).nonzero()[0])
            module = self.modules[matrix][row * len(self.modules[matrix]) // numbers.shape[1]]
            bad = float(numbers[matrix, row][~is_good[matrix, row]][0])
            raise CheckpointError(f"tensor {module}.{kind} holds a scale of {bad:g}; the file is damaged: download it again")
        return scales


@dataclass(frozen=True)
class StoredNvfp4(StoredMatrices):
    """NVFP4 in the layout of compressed-tensors. Its global scale is a divisor."""

    file_format: ClassVar[str] = NVFP4_PACKED
    packed_kind: ClassVar[str] = "weight_packed"
    global_kind: ClassVar[str] = "weight_global_scale"

    @classmethod
    def check_module(cls, tensors: CheckpointTensors, module: str, group: int | None) -> tuple[int, int]:
        """Checks the headers of a module's tensors; returns its rows and inputs."""
        rows, half = _matrix_shape(tensors, f"{module}.{cls.packed_kind}", ("U8",))
        inputs = 2 * half
        _require_tensor(tensors, f"{module}.weight_scale", (rows, -(-inputs // nvfp4.GROUP)), ("F8_E4M3",))
        _require_tensor(tensors, f"{module}.{cls.global_kind}", None, ("F32",))
        return rows, inputs

    @property
    def packed_format(self) -> str:
        """The format that `pack` returns."""
        return "nvfp4"

    def _global_scale(self) -> Tensor:
        """What scales are divided by, [E, P]."""
        return self._stack_scales(self.global_kind, smallest=torch.finfo(torch.float32).tiny)[..., 0]

    def _step(self, scale_EOK: Tensor) -> Tensor:
        """The distance of codes 0 and 2 in a group, float32, in the order in which the library computes it."""
        return scale_EOK.float() / self._by_row(self._global_scale())

    def _by_row(self, whole_EP: Tensor) -> Tensor:
        return whole_EP.repeat_interleave(self.module_shape[0], dim=-1)[..., None]

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        numbers = self._float_numbers()
        return numbers.bfloat16().to(dtype)  # compressed-tensors' result is bf16

    def _float_numbers(self) -> Tensor:
        step_EOK = self._step(self._stack_scales("weight_scale"))
        codes = unpack_pairs(self._stack(self.packed_kind))
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)[codes.int()]
        values = F.pad(values, (0, -values.shape[-1] % nvfp4.GROUP)).unflatten(-1, (-1, nvfp4.GROUP))
        return (values * step_EOK[..., None]).flatten(-2)[..., : codes.shape[-1]]

    def _pack(self) -> Nvfp4Tensor:
        scale = self._stack_scales("weight_scale")
        fill = -self.module_shape[1] % BLOCK // nvfp4.GROUP
        filled = F.pad(scale.view(torch.uint8), (0, fill)).view(scale.dtype)
        return Nvfp4Tensor(pack_e2m1(unpack_pairs(self._stack(self.packed_kind))), filled, 1 / self._global_scale())


@dataclass(frozen=True)
class StoredModeloptNvfp4(StoredNvfp4):
    """NVFP4 in the layout of ModelOpt. Its global scale is a factor."""

    file_format: ClassVar[str] = "NVFP4 (ModelOpt)"
    packed_kind: ClassVar[str] = "weight"
    global_kind: ClassVar[str] = "weight_scale_2"

    def _step(self, scale_EOK: Tensor) -> Tensor:
        return scale_EOK.float() * self._by_row(self._global_scale())

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        return self._float_numbers().to(dtype)

    def _pack(self) -> Nvfp4Tensor:
        return super()._pack()._replace(global_scale=self._global_scale())


@dataclass(frozen=True)
class StoredInt4(StoredMatrices):
    """4-bit integers of compressed-tensors, eight to a word, symmetric or with zero points."""

    file_format: ClassVar[str] = INT4_PACKED
    group: int | None = None  # inputs that share a scale; None: a row does

    @classmethod
    def check_module(cls, tensors: CheckpointTensors, module: str, group: int | None) -> tuple[int, int]:
        """Checks the headers of a module's tensors; returns its rows and inputs."""
        rows, words = _matrix_shape(tensors, f"{module}.weight_packed", ("I32",))
        inputs = 8 * words
        if f"{module}.weight_shape" in tensors:
            _require_tensor(tensors, f"{module}.weight_shape", (2,), ("I64",))
            stored = tensors[f"{module}.weight_shape"].tolist()
            if stored[0] != rows or not inputs - 8 < stored[1] <= inputs:
                raise CheckpointError(f"tensor {module}.weight_shape says {stored}, but weight_packed is [{rows}, {words}]")
            inputs = stored[1]
        groups = -(-inputs // (group or inputs))
        _require_tensor(tensors, f"{module}.weight_scale", (rows, groups), SCALE_DTYPES)
        if f"{module}.weight_zero_point" in tensors:
            _require_tensor(tensors, f"{module}.weight_zero_point", (-(-rows // 8), groups), ("I32",))
        return rows, inputs

    @property
    def packed_format(self) -> str | None:
        """The format that `pack` returns: it has groups of 32, so only multiples of 32 fit."""
        if self.group is not None and self.group % int4.GROUP:
            return None
        return "int4 with minimum" if self._has_zero_points else "int4"

    @property
    def _has_zero_points(self) -> bool:
        return any(f"{module}.weight_zero_point" in self.tensors for modules in self.modules for module in modules)

    def _codes(self) -> Tensor:
        """Codes uint8 [E, O, I]. On a little-endian machine the bytes of a word are pairs of inputs."""
        self._check_order()
        return _unpack_words(self._stack("weight_packed"))[..., : self.module_shape[1]]

    def _check_order(self) -> None:
        """Refuses inputs in another order than groups of neighbours, which would need sorted activations."""
        for module in (module for modules in self.modules for module in modules):
            if f"{module}.weight_g_idx" in self.tensors:
                order = self.tensors[f"{module}.weight_g_idx"].flatten()
                inputs = torch.arange(self.module_shape[1], device=order.device, dtype=order.dtype)
                if not torch.equal(order, inputs // (self.group or self.module_shape[1])):
                    raise CheckpointError(
                        f"tensor {module}.weight_g_idx reorders the inputs (actorder 'group'), which redraft does not run: "
                        "load a file quantized without it"
                    )

    def _zero_points(self) -> Tensor | None:
        """Zero points 0 to 15, uint8 [E, O, K]; None in a symmetric file. Eight rows share a word."""
        if not self._has_zero_points:
            return None
        rows = self.module_shape[0]
        return self._stack("weight_zero_point", lambda words: _unpack_words(words.t().contiguous())[:, :rows].t())

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        scale = self._stack_scales("weight_scale", -math.inf)
        zero = self._zero_points()
        centre = torch.tensor(int4.ZERO, device=scale.device) if zero is None else self._by_input(zero)
        # compressed-tensors computes in the precision of the scales.
        steps = self._codes().to(scale.dtype) - centre.to(scale.dtype)
        return (steps * self._by_input(scale)).to(dtype)

    def _by_input(self, of_groups: Tensor) -> Tensor:
        inputs = self.module_shape[1]
        return of_groups.repeat_interleave(self.group or inputs, dim=-1)[..., :inputs]

    def _pack(self) -> Int4Tensor | None:
        if self.packed_format is None:
            return None
        inputs = self.module_shape[1]
        whole_groups = -(-inputs // int4.GROUP)
        fill = (0, -inputs % BLOCK // int4.GROUP)
        repeats = self.group // int4.GROUP if self.group else whole_groups
        scale = self._stack_scales("weight_scale", -math.inf).bfloat16()
        zero = self._zero_points()
        minimum = None if zero is None else (-(zero.float()) * scale.float()).bfloat16()

        def spread(of_groups: Tensor) -> Tensor:
            return F.pad(of_groups.repeat_interleave(repeats, dim=-1)[..., :whole_groups], fill)

        return Int4Tensor(pack_nibbles(self._codes()), spread(scale), None if minimum is None else spread(minimum))


@dataclass(frozen=True)
class StoredFp8(StoredMatrices):
    """fp8 of compressed-tensors, with a scale for every row."""

    file_format: ClassVar[str] = FLOAT_QUANTIZED

    @classmethod
    def check_module(cls, tensors: CheckpointTensors, module: str, group: int | None) -> tuple[int, int]:
        """Checks the headers of a module's tensors; returns its rows and inputs."""
        rows, inputs = _matrix_shape(tensors, f"{module}.weight", ("F8_E4M3",))
        _require_tensor(tensors, f"{module}.weight_scale", (rows, 1), SCALE_DTYPES)
        return rows, inputs

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of the scales; float32 where some have another one than bf16."""
        names = (f"{module}.weight_scale" for modules in self.modules for module in modules)
        return torch.bfloat16 if all(self.tensors.dtype(name) == "BF16" for name in names) else torch.float32

    @property
    def packed_format(self) -> str:
        """The format that `pack` returns."""
        return "fp8"

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        scale = self._stack_scales("weight_scale")
        return (self._stack("weight").to(scale.dtype) * scale).to(dtype)

    def _pack(self) -> Fp8Tensor:
        return Fp8Tensor(self._stack("weight"), self._stack_scales("weight_scale").float())


@dataclass(frozen=True)
class StoredPlain(StoredMatrices):
    """Experts in full precision, each apart: some files leave the experts of some layers as they were."""

    @classmethod
    def check_module(cls, tensors: CheckpointTensors, module: str, group: int | None) -> tuple[int, int]:
        """Checks the header of a module's tensor; returns its rows and inputs."""
        return _matrix_shape(tensors, f"{module}.weight", tuple(PLAIN_FORMATS))

    @property
    def format(self) -> str:
        """The dtype in safetensors' words."""
        return self.tensors.dtype(f"{self.modules[0][0]}.weight")

    @property
    def packed_format(self) -> None:
        """The format that `pack` returns: none."""

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        return self._stack("weight", lambda tensor: tensor.to(dtype))

    def _pack(self) -> None:
        """No codes: the weight is quantized instead."""


def _unpack_words(words: Tensor) -> Tensor:
    """The eight 4-bit codes of each int32 word, uint8 [..., 8 W]."""
    return unpack_pairs(words.contiguous().view(torch.uint8))


def _matrix_shape(tensors: CheckpointTensors, name: str, dtypes: tuple[str, ...]) -> tuple[int, int]:
    _require_tensor(tensors, name, None, dtypes)
    shape = tensors.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"tensor {name} has shape {shape}; a quantized weight has rows and columns")
    return shape[0], shape[1]


def _require_tensor(tensors: CheckpointTensors, name: str, shape: tuple[int, ...] | None, dtypes: tuple[str, ...]) -> None:
    """Refuses a tensor that is missing or has another shape or dtype. Without a shape, it may have any of one number."""
    if name not in tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name}")
    if tensors.dtype(name) not in dtypes:
        raise CheckpointError(f"tensor {name} is {tensors.dtype(name)}; in its format it is {' or '.join(dtypes)}")
    is_one_number = tensors.shape(name) in ([], [1])
    if (shape is not None and tensors.shape(name) != list(shape)) or (
        shape is None and name.endswith(("global_scale", "scale_2")) and not is_one_number
    ):
        expected = list(shape) if shape is not None else "one number"
        raise CheckpointError(f"tensor {name} has shape {tensors.shape(name)}, its weight needs {expected}")


# 2. Under the names of the bf16 layout


class QuantizedTensors(Mapping[str, Tensor | StoredWeight]):
    """The tensors of a quantized folder under the names of the bf16 layout.

    Quantized weights, and experts that are stored apart, are StoredWeights, which are converted on the device.
    """

    def __init__(self, tensors: CheckpointTensors, quantization: Quantization, device: torch.device | str = "cpu") -> None:
        self.tensors = tensors
        self.quantization = quantization
        self.device = torch.device(device)
        self._plain: list[str] = []
        self._modules: dict[str, list[str]] = {}  # name of the weight -> its modules, in any order
        kinds: dict[str, set[str]] = {}  # of each module
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if kind in QUANTIZED_KINDS or (kind == "weight" and PER_EXPERT.fullmatch(module)):
                kinds.setdefault(module, set()).add(kind)
            elif kind not in IGNORED_KINDS:
                self._plain.append(name)
        self._plain = [name for name in self._plain if name.removesuffix(".weight") not in kinds]
        for module in kinds:
            match = PER_EXPERT.fullmatch(module)
            stack = "down_proj" if match and match[3] == "down_proj" else "gate_up_proj"
            self._modules.setdefault(f"{match[1]}.{stack}" if match else f"{module}.weight", []).append(module)

    def __getitem__(self, name: str) -> Tensor | StoredWeight:
        if name not in self._modules:
            return self.tensors[name]
        modules = self._order_modules(name)
        formats = {self._format(module) for matrix in modules for module in matrix}
        if len(formats) > 1:
            raise CheckpointError(f"the modules of {name} have different formats; redraft runs one format for all of them")
        (format_class,) = formats
        is_stack = not name.endswith(".weight")
        options: dict[str, Any] = {}
        group = None
        if format_class is StoredInt4:
            group = self._int4_group(modules[0][0])
            options["group"] = group
        shapes = {module: format_class.check_module(self.tensors, module, group) for matrix in modules for module in matrix}
        first = next(iter(shapes.values()))
        for module, shape in shapes.items():
            if shape != first:
                raise CheckpointError(f"the weight of {module} is {list(shape)}, those of its layer are {list(first)}")
        return format_class(self.tensors, modules, is_stack, first, self.device, **options)

    def _order_modules(self, name: str) -> tuple[tuple[str, ...], ...]:
        """The modules of each matrix of a weight. Refuses a stack with a missing expert."""
        stored = set(self._modules[name])
        prefix, _, stack = name.rpartition(".")
        if stack == "weight":
            return ((prefix,),)
        parts = EXPERT_PARTS[stack]
        experts = 1 + max(int(match[2]) for module in stored if (match := PER_EXPERT.fullmatch(module)))
        for expert in range(experts):
            for part in parts:
                if f"{prefix}.{expert}.{part}" not in stored:
                    raise CheckpointError(f"the checkpoint has no tensor {prefix}.{expert}.{part}.weight")
        return tuple(tuple(f"{prefix}.{expert}.{part}" for part in parts) for expert in range(experts))

    def _format(self, module: str) -> "type[StoredNvfp4 | StoredInt4 | StoredFp8 | StoredPlain]":
        """The class that reads a module, from the kinds and dtypes of its tensors."""
        packed = f"{module}.weight_packed"
        if packed in self.tensors:
            return StoredInt4 if self.tensors.dtype(packed) == "I32" else StoredNvfp4
        if f"{module}.weight" not in self.tensors:
            raise CheckpointError(f"the checkpoint has no tensor {module}.weight")
        if self.tensors.dtype(f"{module}.weight") == "U8":
            return StoredModeloptNvfp4
        return StoredFp8 if f"{module}.weight_scale" in self.tensors else StoredPlain

    def _int4_group(self, module: str) -> int | None:
        """The inputs that share a scale. If config.json names several numbers, the shape of the scales decides."""
        sizes = self.quantization.int4_groups or (None,)
        _, words = _matrix_shape(self.tensors, f"{module}.weight_packed", ("I32",))
        _, groups = _matrix_shape(self.tensors, f"{module}.weight_scale", SCALE_DTYPES)
        fitting = [size for size in sizes if -(-8 * words // (size or 8 * words)) == groups]
        if len(fitting) != 1:
            raise CheckpointError(
                f"tensor {module}.weight_scale has {groups} groups for {8 * words} inputs, which does not tell its "
                f"group_size: config.json has {show_value(sizes)}"
            )
        return fitting[0]

    def __contains__(self, name: object) -> bool:
        return name in self._modules or (name in self.tensors and name in set(self._plain))

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._modules

    def __len__(self) -> int:
        return len(self._plain) + len(self._modules)
