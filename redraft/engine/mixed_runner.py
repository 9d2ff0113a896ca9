"""MixedRunner: the runner for GPUs that also runs requests with adapters, and canvases of page adapters.

The captured graphs and their kernels compute the weights of the model alone. Requests with an adapter therefore go through
the reference forwards on the GPU, all of their adapters in one forward; the others stay on the graphs. Both happen in the
same step. A Llama has graphs of a drafter's canvases alone: those of a page adapter go through the reference forwards.
`warm_up` does not measure the reference forwards, which run MAX_ROWS requests at a time: MemoryPlan counts them, and without
a limit they use what the budget of KV caches leaves free.
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
        self.reference = Runner(model, prefill_chunk)

    def prefill(self, request: Request, *, is_alone: bool = False) -> int:
        """Encodes the next chunk of a prompt."""
        if self._needs_reference(request):
            return self.reference.prefill(request)
        return super().prefill(request, is_alone=is_alone)

    def encode_canvases(self, requests: Sequence[Request]) -> None:
        """Committed canvases become context."""
        on_graphs, others = self._split(requests)
        super().encode_canvases(on_graphs)
        self.reference.encode_canvases(others)

    def step(self, requests: Sequence[Request]) -> None:
        """One denoising step of each request's canvas."""
        on_graphs, others = self._split(requests)
        super().step(on_graphs)
        self.reference.step(others)

    def verify(self, requests: Sequence[Request]) -> dict[Request, int]:
        """One round of each request. Returns how many tokens of each went through the model."""
        on_graphs, others = self._split(requests)
        return super().verify(on_graphs) | self.reference.verify(others)

    def _needs_reference(self, request: Request) -> bool:
        """Whether the graphs do not compute what a request needs: its adapter, or canvases of a page adapter."""
        return request.adapter is not None or (self.model.page is not None and request.cfg.check != "exact")

    def _split(self, requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """The requests that the graphs compute, and the others."""
        on_graphs = [request for request in requests if not self._needs_reference(request)]
        return on_graphs, [request for request in requests if self._needs_reference(request)]
