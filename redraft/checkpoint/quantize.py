"""Quantizes a checkpoint on disk, weight by weight: the model is never built, and memory holds a few experts at a time.

    PARENT/NAME                     the new checkpoint: it appears whole
    PARENT/.NAME.quantize-1a2b3c4d  finished shards; the same command continues with them after it was killed

The number at the end is a hash of the source's files, of the options and of redraft's own code, so shards of another source,
of other options or of another version are never used. A shard has its place in the plan, and gets its name when it is whole.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections import ChainMap
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from redraft.checkpoint import names
from redraft.checkpoint.atomic_folder import check_target, lock_folder, replace_folder
from redraft.checkpoint.compressed import StoredFp8
from redraft.checkpoint.load import fetch_weight, refuse_unknown_tensors
from redraft.checkpoint.names import CheckpointError, find_layout, published_name
from redraft.checkpoint.parts import OpenCheckpoint, open_checkpoint
from redraft.checkpoint.publish_packed import TensorHeader, plan_packed, publish_packed, publish_quantization
from redraft.checkpoint.published_config import publish_model_config
from redraft.checkpoint.save import copy_processor, smallest_vision, write_json, write_settings
from redraft.checkpoint.tensor_file import TensorFileWriter, header_bytes
from redraft.config import SMALLEST_VISION, ModelConfig, read_json
from redraft.kernels.int4 import Int4Tensor
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant.conversion import EXPERTS_AT_ONCE, pack_piece, parts_of, plain_dtype, split_stack
from redraft.model.quant.policy import EXPERTS, QUANT_FORMATS, QUANTIZED_PARTS, part_of
from redraft.model.quant.quantizers import FP8_SCALE_DTYPE, RoundingError
from redraft.model.quant.stored import StoredWeight

SHARD_BYTES = 10**9
STATISTICS = "statistics.json"
REST_FORMATS = ("fp8", "bf16")
PROGRAM = Path(__file__).parents[1]  # redraft's own code


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What to write."""

    to: str = "fp8"  # the format of the experts
    rest: str = "fp8"  # of attention and dense MLP; "bf16": as stored
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if self.to not in QUANT_FORMATS:
            raise ValueError(f"there is no format {self.to!r}; try {', '.join(QUANT_FORMATS)}")
        if self.rest not in REST_FORMATS:
            raise ValueError(f"attention and dense MLP can be {' or '.join(REST_FORMATS)}, not {self.rest!r}")


@dataclass
class Projection:
    """What became of all weights of one kind, of all layers."""

    weights: int = 0  # numbers
    matrices: int = 0
    nbytes: int = 0
    squares: float = 0.0
    errors: float = 0.0
    largest_block: float = 0.0
    rounded: int = 0  # matrices that were rounded; the others had this format already

    def add(self, other: "Projection") -> None:
        """Adds another count."""
        for name, value in asdict(other).items():
            combined = max(self.largest_block, value) if name == "largest_block" else getattr(self, name) + value
            setattr(self, name, combined)

    @property
    def relative_error(self) -> float:
        """The root of the mean squared error, relative to the weights'."""
        return (self.errors / self.squares) ** 0.5 if self.squares else 0.0

    @property
    def bits(self) -> float:
        """Bits of a weight, scales included."""
        return 8 * self.nbytes / self.weights


class Quantized(NamedTuple):
    """Event: some bytes of the new checkpoint are there."""

    done: int
    total: int


def open_source(path: Path) -> OpenCheckpoint:
    """Opens a checkpoint. One without vision weights gets the smallest vision tower, as `save` writes it."""
    source = open_checkpoint(path)
    if not isinstance(source.config, ModelConfig):
        raise CheckpointError(f"{path} is no DiffusionGemma and no Gemma 4; redraft quantizes only those")
    if source.config.is_causal_only or any(name.startswith(names.VISION) for name in source.tensors):
        return source
    vision = smallest_vision(source.config.hidden_size, torch.bfloat16)
    tensors = ChainMap(vision, source.tensors)  # type: ignore[arg-type]
    return source._replace(config=replace(source.config, vision=dict(SMALLEST_VISION)), tensors=tensors)


class Unit(NamedTuple):
    """One weight of the source, and the tensors it becomes."""

    source: str  # its name there
    name: str  # its published name in the new checkpoint
    ours: str | None  # our name; None for vision weights
    to: str | None  # None: as it is
    headers: list[TensorHeader]
    scale_dtype: torch.dtype = FP8_SCALE_DTYPE  # of fp8

    @property
    def projection(self) -> str | None:
        """The kind of a quantized weight: "experts.down_proj"."""
        return self.ours.removesuffix(".weight").split(".", 2)[2] if self.to is not None and self.ours else None

    @property
    def nbytes(self) -> int:
        """The bytes that are written."""
        return sum(map(header_bytes, self.headers))


