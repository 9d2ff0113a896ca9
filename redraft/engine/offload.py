"""Offloading: the experts of some layers stay in host memory and are copied to the GPU ahead of their use.

    layer        0    1    2    3    4    5          (offloaded: 0, 2, 4; two slots)
    slot 0     uses 0    copy of 4 ----> uses 4   copy of 0 for the next forward
    slot 1     copy of 2 -----> uses 2    ...

The experts are most of a model's bytes. A layer that is offloaded uses one of a few device buffers, its slot. As soon as its
experts have run, the slot receives the experts of the next layer that uses it, on a stream of its own, while other layers
compute. At the end of a forward every slot again holds the layer that uses it first, so all forwards are alike and a CUDA
graph can hold the copies. Whole stacks are copied: the 256 tokens of a canvas use nearly all experts of a layer.

Only the experts' addresses change, so the results are those of the model without offloading, to the bit.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from redraft.engine.graph_capture import capture_graph
from redraft.kernels import NO_ADAPTER, ExpertAdapter, gated_experts
from redraft.kernels.packed import Weight, map_weight, weight_tensors
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant.layers import PackedExperts

SLOTS = 2  # device buffers, each of one layer's experts
ALIGNMENT = 256  # bytes: as torch aligns memory of a GPU
BUS_SAMPLE = 2**27  # bytes that are copied to measure the bus

ExpertWeights: TypeAlias = tuple[Weight, Weight]  # gate and up, down
Allocate: TypeAlias = Callable[[int], Tensor]  # bytes of device memory -> uint8 tensor


class OffloadError(ValueError):
    """The machine cannot hold the experts as asked. The message says what to change."""


def choose_offloaded(layers: int, count: int) -> tuple[int, ...]:
    """Which layers are offloaded: the first one, and the others at equal distances behind it.

    Each copy then has about the same number of layers to hide behind, and the first copy of a forward begins at once.
    """
    return tuple(index * layers // count for index in range(count))


def copied_layers(count: int, slots: int = SLOTS) -> list[int]:
    """Of `count` offloaded layers, those that every forward copies: not a layer that has its slot to itself."""
    return [number for number in range(count) if number >= slots or number + slots < count]


def expert_weights(experts: nn.Module) -> ExpertWeights:
    """The two weights of a layer's experts. Those of an offloaded layer lie in its slot while `use` says so."""
    if isinstance(experts, StreamedExperts):
        return experts.stream.views[experts.number]
    if isinstance(experts, PackedExperts):
        return experts.packed("gate_up_proj"), experts.packed("down_proj")
    return experts.gate_up_proj, experts.down_proj


def borrow_weights(experts: nn.Module) -> AbstractContextManager[ExpertWeights]:
    """The two weights of a layer's experts, on the device until the end of the block."""
    return experts.use() if isinstance(experts, StreamedExperts) else nullcontext(expert_weights(experts))


class HostExperts:
    """The experts of one layer in one buffer of host memory, pinned if a GPU will read it: one copy moves all of it."""

    def __init__(self, weights: ExpertWeights, *, pins: bool) -> None:
        tensors = [tensor.detach() for weight in weights for tensor in weight_tensors(weight)]
        # The weights without their numbers: what `view` needs to know of them.
        self._shapes = [map_weight(weight, lambda tensor: tensor.detach().to("meta")) for weight in weights]
        self.nbytes = sum(map(_aligned_bytes, tensors))
        self.buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        if pins:
            _pin(self.buffer)
        places = [place for weight in self.view(self.buffer) for place in weight_tensors(weight)]
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)

    def view(self, buffer: Tensor) -> ExpertWeights:
        """The weights as they lie in a buffer that holds a copy of this one: one tensor behind the other."""
        offset = 0

        def view_next(shape: Tensor) -> Tensor:
            nonlocal offset
            begin = offset
            offset += _aligned_bytes(shape)
            return buffer[begin : begin + shape.nbytes].view(shape.dtype).as_strided(shape.shape, shape.stride())

        gate_up, down = (map_weight(weight, view_next) for weight in self._shapes)
        return gate_up, down


def _aligned_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor in the buffer."""
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def _pin(buffer: Tensor) -> None:
    """Pins memory, so that the GPU copies it by itself. Torch's own pinned memory comes in powers of two: a waste here."""
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) != 0:
        raise OffloadError(
            f"{buffer.nbytes / 1e9:.2f} GB of host memory for offloaded experts cannot be pinned: raise the limit of locked "
            "memory (ulimit -l unlimited), free host memory, or raise --gpu-memory"
        )
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr())


