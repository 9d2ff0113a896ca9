"""GGUF weights that are converted on a GPU equal those converted on a CPU, to the bit.

python -m pytest -m gpu tests/gpu/test_gguf_on_gpu.py
"""

import pytest
import torch

from redraft.checkpoint.gguf import weights
from redraft.checkpoint.gguf.blocks import BLOCK_TYPES
from redraft.checkpoint.gguf.weights import GgufWeight, StackedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPE = (4, 96, 512)


def random_weight(kind: str, device: str, seed: int = 0) -> GgufWeight:
    """Random blocks whose scales are finite; NVFP4 has a global scale for each matrix."""
    block = BLOCK_TYPES[kind]
    generator = torch.Generator().manual_seed(seed)
    size = (*SHAPE[:2], SHAPE[2] // block.size, block.nbytes)
    blocks = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    for start in block.halves:
        blocks[..., start + 1] &= 0x3B  # below the exponent of infinity
    if kind == "NVFP4":
        blocks[..., :4] %= 0x7F
    scale = torch.rand(SHAPE[0], generator=generator) if kind == "NVFP4" else None
    return GgufWeight("x", block, blocks.flatten(-2), torch.device(device), scale)


@pytest.mark.parametrize("kind", [name for name, block in BLOCK_TYPES.items() if block.dtype is None])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_conversions_on_the_gpu_equal_those_on_the_cpu(monkeypatch, kind, is_stacked):
    monkeypatch.setattr(weights, "CHUNK", 20_000)
    here, there = (random_weight(kind, device) for device in ("cpu", "cuda"))
    if is_stacked:
        here, there = (
            StackedWeight(gate, random_weight(kind, device, 1)) for gate, device in ((here, "cpu"), (there, "cuda"))
        )
    for dtype in (torch.float32, torch.bfloat16):
        numbers = there.dequantize(dtype)
        assert numbers.is_cuda
        assert torch.equal(numbers.cpu(), here.dequantize(dtype))
    packed_here, packed_there = here.pack(), there.pack()
    assert (packed_here is None) == (packed_there is None)
    for field, expected in zip(packed_there or (), packed_here or (), strict=True):
        if expected is not None:
            assert field.is_cuda
            assert torch.equal(field.cpu().view(torch.uint8), expected.view(torch.uint8))
