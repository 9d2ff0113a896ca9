"""Ray Data: the items of a job are processed by workers of a Ray cluster, each with a model and, if there are any, a GPU.

    items -> blocks of `group` items -> [pool of actors, each with a Processor] -> results, to the process that asked

Ray Data restarts a worker that dies and gives its blocks to others, as often as that happens. Nothing but the process that
asked writes the output (`jobs.run_job`), so each item has one result there. Ray is imported inside of functions: redraft
works without it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.cluster.jobs import Item, Processor, Result
from redraft.cluster.ray_connection import LOCAL, connect

ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}", re.ASCII)
CALLS_PER_WORKER = 3  # blocks that a worker has at once: while the last items of one are processed, others have begun


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Which cluster a job runs on, and how its workers run."""

    address: str  # "local" starts Ray on this machine
    workers: int | None = None
    device: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_address(self.address)
        if self.device not in (None, "cpu", "cuda"):
            message = "Ray chooses the GPU of each worker: give cpu, cuda or nothing"
            raise ValueError(f"--device {self.device} cannot be had with --ray: {message}")


def check_address(address: str) -> None:
    """Refuses what is no address of a cluster, and any if Ray is not installed."""
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("pyarrow") is None:
        raise ValueError("--ray needs Ray with Ray Data: pip install 'redraft[cluster]'")
    if address != LOCAL and not ADDRESS.fullmatch(address):
        raise ValueError(f"--ray is local or the HOST:PORT of a running cluster's head, got {address!r}")


def absolute_path(name: str | None) -> str | None:
    """A file or folder of the user by its whole path: workers run in other folders. Hub ids and packaged names stay."""
    return str(Path(name).absolute()) if name and Path(name).exists() else name


@contextmanager
def process_on_ray(
    load: Callable[..., Processor],
    items: Sequence[Item],
    cluster: ClusterOptions,
    *,
    group: int,
    in_order: bool = False,
    calls: int = 1,
) -> Iterator[Iterator[Result]]:
    """The results of processors on a cluster.

    Every worker calls `load(device=...)` once; it must be picklable. A worker processes `group` items at a time, in
    `calls` threads at once.
    """
    if not items:
        yield iter(())
        return
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # a worker is restarted without a page of text
    connect(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    count, resources = plan_workers(nodes, cluster.workers, cluster.device)
    blocks = -(-len(items) // group)
    pool = {"size": min(count, blocks), "max_concurrent_calls_per_actor": calls, "enable_true_multi_threading": True}
    worker = (load, cluster.device, cluster.threads)
    with closing(_stream_results(worker, items, blocks, pool, resources, in_order=in_order)) as results:
        yield results
    # Not after an error, which is to be printed first: Ray has ended the process in its shutdown. It shuts down at exit too.
    ray.shutdown()


def plan_workers(nodes: Sequence[dict[str, float]], workers: int | None, device: str | None) -> tuple[int, dict[str, Any]]:
    """The number of workers and what each takes, for machines with these resources."""
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if device == "cuda" and not gpus:
        raise ValueError("--device cuda needs a GPU, and the Ray cluster has none")
    if gpus and device != "cpu":
        if workers is not None and workers > gpus:
            raise ValueError(f"--workers {workers} needs as many GPUs, and the Ray cluster has {gpus}: give fewer")
        return workers or gpus, {"num_gpus": 1, "num_cpus": 0}
    cores = [node["CPU"] for node in nodes if node.get("CPU", 0) >= 1]
    if not cores:
        raise ValueError("the Ray cluster has no machine with a GPU or a processor to work on")
    count = workers or len(cores)
    per_machine = -(-count // len(cores))
    share = min(cores) / per_machine
    return count, {"num_cpus": int(share) if share >= 1 else share}


def _stream_results(
    worker: tuple[Any, ...],
    items: Sequence[Item],
    blocks: int,
    pool: dict[str, Any],
    resources: dict[str, Any],
    *,
    in_order: bool,
) -> Generator[Result]:
    """Yields results as blocks are finished. `worker` are the arguments of _Worker."""
    import ray
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # the job has one
    context.execution_options.preserve_order = in_order
    rows = ray.data.from_items(
        [{"number": item.number, "text": item.text} for item in items], override_num_blocks=blocks
    ).map_batches(
        _Worker,
        fn_constructor_args=worker,
        batch_size=None,  # a block
        compute=ray.data.ActorPoolStrategy(**pool),
        **resources,
    )
    # Closing it stops the executor of Ray Data now, and not when the garbage collector comes.
    batches: Any = iter(rows.iter_batches(batch_size=None, batch_format="pyarrow"))
    with closing(batches) as tables:
        for row in (row for table in tables for row in table.to_pylist()):
            if row["mistake"]:
                raise ValueError(f"a worker of the Ray cluster cannot begin: {row['mistake']}")
            yield Result(row["number"], row["lines"], json.loads(row["counts"]))


class _Worker:
    """An actor of the pool: one process with one processor.

    A mistake of the user that it finds, such as an adapter that its machine does not have, is returned in place of results:
    Ray would restart a worker whose constructor raises, and print every trace.
    """

    def __init__(self, load: Callable[..., Processor], device: str | None, threads: int | None) -> None:
        self.mistake = ""
        if threads is not None:
            from redraft.kernels.threads import fix_threads

            fix_threads(threads)
        try:
            self.processor = load(device=device)
        except (ValueError, OSError) as error:
            self.mistake = str(error) or type(error).__name__

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[Any]]:
        if self.mistake:
            return {"number": [0], "lines": [""], "counts": ["{}"], "mistake": [self.mistake]}
        items = [Item(number, text) for number, text in zip(rows["number"].tolist(), rows["text"].tolist(), strict=True)]
        results = list(self.processor.process(items))
        return {
            "number": [result.number for result in results],
            "lines": [result.lines for result in results],
            "counts": [json.dumps(dict(result.counts)) for result in results],
            "mistake": [""] * len(results),
        }
