"""Published checkpoints in and out: one table of names, memory-mapped reading, atomic writing.

Knows files and the model's shape; nothing of sampling. A checkpoint is a folder with config.json, generation_config.json,
model.safetensors (or shards and an index) and tokenizer files. Our tensor names are the published ones without their
prefix, except the encoder's layer scalars, the only text weights that exist twice. Vision weights are not ours to run.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from redraft.config import GENERATION, OURS, SMALLEST_VISION, ModelConfig, SamplerConfig, read_json
from redraft.kernels.fp8 import EIGHT
from redraft.model import quant
from redraft.model.diffusion_gemma import DiffusionGemma

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DECODER, ENCODER = "model.decoder.", "model.encoder.language_model."
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
SHARD_BYTES = 5 * 10**9
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


PACKAGED = Path(__file__).with_name("weights")
SHIPPED = ("tiny", "sudoku")  # models in the package


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or found; the message names the file or tensor."""


def published_name(ours: str) -> str:
    """The table: our name of a tensor -> the published one."""
    if ours.endswith("encoder_layer_scalar"):
        return ENCODER + ours.replace("encoder_layer_scalar", "layer_scalar")
    return DECODER + ours


def tied_name(published: str) -> str | None:
    """The tensor that a duplicate repeats: lm_head is the embedding, the encoder's text weights are the decoder's."""
    if published == "lm_head.weight":
        return DECODER + "embed_tokens.weight"
    if published.startswith(ENCODER) and not published.endswith("layer_scalar"):
        return DECODER + published.removeprefix(ENCODER)
    return None


