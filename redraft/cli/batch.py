"""The command redraft batch REQUESTS.jsonl --out ANSWERS.jsonl: a model answers requests in OpenAI's batch format."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from redraft.cli.options import (
    Adapter,
    Context,
    Device,
    Dtype,
    GpuMemory,
    KeepBf16,
    Kv,
    Model,
    Quant,
    Ray,
    Threads,
    VerifyWith,
    Vision,
    Workers,
    check_workers,
)
from redraft.cli.warm import show_builds, show_loaded
from redraft.cluster.batch_file import error_result, find_answered, read_batch, to_items
from redraft.cluster.jobs import Item, OutputFile, Result, process_here, run_job

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def batch(
    file: Annotated[str, typer.Argument(help="Requests in OpenAI's batch format, one JSON object a line.")],
    out: Annotated[str, typer.Option("--out", "-o", help="Output file, one answer a line, as they finish.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue an existing output file.")] = False,
    model: Model = "",
    device: Device = None,
    threads: Threads = None,
    dtype: Dtype = None,
    quant: Quant = None,
    keep_bf16: KeepBf16 = False,
    verify_with: VerifyWith = None,
    kv: Kv = None,
    gpu_memory: GpuMemory = None,
    context: Context = None,
    vision: Vision = False,
    adapter: Adapter = None,
    ray: Ray = None,
    workers: Workers = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format: chat, completions, infills, schemas. See docs/batch.md."""
    lines = read_batch(Path(file))
    check_workers(ray, workers)
    with OutputFile(Path(out), resume=resume) as output:
        answered, kept_bytes = find_answered(output, lines, file)
        remaining = [line for line in lines if line.number not in answered]
        requests = to_items(remaining)
        errors = [error_result(line) for line in remaining if line.error is not None]
        loading = {"dtype": dtype, "quant": quant, "keep_bf16": keep_bf16, "verify_with": verify_with}
        memory = {"kv": kv, "gpu_memory": gpu_memory, "context": context, "vision": vision, "adapter": adapter}
        console = Console(stderr=True, highlight=False)
        if ray is None:
            processing = process_with_model(model, requests, console, device=device, **loading, **memory)
        else:
            processing = process_on_cluster(model, requests, ray, workers, device, threads, **loading, **memory)
        with processing as results:
            began = time.perf_counter()
            counts = run_job(
                chain(results, errors),
                output,
                [line.number for line in remaining],
                kept_bytes=kept_bytes,
                done=len(answered),
                what="requests",
                console=console,
            )
            console.print(summary(counts, len(answered), time.perf_counter() - began))


def process_with_model(
    model: str, requests: Sequence[Item], console: Console, **options: Any
) -> AbstractContextManager[Iterator[Result]]:
    """The answers of a model in this process. Nothing is loaded for a batch that has been answered."""
    from redraft import checkpoint, writer

    load_processor = import_processor()
    if not requests:
        return nullcontext(iter(()))
    checkpoint.find(model or writer.DEFAULT_MODEL)  # first: the status line would garble a download's progress bar
    with show_builds(console, message="loading"):
        processor = load_processor(model or writer.DEFAULT_MODEL, **options)
    show_loaded(processor.writer, console)
    return process_here(processor, requests)


def process_on_cluster(
    model: str,
    requests: Sequence[Item],
    ray: str,
    workers: int | None,
    device: str | None,
    threads: int | None,
    **options: Any,
) -> AbstractContextManager[Iterator[Result]]:
    """The answers of the workers of a Ray cluster. A model that this machine cannot find is refused here."""
    from redraft import checkpoint, writer
    from redraft.cluster.ray_connection import LOCAL
    from redraft.cluster.ray_data import CALLS_PER_WORKER, ClusterOptions, absolute_path, process_on_ray

    load_processor = import_processor()
    from redraft.cluster.batch_app import GROUP

    cluster = ClusterOptions(address=ray, workers=workers, device=device, threads=threads)
    config, _ = checkpoint.read_configs(checkpoint.find(model or writer.DEFAULT_MODEL, weights=False))
    checkpoint.check_quant(config, options["quant"], model)
    if ray == LOCAL and options["adapter"] is not None:
        checkpoint.find_adapter(options["adapter"])
    options |= {name: absolute_path(options[name]) for name in ("adapter", "verify_with")}
    load = partial(load_processor, absolute_path(model) or writer.DEFAULT_MODEL.name, **options)
    return process_on_ray(load, requests, cluster, group=GROUP, calls=CALLS_PER_WORKER)


def import_processor() -> Any:
    """The function that loads a model behind the server's routes. They need the extra `server`."""
    try:
        from redraft.cluster.batch_app import load_processor
    except ModuleNotFoundError as error:
        raise ValueError(f"redraft batch needs {error.name}: pip install 'redraft[server]'") from None
    return load_processor


def summary(counts: Counter[str], done: int, seconds: float) -> str:
    """The totals of a run in one line."""
    earlier = f" beside {done} of earlier runs" if done else ""
    return (
        f"{counts['answers']} answers{earlier}, {counts['errors']} of them errors; {seconds:.1f} s, "
        f"{counts['answers'] / max(seconds, 1e-9):.1f} answers/s, {counts['tokens'] / max(seconds, 1e-9):.0f} tokens/s"
    )
