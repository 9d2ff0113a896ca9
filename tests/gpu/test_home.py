"""A limit on a GPU's memory, experts in host memory, fp8 KV caches: on a real GPU, inside CUDA graphs.

python -m pytest -m gpu tests/gpu/test_home.py
"""

import gc
import multiprocessing
from dataclasses import replace

import pytest
import tiny
import torch
from packed_models import pack_experts

import redraft
from redraft.config import FULL, SLIDING, EngineConfig
from redraft.diffusion.generate import generate
from redraft.engine.engine import Engine
from redraft.engine.gpu_limit import GpuLimit, measure_cuda_context
from redraft.engine.graph_capture import capture_graph
from redraft.engine.memory_plan import Demand
from redraft.engine.offload import measure_bus, offload_experts
from redraft.kernels.backend import SMALLEST_LIMIT, Card, select_card
from redraft.kernels.triton import attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = replace(tiny.BASE, layer_types=(*(SLIDING,) * 6, FULL), hidden_size=64, moe_intermediate_size=64)
PROMPT = [2, *range(30, 60)]


def tokens_of(model, rounds: int = 3, **settings) -> list[torch.Tensor]:
    """Several answers of one engine: the first captures graphs, the others replay them."""
    engine = Engine(model, EngineConfig(cache_bytes=2**24, prefill_chunk=16, **settings))
    cfg = tiny.sampler(max_new_tokens=64, max_steps=4)
    requests = [engine.add(PROMPT[: 10 + 7 * seed], cfg, seed=seed) for seed in range(rounds)]
    found = engine.run(requests)
    return [found[request].ids_BT for request in requests]


@pytest.mark.parametrize("format", [None, "fp8", "nvfp4", "int4"])
@pytest.mark.parametrize(("count", "slots"), [(7, 2), (6, 2), (3, 2), (5, 1)])
def test_offloaded_tokens_are_equal(format, count, slots):
    """The same kernels on the same numbers: equal to the bit, also in bf16."""
    model, other = (tiny.decided(CONFIG).bfloat16().cuda() for _ in range(2))
    if format:
        pack_experts(model, format)
        pack_experts(other, format)
    gc.collect()  # what the test before has left would be freed in between
    before = torch.cuda.memory_allocated()
    stream = offload_experts(other, range(count), slots)
    assert all(layer.buffer.is_pinned() for layer in stream.layers)
    freed = sum(layer.nbytes for layer in stream.layers) - stream.device_bytes
    assert before - torch.cuda.memory_allocated() == pytest.approx(freed, abs=4096 * count)
    for mine, expected in zip(tokens_of(other), tokens_of(model), strict=True):
        assert torch.equal(mine, expected)


def test_fp8_caches_equal_generate():
    model = tiny.decided(CONFIG).cuda()
    found = tokens_of(model, rounds=1, kv="fp8")[0]
    *_, expected = generate(model, [PROMPT[:10]], tiny.sampler(max_new_tokens=64, max_steps=4), seeds=[0])
    assert torch.equal(found, expected.ids_BT)


@pytest.mark.parametrize("has_type", [False, True])
def test_integers_and_the_fp8_type_decode_alike(has_type, monkeypatch):
    card = select_card(torch.device("cuda"))
    if has_type and not card.has_fp8:
        pytest.skip("this GPU has no fp8 type")
    if not has_type:
        monkeypatch.setattr(attention, "select_card", lambda device: Card(86, SMALLEST_LIMIT))
    codes = torch.arange(256, dtype=torch.uint8, device="cuda")
    codes[127] = codes[255] = 0  # NaN
    base = codes.view(16, 1, 16).contiguous()
    zero = torch.zeros(1, dtype=torch.int64, device="cuda")
    sizes = [torch.tensor([number], dtype=torch.int32, device="cuda") for number in (16, 16, 0)]
    past = attention.KVLocations(base.flatten(), zero, zero, *sizes)
    q = torch.zeros(1, 16, 1, 16, dtype=torch.bfloat16, device="cuda")
    out = attention.attend(q, q, q, past, window=None, causal=False, splits=1)
    expected = base.view(torch.float8_e4m3fn).float().sum(dim=0) / 32  # equal weights of 16 cached and 16 new keys
    assert torch.allclose(out[0, 0].float(), expected[0], rtol=2**-7)


def check_limit(folder) -> None:
    """Loading and generating within two gigabytes; an allocation beyond the limit fails; the peak is reported."""
    writer = redraft.load(folder, gpu_memory="2GB", context=512)
    assert writer.engine.config.cache_bytes == writer.gpu_limit.plan.cache_bytes
    writer.write("abc", seed=1, max_tokens=32)
    assert "of 2.00 GB" in writer.gpu_limit.peak
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")
    writer.gpu_limit.lift()
    torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")


def test_the_limit_holds(tmp_path):
    """In a process of its own: a limit is one of a process, and other tests may have left graphs that hold more memory."""
    folder = tiny.save_folder(tmp_path / "model")
    process = multiprocessing.get_context("spawn").Process(target=check_limit, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_captures_share_one_workspace():
    """A stream for every capture would cost 32 MiB of memory each, beyond any plan."""
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    used = []
    for _ in range(3):
        capture_graph(lambda: torch.mm(x, x, out=x), torch.device("cuda", 0), None)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[1] == used[2]


def test_measurements():
    device = torch.device("cuda", 0)
    assert 4e8 <= measure_cuda_context(device) <= 1e9
    assert measure_bus(device) > 1e9
    with pytest.raises(ValueError, match="lower it"):
        GpuLimit(device, "900GB", Demand())
