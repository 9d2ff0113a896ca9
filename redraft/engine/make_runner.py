"""Which runner a model gets, by its device and its architecture."""

from redraft.engine.runner import Runner
from redraft.kernels.backend import select_backend
from redraft.model.backbone import Backbone
from redraft.model.llama import Llama


def make_runner(model: Backbone, prefill_chunk: int, prefill_chunk_alone: int | None = None) -> Runner:
    """A runner with CUDA graphs where the Triton kernels are used and know the architecture, else the reference Runner."""
    if not select_backend(model.device).uses_triton:
        return Runner(model, prefill_chunk)
    from redraft.engine.fused_llama import can_fuse  # Triton takes long to import
    from redraft.engine.mixed_runner import MixedRunner

    if isinstance(model, Llama) and not can_fuse(model):
        return Runner(model, prefill_chunk)
    return MixedRunner(model, prefill_chunk, prefill_chunk_alone)
