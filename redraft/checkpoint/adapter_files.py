"""Adapters on disk, as peft writes and reads them: adapter_config.json and adapter_model.safetensors in one folder.

transformers has the two halves of the model as two stacks of modules with the same weights, so a pair that stands for both
halves is written twice. Read again, equal pairs of both halves become one. The safetensors metadata of our own files also
says for which base the adapter was trained, on what, and its scores; peft passes over it.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from redraft.checkpoint.find import PACKAGED
from redraft.checkpoint.names import ADAPTER_CONFIG, DECODER, ENCODER, GEMMA4, GEMMA4_TEXT, VISION
from redraft.checkpoint.tensor_file import save_tensors
from redraft.config import ConfigError, parse_json, read_json, require_int, require_number, show_value, write_text
from redraft.model.backbone import Backbone
from redraft.model.lora import (
    DENOISE,
    ENCODE,
    EXPERTS,
    MODULES,
    SELF_CONDITIONING,
    Adapter,
    AdapterConfig,
    AdapterError,
    LoraPair,
    MatrixShape,
    adaptable_matrices,
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PACKAGED_ADAPTERS = ("tiny-sudoku",)
METADATA = "redraft"  # the key of our own metadata in the safetensors header
PEFT_PREFIX = "base_model.model."
PREFIX_OF_HALF = {DENOISE: DECODER, ENCODE: ENCODER}
HALF_OF_PREFIX = {DECODER: DENOISE, ENCODER: ENCODE, GEMMA4.text: ENCODE, GEMMA4_TEXT.text: ENCODE}
TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(\.default)?\.weight")
MODULE_NAME = re.compile(r"(?P<start>\^?)(?P<name>\w+(\\?\.\w+)*)\$?")  # in a pattern of peft
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
# Settings of peft that change what an adapter computes, with the only value that redraft runs.
UNSUPPORTED = {
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "lora_bias": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "kasa_config": None,
}


def find_adapter(folder_or_name: str | Path) -> Path:
    """Returns the folder of an adapter. A name in PACKAGED_ADAPTERS means the adapter of that name in the package.

    The folder may be missing or hold no adapter: `read_adapter_config` refuses such a folder.
    """
    folder = Path(folder_or_name)
    is_packaged = str(folder_or_name) in PACKAGED_ADAPTERS and not (folder / ADAPTER_CONFIG).exists()
    return PACKAGED / folder if is_packaged else folder


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter."""
    return (find_adapter(folder) / ADAPTER_CONFIG).is_file()


def fingerprint(model: Backbone) -> str:
    """A hash of the model's norms, which no format quantizes: the same for a checkpoint in bf16, fp8, 4 bits and GGUF."""
    return hash_norms({name: weight for name, weight in model.state_dict().items() if is_norm(name)})


def is_norm(name: str) -> bool:
    """Whether a tensor of a model is one that its fingerprint covers."""
    return name.endswith("norm.weight") or "layernorm" in name


