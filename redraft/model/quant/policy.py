"""Policy: which format each weight of a checkpoint gets in memory.

    stored as                     experts                     attention, dense MLP      everything else
    bf16, float32                 as stored                   as stored                 as stored
    fp8                           fp8                         fp8                       full precision
    NVFP4                         NVFP4                       fp8                       full precision
    4-bit integers, Q4_0/1, Q4_K  int4                        fp8                       full precision
    Q5_0/1, Q5_K, Q6_K, Q8_0      fp8                         fp8                       full precision

Experts are nine tenths of the weights: four bits there decide what fits. The other products are bound by arithmetic, which
is twice as fast in fp8, and gain nothing from four bits. Without kernels for packed weights, on a CPU, 4-bit weights are
dequantized while they are loaded. `quant` asks for a format of the experts; the other layers are then fp8. Where the model
does not fit a limit, more is rounded: see `alternatives`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from redraft.kernels.backend import select_backend
from redraft.model.quant.stored import StoredFormat

QUANT_FORMATS = ("nvfp4", "int4", "fp8")
FORMAT_WORDS = {"nvfp4": "NVFP4", "int4": "int4 in groups of 32", "fp8": "fp8 by channel"}
EXPERT_GATE_UP = "experts.gate_up_proj"
EXPERT_DOWN = "experts.down_proj"
ATTENTION = "attention"
DENSE_MLP = "dense MLP"
EMBEDDING = "embedding"
EXPERTS = (EXPERT_GATE_UP, EXPERT_DOWN)
QUANTIZED_PARTS = (*EXPERTS, ATTENTION, DENSE_MLP)
# The format that holds the codes of a file's format unchanged. Formats that are not listed have none.
NATIVE = {
    "float-quantized": "fp8",
    "nvfp4-pack-quantized": "nvfp4",
    "NVFP4 (ModelOpt)": "nvfp4",
    "NVFP4": "nvfp4",
    "pack-quantized": "int4",
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q4_K": "int4",
}


def part_of(name: str) -> str:
    """The part of the model that a weight belongs to, from our name of it; the parts of `redraft info`."""
    if name.endswith(EXPERTS):
        return EXPERT_DOWN if name.endswith(EXPERT_DOWN) else EXPERT_GATE_UP
    if name == "embed_tokens.weight":
        return EMBEDDING
    if name.startswith("self_conditioning.") and name.endswith("_proj.weight"):
        return "self-conditioning"
    if name.startswith("draft_head."):
        return "draft head"
    if ".router." in name:
        return "router"
    if ".self_attn." in name and name.endswith("_proj.weight"):
        return ATTENTION
    if ".mlp." in name:
        return DENSE_MLP
    return "norms and scalars"


class Target(NamedTuple):
    """What a weight becomes."""

    format: str | None  # one of QUANT_FORMATS; None: full precision
    is_dequantized: bool = False  # rounded to the format, then kept in full precision

    @property
    def is_packed(self) -> bool:
        """Whether memory holds the weight in fewer bits."""
        return self.format is not None and not self.is_dequantized


PLAIN = Target(None)


@dataclass(frozen=True, kw_only=True)
class QuantPolicy:
    """The user's wishes and what the device can do."""

    quant: str | None = None  # the format that the user asks for
    keep_bf16: bool = False  # attention, dense MLP and embedding are not rounded to fp8
    packs_dense: bool = False  # attention and dense MLP in full precision are rounded to fp8
    packs_embedding: bool = False  # the embedding is rounded to fp8
    prefer_small: bool = False  # experts in a format that no kernel runs are rounded to NVFP4, not to fp8
    runs_packed: bool = False  # the device computes with 4-bit weights

    def __post_init__(self) -> None:
        if self.quant is not None and self.quant not in QUANT_FORMATS:
            raise ValueError(f"there is no quantization {self.quant!r}; try {', '.join(QUANT_FORMATS)}")

    @classmethod
    def for_device(cls, device: torch.device | str, *, quant: str | None = None, **wishes: bool) -> "QuantPolicy":
        """The policy of a device. On a GPU 4-bit weights stay packed whatever the kernels, since memory is scarce there."""
        runs_packed = torch.device(device).type == "cuda" or select_backend(device).uses_triton
        return cls(quant=quant, runs_packed=runs_packed, **wishes)

    @property
    def alternatives(self) -> tuple["QuantPolicy", ...]:
        """This policy and those for less memory, the best first: NVFP4 loses most. The last one takes the least memory."""
        dense = replace(self, packs_dense=True)
        larger = (self, dense, replace(dense, packs_embedding=True))
        smaller = (replace(policy, prefer_small=True) for policy in larger)
        return tuple(dict.fromkeys((*larger, *smaller)))  # each once, though this policy may be small already

    @property
    def substitute(self) -> str:
        """The format of experts that are stored in a format which no kernel runs."""
        return "nvfp4" if self.prefer_small else "fp8"

    def targets(self, stored_formats: Mapping[str, StoredFormat | None]) -> dict[str, Target]:
        """What every weight of a model becomes, by its name. If one of a layer's two expert weights is packed, both are.

        Codes that fit no format of ours, such as integers in groups of 16, are rounded to the substitute.
        """
        targets = {}
        for name, stored in stored_formats.items():
            target = self.target(part_of(name), stored.format if stored is not None else None)
            if stored is not None and stored.packed_format is None and target.format == NATIVE.get(stored.format, ""):
                target = target._replace(format=self.substitute)
            targets[name] = target
        for name, target in list(targets.items()):
            if part_of(name) in EXPERTS and target.is_packed:
                for neighbour in (name.replace(EXPERT_DOWN, EXPERT_GATE_UP), name.replace(EXPERT_GATE_UP, EXPERT_DOWN)):
                    if not targets[neighbour].is_packed:
                        targets[neighbour] = Target("fp8")
        return targets

    def target(self, part: str, stored_format: str | None) -> Target:
        """What a weight of this part becomes. `stored_format` is the file's word; None: full precision."""
        if part in EXPERTS:
            return self._expert_target(stored_format)
        if part in QUANTIZED_PARTS:
            return Target("fp8") if self._has_fp8_layers(stored_format) else PLAIN
        if part == EMBEDDING and self.packs_embedding and not self.keep_bf16:
            return Target("fp8")
        return PLAIN

    def _expert_target(self, stored_format: str | None) -> Target:
        if self.quant is not None:
            return Target(self.quant, is_dequantized=self.quant != "fp8" and not self.runs_packed)
        if stored_format is None:
            return PLAIN
        native = NATIVE.get(stored_format)
        if native == "fp8" or self.runs_packed:
            return Target(native or self.substitute)
        return PLAIN

    def _has_fp8_layers(self, stored_format: str | None) -> bool:
        """Whether weights of attention and dense MLP that are stored so become fp8."""
        if stored_format is not None and NATIVE.get(stored_format) == "fp8":
            return True  # as stored
        if self.keep_bf16:
            return False
        if self.quant is not None:
            return True
        return self.packs_dense if stored_format is None else self.runs_packed
