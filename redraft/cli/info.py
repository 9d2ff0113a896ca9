"""The command redraft info: a checkpoint's shape, how it generates text, formats and memory, and what runs here.

Of an adapter it tells the base, what it reaches, and what it was trained on.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from redraft.cli.terminal import strip_control_characters
from redraft.config import FAMILIES, BackboneConfig, LlamaConfig, ModelConfig, SamplerConfig

if TYPE_CHECKING:
    from redraft.checkpoint import AdapterSummary, PartSize


def info(
    folder_or_id: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="Checkpoint or adapter folder, GGUF file, pulled model, or hub id. [the released 26B-A4B shape]",
        ),
    ] = "",
    model: Annotated[str, typer.Option("--model", "-m", help="The same.")] = "",
) -> None:
    """Show a checkpoint's shape, its memory by format, and which kernels run on this machine; or what an adapter is."""
    from redraft import checkpoint

    if folder_or_id and model:
        raise ValueError(f"name one model, got {folder_or_id} and {model}")
    model = model or folder_or_id
    console = Console(highlight=False)
    if model and checkpoint.is_adapter(model) and not (Path(model) / "config.json").exists():
        console.print(model, style="bold", markup=False)
        console.print(_adapter_table(checkpoint.summarize_adapter(model)))
        return
    if model and checkpoint.is_drafter(model):
        console.print(model, style="bold", markup=False)
        console.print(_drafter_table(Path(model)))
        return
    config: BackboneConfig = ModelConfig()
    sampler = SamplerConfig()
    stored = None
    parts: list[PartSize] = []
    drafters: list[Path] = []
    if model:
        folder = checkpoint.find(model, weights=False)
        config, sampler = checkpoint.read_configs(folder)
        files = [folder] if checkpoint.is_gguf(folder) else folder.glob("*.safetensors")
        stored = sum(file.stat().st_size for file in files)
        if stored:  # a hub id is shown without its weights
            tensors = checkpoint.open_weights(folder)[1]
            parts = checkpoint.measure_parts(tensors, config)
            drafters = checkpoint.find_drafters(config, tensors)
    for folder in drafters:
        sampler = checkpoint.drafting_sampler(sampler, config, checkpoint.read_drafter_config(folder)[0])
    console.print(model or "DiffusionGemma 26B-A4B (released shape)", style="bold", markup=False)
    console.print(_shape_table(config))
    console.print(_generation_table(sampler))
    for folder in drafters:
        console.print(_drafter_table(folder))
    if parts:
        console.print(_stored_table(parts))
    console.print(_memory_table(config, stored))
    console.print(_machine_table())


def _adapter_table(summary: AdapterSummary) -> Table:
    """What an adapter is, and what its metadata says about its training. Every entry of the metadata may be missing."""
    metadata = summary.metadata
    table = Table("adapter", "", box=None, pad_edge=False)
    data = metadata.get("data")
    trained = {name: metadata[name] for name in ("records", "steps", "tokens") if isinstance(metadata.get(name), int)}
    rows = {
        "base": summary.base or "not named",
        "rank": f"{summary.rank}, alpha {summary.alpha:g}",
        "targets": ", ".join(summary.targets),
        "layers": _ranges(summary.layers) or "none",
        "halves": summary.halves,
        "parameters": f"{_si(summary.parameters)}".strip(),
        "file": _si(summary.nbytes, "B"),
        "data": ", ".join(map(str, data)) if isinstance(data, list) else "",
        **{name: f"{value:,}" for name, value in trained.items()},
    }
    for name, score in _flatten(metadata.get("scores")):
        rows[name] = f"{score:.4f}" if isinstance(score, float) else str(score)
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(strip_control_characters(value)))
    return table


def _drafter_table(folder: Path) -> Table:
    """What a drafter or a page adapter is, and how well it does its work."""
    from redraft import checkpoint
    from redraft.model.page import PageConfig

    cfg, settings = checkpoint.read_drafter_config(folder)
    if isinstance(cfg, PageConfig):
        table = Table("page adapter", "", box=None, pad_edge=False)
        sizes = {"canvas lengths": ", ".join(map(str, cfg.canvas_lengths))}
    else:
        table = Table("drafter", "", box=None, pad_edge=False)
        sizes = {"draft head": f"{cfg.head_size:,}", "longest draft": f"{cfg.canvas_length - 1} tokens"}
    rows = {
        "base": settings["base"],
        "rank": f"{cfg.rank}, alpha {cfg.alpha:g}",
        **sizes,
        "file": _si(sum(file.stat().st_size for file in folder.glob("*.safetensors")), "B"),
        **{name: f"{settings[name]:,}" for name in ("steps", "tokens") if isinstance(settings.get(name), int)},
    }
    for name, score in _flatten(settings.get("scores")):
        rows[name] = f"{score:.4f}" if isinstance(score, float) else str(score)
    for name, value in rows.items():
        table.add_row(name, Text(strip_control_characters(value)))
    return table


def _ranges(numbers: tuple[int, ...]) -> str:
    """Numbers in order, with runs of them as 3-7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _flatten(scores: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, score); nested names are joined by a space."""
    for name, value in scores.items() if isinstance(scores, dict) else ():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name} ".replace("_", " "))
        else:
            yield f"{prefix}{name}".replace("_", " "), value


