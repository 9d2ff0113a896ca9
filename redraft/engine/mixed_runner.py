"""MixedRunner: the runner for GPUs that also runs requests with adapters.

The captured graphs and their kernels compute the weights of the model alone. Requests with an adapter therefore go through
the reference forwards on the GPU, all of their adapters in one forward; the others stay on the graphs. Both happen in the
same step. `warm_up` does not measure the reference forwards, which run MAX_ROWS requests at a time: MemoryPlan counts them,
and without a limit they use what the budget of KV caches leaves free.
"""

from collections.abc import Sequence

from redraft.engine.cuda_graph_runner import CudaGraphRunner
from redraft.engine.request import Request
from redraft.engine.runner import Runner
from redraft.model.backbone import Backbone


class MixedRunner(CudaGraphRunner):
    """Runs one model, with and without adapters."""

    def __init__(self, model: Backbone, prefill_chunk: int, prefill_chunk_alone: int | None = None) -> None:
        super().__init__(model, prefill_chunk, prefill_chunk_alone)
        self.adapted = Runner(model, prefill_chunk)

    def prefill(self, request: Request, *, is_alone: bool = False) -> int:
        """Encodes the next chunk of a prompt."""
        if request.adapter is not None:
            return self.adapted.prefill(request)
        return super().prefill(request, is_alone=is_alone)

    def encode_canvases(self, requests: Sequence[Request]) -> None:
        """Committed canvases become context."""
        plain, adapted = split_by_adapter(requests)
        super().encode_canvases(plain)
        self.adapted.encode_canvases(adapted)

    def step(self, requests: Sequence[Request]) -> None:
        """One denoising step of each request's canvas."""
        plain, adapted = split_by_adapter(requests)
        super().step(plain)
        self.adapted.step(adapted)

    def verify(self, requests: Sequence[Request]) -> dict[Request, int]:
        """One round of each request. Returns how many tokens of each went through the model."""
        plain, adapted = split_by_adapter(requests)
        return super().verify(plain) | self.adapted.verify(adapted)


def split_by_adapter(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """The requests without an adapter, and those with one."""
    plain = [request for request in requests if request.adapter is None]
    return plain, [request for request in requests if request.adapter is not None]