class ExpertStream:
    """Keeps the slots filled. Layers are numbered in the order in which a forward uses them."""

    def __init__(
        self, layers: Sequence[HostExperts], device: torch.device, slots: int = SLOTS, allocate: Allocate | None = None
    ) -> None:
        self.layers = list(layers)
        self.slots = min(slots, len(self.layers))
        allocate = allocate or (lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        largest = max(layer.nbytes for layer in self.layers)
        self._buffers = [allocate(largest) for _ in range(self.slots)]
        self.views = [layer.view(self._buffers[number % self.slots]) for number, layer in enumerate(self.layers)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: list[int | None] = [None] * self.slots  # the layer whose experts are in the slot or on their way
        self._arrivals: list[torch.cuda.Event | None] = [None] * self.slots  # None: they are there
        self.prepare()

    @property
    def device_bytes(self) -> int:
        """Memory of all slots."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def step_bytes(self) -> int:
        """Bytes that one forward copies over the bus."""
        return sum(self.layers[number].nbytes for number in copied_layers(len(self.layers), self.slots))

    @contextmanager
    def use(self, number: int) -> Iterator[ExpertWeights]:
        """A layer's weights on the device. After the block, its slot receives the experts that need it next."""
        slot = number % self.slots
        if self._held[slot] != number:  # the forward before this one failed
            self._copy(number)
        self._await(slot)
        yield self.views[number]
        following = number + self.slots if number + self.slots < len(self.layers) else slot
        if following != number:
            self._copy(following)

    def prepare(self) -> None:
        """Makes every slot hold the layer that uses it first, and waits for the copies: as a CUDA graph expects it."""
        for slot, held in enumerate(self._held):
            if held != slot:
                self._copy(slot)
        self.join()

    def join(self) -> None:
        """The current stream waits for all copies."""
        for slot in range(self.slots):
            self._await(slot)

    def capture(self, body: Callable[[], None], device: torch.device, graph_pool: object) -> Callable[[], None]:
        """As `capture_graph`, for a body that uses the slots."""

        def joined_body() -> None:
            body()
            self.join()  # a capture must end with all its streams joined

        self.prepare()
        try:
            replay = capture_graph(joined_body, device, graph_pool)
        except BaseException:
            self._held = [None] * self.slots  # copies that were captured have not been made
            self._arrivals = [None] * self.slots
            raise

        def prepared_replay() -> None:
            self.prepare()
            replay()

        return prepared_replay

    def _copy(self, number: int) -> None:
        """Starts the copy of a layer's experts into its slot, behind the work that the current stream has now."""
        slot = number % self.slots
        layer = self.layers[number]
        target = self._buffers[slot][: layer.nbytes]
        self._held[slot] = number
        if self._stream is None:
            target.copy_(layer.buffer)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(layer.buffer, non_blocking=True)
            self._arrivals[slot] = self._stream.record_event()

    def _await(self, slot: int) -> None:
        arrival = self._arrivals[slot]
        if arrival is not None:
            torch.cuda.current_stream().wait_event(arrival)
            self._arrivals[slot] = None


class StreamedExperts(nn.Module):
    """Experts of one layer whose weights an ExpertStream brings to the device. It has no parameters of its own."""

    def __init__(self, stream: ExpertStream, number: int) -> None:
        super().__init__()
        self.stream = stream
        self.number = number

    def use(self) -> AbstractContextManager[ExpertWeights]:
        """The weights, on the device until the end of the block."""
        return self.stream.use(self.number)

    def forward(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, adapter: ExpertAdapter = NO_ADAPTER) -> Tensor:
        """The weighted sum of the outputs of each token's experts."""
        with self.use() as (gate_up, down):
            return gated_experts(x_ND, experts_NK, weights_NK, gate_up, down, adapter)


def offload_experts(
    model: DiffusionGemma, layers: Sequence[int], slots: int = SLOTS, allocate: Allocate | None = None
) -> ExpertStream | None:
    """Moves the experts of these layers to host memory, one layer after another, and streams them from there."""
    if not layers:
        return None
    on_gpu = model.device.type == "cuda"
    hosted = []
    for layer in sorted(layers):
        hosted.append(HostExperts(expert_weights(model.layers[layer].experts), pins=on_gpu))
        model.layers[layer].experts = nn.Identity()  # frees the weights
    stream = ExpertStream(hosted, model.device, slots, allocate)
    for number, layer in enumerate(sorted(layers)):
        model.layers[layer].experts = StreamedExperts(stream, number)
    return stream


def find_stream(model: DiffusionGemma) -> ExpertStream | None:
    """The stream of a model with offloaded experts."""
    streams = (layer.experts.stream for layer in model.layers if isinstance(layer.experts, StreamedExperts))
    return next(streams, None)


def measure_bus(device: torch.device) -> float:
    """Bytes per second from pinned host memory to the GPU: the best of three copies."""
    host = torch.empty(BUS_SAMPLE, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BUS_SAMPLE, dtype=torch.uint8, device=device)
    best = 0.0
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        torch.cuda.synchronize(device)
        best = max(best, BUS_SAMPLE / (begin.elapsed_time(end) / 1e3))
    return best