def _shape_table(config: BackboneConfig) -> Table:
    counts = config.parameter_counts()
    table = Table("configuration", "", box=None, pad_edge=False)
    family = FAMILIES[config.family] if isinstance(config, LlamaConfig) else "standard Gemma 4"
    sliding = sum(kind == "sliding_attention" for kind in config.layer_types)
    windows = f" ({sliding} with a window of {config.sliding_window:,}, the rest full)" if sliding else ""
    heads = f"{config.num_attention_heads}; key-value {config.num_key_value_heads} x {config.head_dim}"
    layer = {"MLP": f"{config.intermediate_size:,}"}
    if isinstance(config, ModelConfig):
        heads += f", in full layers {config.num_global_key_value_heads} x {config.global_head_dim}"
        layer = {
            "experts": f"{config.num_experts} of {config.moe_intermediate_size:,}, {config.top_k_experts} at a time; "
            f"dense {config.intermediate_size:,}"
        }
    rows = {
        "kind": f"causal-only ({family}): writes left to right" if config.is_causal_only else "diffusion",
        "vocabulary": f"{config.vocab_size:,}",
        "model size": f"{config.hidden_size:,}",
        "layers": f"{config.num_hidden_layers}{windows}",
        "heads": heads,
        **layer,
        "canvas": "none" if config.is_causal_only else f"{config.canvas_length:,} tokens",
        "context": f"{config.max_position_embeddings:,} tokens",
        "parameters": f"{_si(counts['total'])}, {_si(counts['active'])} active",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for name, count in counts.items():
        if count and name not in ("total", "active"):
            table.add_row(f"  {name}", _si(count))
    return table


def _generation_table(sampler: SamplerConfig) -> Table:
    """How an answer is generated unless the user says otherwise."""
    table = Table("generation", "", box=None, pad_edge=False)
    meanings = {
        "off": "off: canvases are denoised, and nothing checks them",
        "checked": f"checked: drafted in {sampler.draft_steps} steps, corrected by the causal half",
        "exact": "exact: the text of autoregressive sampling, in fewer forwards",
    }
    is_plain = sampler.check == "exact" and sampler.draft_length == 0
    table.add_row("check", "exact, without drafts: one token after another" if is_plain else meanings[sampler.check])
    if sampler.check == "checked":
        table.add_row("tolerance", f"{sampler.tolerance:g} nats")
    if sampler.check != "off":
        table.add_row("temperature", f"{sampler.temperature:g}, of the causal half")
        table.add_row("draft length", f"{sampler.draft_length} tokens")
    table.add_row("max tokens", f"{sampler.max_new_tokens:,}")
    if sampler.canvas_lengths:
        table.add_row("canvas lengths", f"{', '.join(map(str, sampler.canvas_lengths))}: the shortest that holds the answer")
    return table


def _stored_table(parts: list[PartSize]) -> Table:
    """The formats of a checkpoint by part, as its files say."""
    table = Table("stored", "weights", "format", "bits", "bytes", box=None, pad_edge=False)
    for size in parts:
        table.add_row(size.part, _si(size.weights), size.format, f"{size.bits:.2f}", _si(size.nbytes, "B"))
    weights = sum(size.weights for size in parts)
    nbytes = sum(size.nbytes for size in parts)
    table.add_row("total", _si(weights), "", f"{8 * nbytes / weights:.2f}", _si(nbytes, "B"))
    return table


def _memory_table(config: BackboneConfig, stored: int | None) -> Table:
    """Memory of the weights by format. Embedding, norms, router and self-conditioning stay bf16 in all published formats."""
    counts = config.parameter_counts()
    full, sliding = config.kv_bytes_per_token()
    table = Table("memory", "", box=None, pad_edge=False)
    if stored:
        table.add_row("on disk", _si(stored, "B"))
    table.add_row("bf16", _si(2 * counts["total"], "B"))
    if isinstance(config, ModelConfig):
        kept = sum(counts[name] for name in ("embedding", "router", "self-conditioning", "norms and scalars"))
        linear = counts["total"] - kept
        table.add_row("fp8 layers", _si(2 * kept + linear, "B"))
        in_experts = counts["experts"]
        table.add_row("4-bit experts (NVFP4)", _si(2 * (counts["total"] - in_experts) + in_experts * 9 / 16, "B"))
        table.add_row("4-bit layers", _si(2 * kept + linear * 9 / 16, "B"))
    else:
        table.add_row("float32", _si(4 * counts["total"], "B"))
    windows = f", and {_si(sliding * (config.sliding_window - 1), 'B')} of windows" if sliding else ""
    table.add_row("cache", f"{full / 1024:,.0f} KiB a token{windows}")
    return table


def _machine_table() -> Table:
    import torch

    from redraft.kernels import backend
    from redraft.kernels.scaled_mm import select_product
    from redraft.kernels.triton.tiles import describe_tiles

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    table = Table("here", "", box=None, pad_edge=False)
    table.add_row("python, torch", f"{platform.python_version()}, {torch.__version__}")
    table.add_row("cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    table.add_row("gpu", gpu)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    fast, why = backend.select_backend(place)
    table.add_row("runs on", f"{place}, {'kernels of our own' if fast else 'every operation in plain PyTorch'} ({why})")
    operations = dict(backend.OPERATIONS)
    if fast and place == "cuda":
        device = backend.select_device(place)
        table.add_row("tiles", describe_tiles(backend.select_card(device)))
        operations["fp8 products"] = str(select_product(device))
    for operation, by in operations.items():
        table.add_row(f"  {operation}", by if fast else "PyTorch")
    return table


def _si(count: float, unit: str = "") -> str:
    for scale, letter in ((1e12, "T"), (1e9, "G" if unit else "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.2f} {letter}{unit}"
    return f"{count:.0f} {unit}"