def quantize_checkpoint(
    source: Path, out: str | Path, options: QuantizeOptions, *, device: torch.device | str = "cpu", force: bool = False
) -> Iterator[Quantized | dict[str, Projection]]:
    """Writes the quantized checkpoint. Yields progress, and at the end what became of each projection."""
    check_target(out, force=force)
    opened = open_source(source)
    assert isinstance(opened.config, ModelConfig)
    shards = _split_shards(_plan(opened.config, opened.tensors, options), options.shard_bytes)
    target = Path(out).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.quantize-{_identify(source, options)}")
    _remove_stale(target, work)
    work.mkdir(exist_ok=True)
    try:
        with lock_folder(work):
            statistics = yield from _write_shards(work, shards, opened.tensors, device)
            with replace_folder(out, force=force) as part:
                if not opened.config.is_causal_only:
                    copy_processor(source, part)
                _assemble(part, work, shards, opened)
            shutil.rmtree(work)
    except BlockingIOError:
        raise CheckpointError(f"another process is writing {out}; wait for it, or name another folder") from None
    yield statistics


# 1. The plan


def _plan(config: ModelConfig, tensors: Mapping[str, Tensor | StoredWeight], options: QuantizeOptions) -> list[Unit]:
    """All weights in the order of the layers. Only headers are read."""
    with torch.device("meta"):
        expected = DiffusionGemma(config).state_dict()
    available = set(tensors)
    source_layout = find_layout(available, config)
    layout = names.GEMMA4_TEXT if config.is_causal_only else names.DIFFUSION
    refuse_unknown_tensors(tensors, available, {published_name(name, source_layout) for name in expected}, source_layout)
    units = []
    for ours, placeholder in expected.items():
        source = published_name(ours, source_layout)
        name = published_name(ours, layout)
        part = part_of(ours)
        shape = tuple(placeholder.shape)
        if ours.startswith(names.DRAFT_HEAD_PREFIX):  # it has a file of its own
            continue
        weight = fetch_weight(tensors, available, source, placeholder)
        if part in QUANTIZED_PARTS and (part in EXPERTS or options.rest == "fp8"):
            to = options.to if part in EXPERTS else "fp8"
            scale_dtype = weight.scale_dtype if isinstance(weight, StoredFp8) else FP8_SCALE_DTYPE
            units.append(Unit(source, name, ours, to, plan_packed(name, to, shape, scale_dtype), scale_dtype))
        else:
            dtype = plain_dtype(weight) or torch.bfloat16
            units.append(Unit(source, name, ours, None, [TensorHeader(name, dtype, shape)]))
    if not config.is_causal_only:
        for source in sorted(name for name in available if name.startswith(names.VISION)):
            weight = tensors[source]
            dtype = plain_dtype(weight) or torch.bfloat16
            units.append(Unit(source, source, None, None, [TensorHeader(source, dtype, tuple(weight.shape))]))
    return units