def hash_norms(weights: Mapping[str, Tensor]) -> str:
    """The fingerprint of a model with these norms."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# 1. Write


def save_adapter(
    adapter: Adapter,
    folder: str | Path,
    *,
    base: str,
    metadata: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes an adapter, which peft loads. Each of the two files is replaced as a whole, the weights first.

    `base` is the name of its base model. The configuration of an adapter does not change while it is trained, so old
    settings fit new weights.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    with_experts = {
        module: {m for _, m, _ in adapter.pairs() if m.startswith(module)} for module in _expert_modules(adapter)
    }
    for half, matrix, pair in adapter.pairs():
        module, a, b = matrix, pair.a.detach(), pair.b.detach()
        if a.dim() == 3:
            module, _, last = matrix.rpartition(".")
            is_inner = last == "gate_up_proj" and len(with_experts[module]) == 2  # peft wraps the wrapped parameter
            module += ".base_layer" if is_inner else ""
            a = a.flatten(0, 1)  # [E * R, I]
            b = b.permute(1, 2, 0).flatten(1)  # [O, R * E]: peft has the experts innermost
        name = f"{PEFT_PREFIX}{PREFIX_OF_HALF[half]}{module}"
        tensors[f"{name}.lora_A.weight"] = a.to("cpu", dtype).contiguous().clone()
        tensors[f"{name}.lora_B.weight"] = b.to("cpu", dtype).contiguous().clone()
    part = folder / f"{ADAPTER_WEIGHTS}.part"
    save_tensors(tensors, part, {"format": "pt", METADATA: json.dumps({"base": base, **(metadata or {})})})
    part.replace(folder / ADAPTER_WEIGHTS)
    write_text(folder / ADAPTER_CONFIG, json.dumps(publish_adapter_config(adapter, base), indent=2) + "\n")
    return folder


def _expert_modules(adapter: Adapter) -> set[str]:
    return {matrix.rpartition(".")[0] for _, matrix, _ in adapter.pairs() if matrix.endswith(EXPERTS)}


def publish_adapter_config(adapter: Adapter, base: str) -> dict[str, Any]:
    """The settings as peft reads them. Matrices are named one by one, since other modules have the same last names."""
    modules: list[str] = []
    parameters: list[str] = []
    for half, matrix, _ in adapter.pairs():
        (parameters if matrix.endswith(EXPERTS) else modules).append(PREFIX_OF_HALF[half] + matrix)
    # peft nests the wrappers of a module in this order: gate_up_proj inside, down_proj outside.
    parameters.sort(key=lambda name: (name.rpartition(".")[0], name.endswith("down_proj")))
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": adapter.cfg.rank,
        "lora_alpha": adapter.cfg.alpha,
        "lora_dropout": 0.0,  # of no effect in use, and peft refuses any other with experts
        "use_rslora": adapter.cfg.rank_stabilized,
        "target_modules": "|".join(map(re.escape, modules)) or None,
        "target_parameters": parameters or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "task_type": None,
    }


# 2. Read


def read_adapter_metadata(folder: str | Path) -> dict[str, Any]:
    """The metadata that redraft writes beside the weights: base, data, scores. An adapter of peft has none."""
    with open_adapter(folder) as file:
        raw = (file.metadata() or {}).get(METADATA, "{}")
    try:
        metadata = parse_json(raw)
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict):
        raise AdapterError(f"{Path(folder) / ADAPTER_WEIGHTS} has damaged metadata")
    return metadata


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """The settings of an adapter that redraft can run; refuses others."""
    path = find_adapter(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise AdapterError(f"{folder} holds no adapter: it has no {ADAPTER_CONFIG}")
    raw = read_json(path)
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path} is of the kind {show_value(kind)}; redraft runs LORA")
    for name, only in UNSUPPORTED.items():
        if raw.get(name, only) not in (only, None, [], {}):
            raise AdapterError(f"{path} has {name} {show_value(raw[name])}, which redraft does not run; train without it")
    require_int("r", raw.get("r"))
    require_number("lora_alpha", raw.get("lora_alpha"))
    for name in ("alpha_pattern", "rank_pattern"):
        if not isinstance(raw.get(name) or {}, dict):
            raise AdapterError(f"{path}: {name} is {show_value(raw[name])}, not an object")
    return raw


def load_adapter(folder: str | Path, model: Backbone, name: str = "adapter") -> Adapter:
    """Loads an adapter for this model, in its precision and on its device. Refuses one of another base or another shape."""
    folder = find_adapter(folder)
    settings = read_adapter_config(folder)
    metadata = read_adapter_metadata(folder)
    expected = metadata.get("fingerprint")
    if expected is not None and expected != fingerprint(model):
        raise AdapterError(
            f"{folder} was trained for another model, {show_value(metadata.get('base'))}: load it with that one"
        )
    shapes = adaptable_matrices(model.config)
    halves: dict[tuple[str, str], dict[str, Tensor]] = {}
    stored = _read_tensors(folder)
    for tensor_name, tensor in stored.items():
        place = _find_matrix(tensor_name, stored, shapes, folder)
        if place is not None:
            half, matrix, part = place
            halves.setdefault((half, matrix), {})[part] = tensor
    pairs: dict[tuple[str, str], LoraPair] = {}
    for (half, matrix), tensors in halves.items():
        if set(tensors) != {"A", "B"}:
            raise AdapterError(f"{folder} has only one of the two tensors of {matrix}")
        a, b = _to_stacks(tensors["A"], tensors["B"], shapes[matrix])
        _check_shape(a, b, matrix, shapes[matrix], folder)
        scale = _find_scale(settings, half, matrix, a.shape[-2])
        pairs[half, matrix] = LoraPair(a.to(model.device, model.dtype), b.to(model.device, model.dtype), scale)
    if not pairs:
        raise AdapterError(f"{folder} has no tensor for a matrix of this model")
    adapter = Adapter(_tie(pairs), _describe(pairs, settings), name)
    adapter.metadata = metadata
    return adapter.eval().requires_grad_(False)


def open_adapter(folder: str | Path) -> Any:
    """Maps the weights of an adapter and reads their header."""
    path = find_adapter(folder) / ADAPTER_WEIGHTS
    if not path.is_file():
        raise AdapterError(f"{folder} has no {ADAPTER_WEIGHTS}; redraft reads safetensors only")
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    with open_adapter(folder) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
    for name, tensor in tensors.items():
        if tensor.dtype not in PRECISIONS:
            raise AdapterError(f"{folder}: tensor {name[:200]} is {tensor.dtype}; redraft reads float32, bf16 and float16")
        if not tensor.isfinite().all():
            raise AdapterError(f"{folder}: tensor {name[:200]} holds NaN or infinite numbers; the file is damaged")
    return tensors


def _find_matrix(
    name: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, MatrixShape], folder: Path
) -> tuple[str, str, str] | None:
    """The half, the matrix and the part ("A" or "B") of a tensor; None for vision weights, which redraft does not run."""
    published = name.removeprefix(PEFT_PREFIX)
    if published.startswith(VISION):
        return None
    match = TENSOR.fullmatch(published)
    for prefix, half in HALF_OF_PREFIX.items():
        if match is None or not published.startswith(prefix):
            continue
        matrix = match["module"].removeprefix(prefix).removesuffix(".base_layer")
        if matrix.endswith(".experts"):
            a, b = (tensors.get(re.sub(r"\.lora_[AB]", f".lora_{part}", name)) for part in "AB")
            matrix = _find_expert_matrix(matrix, a, b, shapes)
        if matrix in shapes:
            return half, matrix, match["part"]
        if f"{matrix}.down_proj" in shapes:
            raise AdapterError(
                f"{folder} was made for a model of another shape: {name[:200]} is {list(tensors[name].shape)}"
            )
    raise AdapterError(f"{folder} has a tensor for which this model has no matrix: {name[:200]}")


def _find_expert_matrix(module: str, a: Tensor | None, b: Tensor | None, shapes: Mapping[str, MatrixShape]) -> str:
    """Which of a layer's two stacks a pair belongs to. Its name does not tell: peft wraps one wrapper in the other.

    One of the two tensors may fit both stacks, but not both of them.
    """
    for last in ("gate_up_proj", "down_proj"):
        shape = shapes.get(f"{module}.{last}")
        if shape is None or any(tensor is not None and tensor.dim() != 2 for tensor in (a, b)):
            continue
        experts = shape.experts or 1
        fits_a = a is None or (a.shape[1] == shape.inputs and len(a) % experts == 0)
        fits_b = b is None or (len(b) == shape.outputs and b.shape[1] % experts == 0)
        if fits_a and fits_b:
            return f"{module}.{last}"
    return module


def _to_stacks(a: Tensor, b: Tensor, shape: MatrixShape) -> tuple[Tensor, Tensor]:
    """The two tensors with an axis for the experts, where the matrix has one."""
    if shape.experts is None or a.dim() != 2 or b.dim() != 2:
        return a, b
    if len(a) % shape.experts or b.shape[1] % shape.experts:
        return a, b
    return a.unflatten(0, (shape.experts, -1)), b.unflatten(1, (-1, shape.experts)).permute(2, 0, 1).contiguous()


def _check_shape(a: Tensor, b: Tensor, matrix: str, shape: MatrixShape, folder: Path) -> None:
    stack = () if shape.experts is None else (shape.experts,)
    rank = a.shape[-2] if a.dim() >= 2 else 0
    if tuple(a.shape) != (*stack, rank, shape.inputs) or tuple(b.shape) != (*stack, shape.outputs, rank) or not rank:
        raise AdapterError(
            f"{folder} was made for a model of another shape: its pair for {matrix} is {list(a.shape)} and {list(b.shape)}, "
            f"the matrix is {[*stack, shape.outputs, shape.inputs]}"
        )


def _find_scale(settings: Mapping[str, Any], half: str, matrix: str, rank: int) -> float:
    """The factor of a pair. As in peft, the first name counts that is the module's, or the end of it.

    peft takes names as regular expressions. One of a stranger's can run for hours, so only names without operators are read.
    """
    modules = [prefix + matrix for prefix, other in HALF_OF_PREFIX.items() if other == half]
    alpha = settings["lora_alpha"]
    is_found = False
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        match = MODULE_NAME.fullmatch(pattern)
        if match is None:
            raise AdapterError(
                f"alpha_pattern has {show_value(pattern)}, and redraft reads names of modules only, such as q_proj or "
                "layers.0.self_attn.q_proj: write the regular expression out as names"
            )
        name = match["name"].replace("\\.", ".")
        is_end = not match["start"] and any(module.endswith(f".{name}") for module in modules)
        if not is_found and (is_end or name in modules):
            alpha = require_number("alpha_pattern", value)
            is_found = True
    return float(alpha) / (rank**0.5 if settings.get("use_rslora") else rank)


def _tie(pairs: dict[tuple[str, str], LoraPair]) -> dict[tuple[str, str], LoraPair]:
    """Makes equal pairs of both halves one object."""
    tied = dict(pairs)
    for (half, matrix), pair in pairs.items():
        other = pairs.get((ENCODE, matrix))
        if half == ENCODE or other is None or pair.scale != other.scale:
            continue
        if torch.equal(pair.a, other.a) and torch.equal(pair.b, other.b):
            tied[ENCODE, matrix] = pair
    return tied


def _describe(pairs: Mapping[tuple[str, str], LoraPair], settings: Mapping[str, Any]) -> AdapterConfig:
    """The configuration of a loaded adapter."""
    matrices = {matrix for _, matrix in pairs}
    targets = [target for target, modules in MODULES.items() if any(matrix.endswith(modules) for matrix in matrices)]
    if matrices & set(SELF_CONDITIONING):
        targets = [t for t in targets if t != "dense" or any(m.startswith("layers.") for m in matrices)]
        targets.append("self_conditioning")
    found = {half for half, matrix in pairs if matrix not in SELF_CONDITIONING} or {DENOISE}
    layers = sorted({int(matrix.split(".")[1]) for matrix in matrices if matrix.startswith("layers.")})
    try:
        return AdapterConfig(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            targets=tuple(targets),
            layers=tuple(layers) or None,
            halves="both" if len(found) == 2 else found.pop(),
            rank_stabilized=bool(settings.get("use_rslora")),
        )
    except ConfigError as error:
        raise AdapterError(str(error)) from None
