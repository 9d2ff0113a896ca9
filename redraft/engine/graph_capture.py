"""Capturing CUDA graphs, and the sizes that they are captured for."""

import gc
from collections.abc import Callable
from functools import cache

import torch

MIN_CONTEXT = 2048  # context length of the smallest bucket
NEXT_CONTEXT = 16  # each larger bucket is so many times as long


def bucket_contexts(longest: int) -> list[int]:
    """The context lengths of buckets, up to the first one that has room for `longest` tokens."""
    contexts = [MIN_CONTEXT]
    while contexts[-1] < longest:
        contexts.append(NEXT_CONTEXT * contexts[-1])
    return contexts


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


@cache
def warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which bodies run before their capture.

    There is one, because cuBLAS keeps a workspace (32 MiB on an H200) for every stream that it has run on.
    """
    return torch.cuda.Stream(device)


def capture_graph(body: Callable[[], None], device: torch.device, graph_pool: object) -> Callable[[], None]:
    """Captures the body as a CUDA graph and returns its replay. On other devices, returns the body itself."""
    if device.type != "cuda":
        return body
    stream = warm_up_stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()  # compiles kernels and lets libraries allocate their workspaces
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    collects_garbage = gc.isenabled()
    gc.disable()  # GPU memory that is freed during the capture would invalidate it
    try:
        # thread_local: other threads may use the GPU during the capture
        with torch.cuda.graph(graph, pool=graph_pool, capture_error_mode="thread_local"):
            body()
    finally:
        if collects_garbage:
            gc.enable()
    return graph.replay
