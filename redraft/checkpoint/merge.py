"""Merges an adapter into its base: a checkpoint of the published layout that needs no adapter any more.

Each matrix becomes the sum of its weight and the product of its pair, rounded once to the format in which the base has it.
All other weights are written as they are. Shapes: E experts, O outputs, I inputs of a matrix.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.checkpoint.adapter_files import load_adapter, read_adapter_config
from redraft.checkpoint.atomic_folder import check_target
from redraft.checkpoint.find import find
from redraft.checkpoint.gguf import is_gguf
from redraft.checkpoint.load import from_state_dict
from redraft.checkpoint.parts import open_checkpoint
from redraft.checkpoint.save import save
from redraft.checkpoint.tensors import folder_with_vision
from redraft.kernels.int4 import Int4Tensor
from redraft.kernels.packed import FORMATS, PackedTensor, Weight, dequantize_packed, map_weight, weight_tensors
from redraft.model.backbone import Backbone
from redraft.model.lora import DENOISE, ENCODE, Adapter, AdapterError, LoraPair
from redraft.model.quant.conversion import EXPERTS_AT_ONCE, JoinedWeight, parts_of
from redraft.model.quant.layers import PackedExperts, PackedLinear
from redraft.model.quant.policy import QuantPolicy
from redraft.model.quant.quantizers import quantize_int4, quantize_weight


class Merged(NamedTuple):
    """A matrix has been merged."""

    matrix: str
    done: int  # matrices so far
    total: int


class Conversions(NamedTuple):
    """What loading the base has rounded or dequantized, a sentence each; see `Converter.describe`."""

    sentences: tuple[str, ...]


def merge_checkpoint(
    base: str | Path, adapter_folder: str | Path, out: str | Path, *, force: bool = False
) -> Iterator[Conversions | Merged]:
    """Merges an adapter, ours or peft's, into the checkpoint `base`, and saves the result in the folder `out`.

    Packed weights stay packed. Those of a GGUF file become full precision: the published layout has no such formats.
    Memory holds the matrices that change; the other weights are views of the mapped file.
    """
    check_target(out, force=force)  # before a download
    read_adapter_config(adapter_folder)
    source = find(base)
    opened = open_checkpoint(source)
    policy = QuantPolicy(runs_packed=not is_gguf(source))
    model = from_state_dict(opened.config, opened.tensors, policy=policy)
    yield Conversions(model.conversions)
    yield from merge_into(model, load_adapter(adapter_folder, model))
    vision_from = None if model.config.is_causal_only else folder_with_vision(source)
    options: dict[str, Any] = {"tokenizer": opened.tokenizer, "sampler": opened.sampler, "vision_from": vision_from}
    save(model, out, **options, force=force)


@torch.no_grad()
def merge_into(model: Backbone, adapter: Adapter) -> Iterator[Merged]:
    """Adds the pairs of an adapter to the weights of a model. Weights that change become new tensors."""
    if not adapter.is_tied and not model.config.is_causal_only:
        raise AdapterError(
            "the two halves of this adapter differ, but they share the weights it would be merged into: use it as an adapter"
        )
    pairs = {matrix: pair for half in (ENCODE, DENOISE) for own, matrix, pair in adapter.pairs() if own == half}
    for done, (matrix, pair) in enumerate(pairs.items(), 1):
        module_name, _, last = matrix.rpartition(".")
        if pair.a.dim() == 3:
            layer: Any = model.get_submodule(module_name)
        else:
            layer, last = model.get_submodule(matrix), "weight"
        if isinstance(layer, PackedLinear | PackedExperts):
            layer.set_packed(last, add_pair(layer.packed(last), pair, matrix))
        else:
            merged = add_pair(getattr(layer, last), pair, matrix)
            setattr(layer, last, torch.nn.Parameter(merged, requires_grad=False))
        yield Merged(matrix, done, len(pairs))


def add_pair(weight: Weight, pair: LoraPair, matrix: str) -> Any:
    """The weight, [O, I] or [E, O, I], with what a pair adds, in the same format. Of a stack, a few experts at a time."""
    if pair.a.dim() == 2:
        return _round_like(weight, _to_numbers(weight, pair.a.shape[-1]) + pair.delta(), matrix)
    experts = len(pair.a)
    joined = JoinedWeight(experts, weight_tensors(weight)[0].device)
    for first in range(0, experts, EXPERTS_AT_ONCE):
        part = slice(first, first + EXPERTS_AT_ONCE)
        some: Weight = map_weight(weight, lambda tensor, part=part: tensor[part])  # type: ignore[misc]
        delta = LoraPair(pair.a[part], pair.b[part], pair.scale).delta()
        joined.append(_round_like(some, _to_numbers(some, pair.a.shape[-1]) + delta, matrix))
    return joined.weight


def _to_numbers(weight: Weight, inputs: int) -> Tensor:
    return weight.float() if isinstance(weight, Tensor) else dequantize_packed(weight, inputs)


def _round_like(weight: Weight, numbers: Tensor, matrix: str) -> Weight:
    """Rounds numbers to the format of a weight."""
    if isinstance(weight, Tensor):
        return numbers.to(weight.dtype)
    if isinstance(weight, Int4Tensor) and weight.minimum is not None:
        return quantize_int4(numbers, with_minimum=True, with_zero_points=True)
    packed: PackedTensor = quantize_weight(numbers, FORMATS[type(weight)], parts_of(matrix))
    return packed