def find(path_or_id: str | Path, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: a local one, one in the package by its name ("tiny"), or a hub id, downloaded once.

    Without weights only the small files are fetched.
    """
    try:
        folder = Path(path_or_id).expanduser()
    except RuntimeError as error:  # ~nobody
        raise CheckpointError(f"there is no folder {str(path_or_id)!r}: {error}") from None
    if str(path_or_id) in SHIPPED and not (folder / CONFIG).exists():
        return PACKAGED / str(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{path_or_id} is a file; give the folder that holds config.json and the weights")
    name = str(path_or_id).removeprefix("https://").removeprefix("hf.co/").removeprefix("huggingface.co/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise CheckpointError(f"there is no folder {str(path_or_id)!r}, and it is not a hub id (OWNER/NAME)")
    return _download(name, ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])])


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # whatever the network, a proxy or the hub may do: the user can only try again
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{name!r} is no folder here, and the hub could not give it: {reason}") from None


class Tensors(Mapping[str, Tensor]):
    """A folder's tensors by published name, memory-mapped: nothing is read until it is used."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files, self._file_of = folder, {}, {}
        for file in self._listed():
            try:
                self._files[file] = safe_open(folder / file, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(f"{folder / file} is missing") from None
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / file} is damaged or cut short ({error}); download it again") from None
            self._file_of |= dict.fromkeys(self._files[file].keys(), file)

    def _listed(self) -> list[str]:
        if not (self.folder / INDEX).exists():
            return [WEIGHTS]
        listed = read_json(self.folder / INDEX).get("weight_map")
        files = list(listed.values()) if isinstance(listed, dict) else [None]
        if wrong := [file for file in files if not isinstance(file, str) or file != Path(file).name]:
            raise CheckpointError(f"{self.folder / INDEX} is not an index of files in its folder: it names {wrong[0]!r}")
        return sorted(set(files))

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._file_of[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def load_config(folder: str | Path) -> ModelConfig:
    """The shape of the model in a folder."""
    return ModelConfig.from_json(Path(folder) / CONFIG)


def load_model(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> DiffusionGemma:
    """The model in a folder. Without a dtype, weights stay as stored and, on a CPU, are used from the mapped file."""
    config = load_config(folder)
    tensors: Mapping[str, Tensor] = Tensors(Path(folder))
    return from_state_dict(config, quant.Fused(tensors) if config.quant else tensors, dtype=dtype, device=device)


def laid_out(model: DiffusionGemma) -> DiffusionGemma:
    """A float32 model's matrices with their columns together, as a CPU without bf16 multiplies fastest: the same numbers.

    The embedding is read both ways and stays, as do experts that are so few that all of them are read at once.
    """
    for name, weight in model.named_parameters():
        few = weight.dim() == 3 and len(weight) * model.config.moe_intermediate_size <= model.config.hidden_size
        if weight.dim() >= 2 and weight.dtype == torch.float32 and not few and name != "embed_tokens.weight":
            weight.data = weight.data.mT.contiguous().mT
    return model


def from_state_dict(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> DiffusionGemma:
    """A model whose weights are these published tensors; built without memory of its own."""
    with torch.device("meta"):
        model = DiffusionGemma(config)
        model = quant.apply_fp8(model) if config.quant else model
    table = {ours: published_name(ours) for ours in model.state_dict()}
    _refuse_strangers(tensors, set(table.values()))
    weights: dict[str, Tensor] = {}
    for ours, wanted in model.state_dict().items():
        weights[ours] = _fetch(tensors, table[ours], wanted)
        packed = wanted.dtype == EIGHT or quant.is_scale(ours)
        kind = wanted.dtype if packed else dtype or weights["embed_tokens.weight"].dtype
        weights[ours] = weights[ours].to(device=device, dtype=kind)
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _fetch(tensors: Mapping[str, Tensor], name: str, wanted: Tensor) -> Tensor:
    if name not in tensors and name.startswith(ENCODER):
        name = DECODER + name.removeprefix(ENCODER)  # some trainers drop the encoder's scalars; they were released equal
    if name not in tensors:
        raise CheckpointError(f"the checkpoint has no tensor {name}")
    tensor = tensors[name]
    if tensor.shape != wanted.shape:
        asked = list(wanted.shape)
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}, the configuration asks for {asked}")
    if (tensor.dtype == EIGHT) != (wanted.dtype == EIGHT) or tensor.dtype not in (*PRECISIONS, EIGHT):
        raise CheckpointError(f"tensor {name} is {tensor.dtype}; redraft reads {', '.join(map(str, PRECISIONS))}")
    return tensor


def _refuse_strangers(tensors: Mapping[str, Tensor], known: set[str]) -> None:
    for name in tensors:
        if name in known or name.startswith(VISION):
            continue
        twin = tied_name(name)
        if twin not in known:
            raise CheckpointError(f"the checkpoint has a tensor that this model does not: {name}")
        if twin in tensors and not torch.equal(tensors[name], tensors[twin]):
            raise CheckpointError(f"{name} differs from {twin}, which it should repeat; redraft runs tied weights only")


def save(
    model: DiffusionGemma,
    folder: str | Path,
    *,
    sampler: SamplerConfig | None = None,
    vision_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes a checkpoint that transformers loads. Vision weights are carried over from a folder, else left out.

    Each file appears whole or not at all, the configuration last.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {published_name(name): tensor for name, tensor in model.state_dict().items()}
    tensors = quant.unfused(tensors) if model.config.quant else tensors
    config = model.config.to_published(str(model.dtype).removeprefix("torch."))
    if model.config.quant:
        config["quantization_config"] = quant.published(model.config.num_hidden_layers)
    if vision_from is not None:
        source = Tensors(Path(vision_from))
        tensors |= {name: source[name] for name in source if name.startswith(VISION)}
        config["vision_config"] = dict(load_config(vision_from).vision)
    else:
        config["vision_config"] = dict(SMALLEST_VISION)
        tensors |= _smallest_vision(model.config.hidden_size, model.dtype)
    _write_weights(tensors, folder, shard_bytes)
    sampler = sampler or SamplerConfig.from_published({}, model.config)
    generation, ours = sampler.to_published()
    for name, content in ((GENERATION, generation), (OURS, ours), (CONFIG, config)):
        write_text(folder / name, json.dumps(content, indent=2) + "\n")
    return folder


def _smallest_vision(hidden: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The three tensors of a vision tower without layers, so that transformers finds nothing missing."""
    size = SMALLEST_VISION["hidden_size"]
    return {
        VISION[1] + "embedding_projection.weight": torch.zeros(hidden, size, dtype=dtype),
        VISION[0] + "patch_embedder.input_proj.weight": torch.zeros(size, 3 * 16 * 16, dtype=dtype),
        VISION[0] + "patch_embedder.position_embedding_table": torch.zeros(2, 1, size, dtype=dtype),
    }


def _write_weights(tensors: dict[str, Tensor], folder: Path, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor.detach().cpu().contiguous()
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / (name + ".part"), metadata={"format": "pt"})
        os.replace(folder / (name + ".part"), folder / name)
    where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    if len(shards) > 1:
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in names and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", old.name):
            old.unlink()  # shards of an earlier save; no index lists them any more


def with_vision(folder: Path) -> Path | None:
    """The folder, if its checkpoint has vision weights worth carrying along."""
    return folder if any(name.startswith(VISION) for name in Tensors(folder)) else None


def write_text(path: Path, text: str) -> None:
    """Replaces a file whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
