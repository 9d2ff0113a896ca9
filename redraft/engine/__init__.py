"""The engine: many requests at once over one model. Each request gets the tokens that `generate` gives it alone.

In reading order:
    engine             Engine: add, stream, cancel and step requests
    work_beside        WorkBeside: lends KV caches and turns between steps to work that belongs to no request
    adapted_engine     AdaptedEngine: the same engine, as the requests of one adapter use it
    request            Request: one prompt, its status and its canvas in work
    stream             Stream: the events of one request, as an iterator
    replay             Replay, Intervention: a run that is repeated, with changed constraints from some step on
    errors             RequestError (the user's mistake), EngineError (ours), Stopped
    scheduler          Scheduler: which requests run, within the memory budget
    fair_share         FairShare: whose turn it is, when several clients have requests
    memory             what a model takes, and what is free
    memory_plan        MemoryPlan: what a GPU's memory is used for when it is limited
    vision_memory      what images take of the memory
    gpu_limit          GpuLimit: keeps a process within its limit
    offload            ExpertStream: experts in host memory, copied ahead of their use
    prefix_cache       PrefixCache: KV caches of finished requests, for prompts that begin alike
    runner             Runner: forward passes for batches of requests, in plain PyTorch
    make_runner        which runner a model gets
    batched_cache      BatchedCache: the KV caches of several requests as one
    cuda_graph_runner  CudaGraphRunner: forward passes on Triton kernels, as CUDA graphs
    step_graph         StepBucket: a denoising step as one CUDA graph
    mixed_runner       MixedRunner: requests with adapters beside those on CUDA graphs
    round_graph        RoundBucket: a round of checked or exact mode as one CUDA graph
    tree_graph         TreeBucket: a round of exact mode with a tree of drafts as one CUDA graph
    graph_capture      capturing CUDA graphs
    cache_table        CacheTable: the addresses of a batch's KV caches, for the kernels
    fused_layers       FusedLayers: the model's layers on Triton kernels
    fused_llama        FusedLlama: the same for a Llama, with the weights of its drafter
"""

from redraft.engine.adapted_engine import AdaptedEngine
from redraft.engine.engine import Engine
from redraft.engine.errors import EngineError, ReplayError, RequestError, Stopped
from redraft.engine.replay import Intervention, Replay
from redraft.engine.request import Request, RequestStatus, StopEvent

__all__ = [
    "AdaptedEngine",
    "Engine",
    "EngineError",
    "Intervention",
    "Replay",
    "ReplayError",
    "Request",
    "RequestError",
    "RequestStatus",
    "StopEvent",
    "Stopped",
]