def _split_shards(plan: list[Unit], shard_bytes: int) -> dict[str, list[Unit]]:
    """The weights of each file, by its name."""
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in plan:
        if shards[-1] and filled + unit.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.nbytes
    if len(shards) == 1:
        return {names.WEIGHTS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": units for i, units in enumerate(shards, 1)}


def _identify(source: Path, options: QuantizeOptions) -> str:
    """A hash of the source's files and of redraft's code, by name, size and time of change, and of the options."""
    files = [source] if source.is_file() else [path for path in source.iterdir() if path.is_file()]
    files += PROGRAM.rglob("*.py")
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
    text = json.dumps([state, asdict(options)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _remove_stale(target: Path, work: Path) -> None:
    """Removes the shards of another source, other options or another version. Those of a running process are locked."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.quantize-[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if path != work and pattern.fullmatch(path.name) and path.is_dir():
            with suppress(OSError), lock_folder(path):
                shutil.rmtree(path)


# 2. The shards


def _write_shards(
    work: Path, shards: dict[str, list[Unit]], tensors: Mapping[str, Tensor | StoredWeight], device: torch.device | str
) -> Generator[Quantized, None, dict[str, Projection]]:
    """Writes the shards that are not there yet. Yields progress; returns the counts of all projections."""
    total = sum(unit.nbytes for units in shards.values() for unit in units)
    done = 0
    # Counts by shard. A shard without counts was killed between two files, and is written again.
    counts: dict[str, Any] = read_json(work / STATISTICS) if (work / STATISTICS).exists() else {}
    for file_name, units in shards.items():
        if file_name in counts and (work / file_name).exists():
            done += sum(unit.nbytes for unit in units)
            yield Quantized(done, total)
            continue
        in_shard: dict[str, Projection] = {}
        headers = [header for unit in units for header in unit.headers]
        metadata = {"format": "pt", "save_id": secrets.token_hex(16)}  # see manifest.py
        with TensorFileWriter(work / file_name, headers, metadata) as file:
            for unit in units:
                projection = _write_unit(file, unit, tensors[unit.source], device)
                if unit.projection is not None:
                    in_shard.setdefault(unit.projection, Projection()).add(projection)
                done += unit.nbytes
                yield Quantized(done, total)
        counts[file_name] = {name: asdict(projection) for name, projection in in_shard.items()}
        write_json(work / STATISTICS, counts)
    statistics: dict[str, Projection] = {}
    for in_file in counts.values():
        for name, count in in_file.items():
            statistics.setdefault(name, Projection()).add(Projection(**count))
    return statistics


def _write_unit(file: TensorFileWriter, unit: Unit, weight: Tensor | StoredWeight, device: torch.device | str) -> Projection:
    """Writes the tensors of one weight, a few experts at a time."""
    projection = Projection(nbytes=unit.nbytes)
    if unit.to is None:
        (header,) = unit.headers
        file.write(unit.name, weight if isinstance(weight, Tensor) else weight.dequantize(header.dtype))
        return projection
    for index, piece in enumerate(split_stack(weight)):
        packed, error = pack_piece(piece, unit.to, parts=parts_of(unit.name), device=device)
        if isinstance(packed, Int4Tensor) and packed.minimum is not None:  # redraft writes symmetric integers
            assert not isinstance(piece, Tensor)
            packed, error = pack_piece(piece.dequantize(), unit.to, device=device)
        first_expert = index * EXPERTS_AT_ONCE
        for name, tensor in publish_packed(unit.name, packed, weight.shape[-1], first_expert, unit.scale_dtype):
            file.write(name, tensor)
        matrices = piece.shape[0] if len(piece.shape) == 3 else 1
        projection.add(_count(matrices, matrices * weight.shape[-1] * weight.shape[-2], error))
    if not math.isfinite(projection.squares):
        raise CheckpointError(f"tensor {unit.source} holds NaN or infinite numbers; the file is damaged: download it again")
    return projection


def _count(matrices: int, weights: int, error: RoundingError | None) -> Projection:
    if error is None:
        return Projection(weights=weights, matrices=matrices)
    return Projection(
        weights=weights,
        matrices=matrices,
        squares=float(error.squares),
        errors=float(error.errors),
        largest_block=float(error.largest_block),
        rounded=matrices,
    )


# 3. The folder


def _assemble(part: Path, work: Path, shards: dict[str, list[Unit]], source: OpenCheckpoint) -> None:
    """Fills the new folder: the shards, the index, the draft head, and the files of JSON."""
    for file_name in shards:
        try:
            os.link(work / file_name, part / file_name)
        except OSError:  # the file system has no hard links
            os.replace(work / file_name, part / file_name)
    units = [unit for units in shards.values() for unit in units]
    if len(shards) > 1:
        weight_map = {header.name: file for file, units in shards.items() for unit in units for header in unit.headers}
        write_json(part / names.INDEX, {"metadata": {"total_size": sum(u.nbytes for u in units)}, "weight_map": weight_map})
    draft_head: dict[str, Any] = {  # in full precision always
        name: source.tensors[name] for name in source.tensors if name.startswith(names.DRAFT_HEAD_PREFIX)
    }
    if draft_head:
        headers = [TensorHeader(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in draft_head.items()]
        with TensorFileWriter(part / names.DRAFT_HEAD, headers, {"format": "pt", "save_id": secrets.token_hex(16)}) as file:
            for name, tensor in draft_head.items():
                file.write(name, tensor)
    config = source.config
    assert isinstance(config, ModelConfig)
    dtype = next(unit.headers[0].dtype for unit in units if unit.name.endswith("embed_tokens.weight"))
    published = publish_model_config(config, str(dtype).removeprefix("torch."))
    formats = {unit.ours: unit.to for unit in units if unit.ours is not None and part_of(unit.ours) in QUANTIZED_PARTS}
    published["quantization_config"] = publish_quantization(config, formats)
    write_settings(part, published, source.sampler, source.tokenizer, is_causal_only=config.is_causal_only)
