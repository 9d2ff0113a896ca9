"""CudaGraphRunner in Triton's interpreter: its layers equal the model's, its canvases equal those of `generate`.

The interpreter's time grows with the number of tokens, so canvases have 4 positions and prompts are short.
"""

from dataclasses import replace

import pytest
import tiny
import torch
from compressed_folders import FP8, compress_fp8, compressed_config, describe, save_compressed
from interpreted import DEVICE
from packed_weights import random_weight

import redraft
from redraft.config import FULL, SLIDING, EngineConfig, SamplerConfig
from redraft.constraints.constraints import ConstraintEdit, Constraints
from redraft.diffusion.generate import Committed, Draft, generate
from redraft.engine import Intervention, Replay
from redraft.engine.batched_cache import BatchedCache
from redraft.engine.cache_table import CacheTable
from redraft.engine.cuda_graph_runner import CudaGraphRunner
from redraft.engine.engine import Engine
from redraft.engine.fused_layers import FusedLayers
from redraft.engine.make_runner import make_runner
from redraft.engine.mixed_runner import MixedRunner
from redraft.engine.runner import Runner
from redraft.engine.step_graph import StepBucket, temperatures
from redraft.kernels import backend
from redraft.kernels.fp8 import dequantize, quantize
from redraft.kernels.triton import experts
from redraft.model.quant import pack_embedding
from redraft.model.quant.fp8 import quantize_fp8
from redraft.model.quant.layers import PackedExperts

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, where an exponential overflows

SMALL = replace(
    tiny.BASE,
    layer_types=(SLIDING, FULL),
    sliding_window=5,
    canvas_length=4,
    global_head_dim=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_global_key_value_heads=1,
    num_experts=3,
)
CFG = SamplerConfig(
    canvas_length=4, max_new_tokens=8, max_steps=2, entropy_bound=3.0, confidence_threshold=0.5, eos_token_ids=(1,)
)

PROMPT = [2, *range(30, 48)]


def replace_experts(model):
    """Gives the first layer NVFP4 experts and the second int4 and fp8 ones, all with random weights."""
    for index, layer in enumerate(model.layers):
        number, size, inner = layer.experts.packed("down_proj").qdata.shape
        kinds = ("nvfp4", "nvfp4") if index == 0 else ("int4 with minimum", "fp8")
        gate_up = random_weight(kinds[0], number, 2 * inner, size, parts=2)
        layer.experts = PackedExperts(gate_up, random_weight(kinds[1], number, size, inner, seed=5))


def dequantize_some(model):
    """Gives some projections full precision, beside neighbours in fp8."""
    for parent, name in ((model.layers[0].self_attn, "v_proj"), (model.layers[1].mlp, "gate_proj")):
        packed = getattr(parent, name).packed("weight")
        linear = torch.nn.Linear(*reversed(packed.qdata.shape), bias=False, device=DEVICE)
        linear.weight.data = dequantize(packed)
        setattr(parent, name, linear)


@pytest.mark.parametrize("quant", ["", "fp8", "mixed"])
def test_fused_layers_equal_the_models_layers(quant, monkeypatch):
    """Two prompts encoded and two canvases denoised: the same keys, values and logits. Weights are shared, not copied."""
    config = (
        replace(SMALL, hidden_size=48, intermediate_size=32, moe_intermediate_size=32, head_dim=16, global_head_dim=16)
        if quant
        else SMALL
    )
    model, other = (tiny.build(config).to(DEVICE) for _ in range(2))
    if quant:
        model, other = quantize_fp8(model), quantize_fp8(other)
        if quant == "mixed":
            for either in (model, other):
                replace_experts(either)
                dequantize_some(either)
        if DEVICE == "cpu":  # the interpreter rounds to 8 bits in its own way
            monkeypatch.setattr(experts, "quantize_rows", quantize)
    tolerance = 0.1 if quant and DEVICE == "cuda" else 3e-5  # in 8 bits a number between two values may round to either
    fused = FusedLayers(other)
    rows = fused.qkv[0][0] if quant == "mixed" else fused.qkv[0]
    whole = rows.qdata if quant else rows
    assert whole.data_ptr() == other.layers[0].self_attn.q_proj.weight.data_ptr()
    with torch.inference_mode():
        theirs, mine = ([model.new_cache(1, 40, rewind=9) for _ in range(2)] for _ in range(2))
        table = CacheTable.empty(other, 1)
        for number, (cache, own) in enumerate(zip(theirs, mine, strict=True)):
            prompt = torch.arange(2, 13 - 7 * number, device=DEVICE)[None]
            model.encode(prompt, cache)
            table.fill([own])
            fused.encode(prompt, table, 300)
            own.advance([prompt.shape[1]])
            for layer in range(2):
                for a, b in zip(cache.view(layer), own.view(layer), strict=True):
                    assert torch.allclose(a, b, atol=tolerance)
        ids = torch.arange(8, device=DEVICE).view(2, 4) * 13
        soft = torch.randn(2, 4, config.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
        expected = model.denoise(ids, soft, BatchedCache(theirs))
        table = CacheTable.empty(other, 2)
        table.fill(mine)
        found = other.head(fused.denoise(ids, soft, table, 300)).view_as(expected)
        assert torch.allclose(found, expected, atol=tolerance)
        assert torch.allclose(other.denoise(ids, soft, BatchedCache(mine)), expected, atol=tolerance)  # it is still a model


def test_the_sampler_of_a_graph_uses_an_embedding_in_8_bits():
    """Argmax and soft embeddings are those of the model."""
    model = pack_embedding(tiny.build(SMALL).to(DEVICE))
    graph = StepBucket(FusedLayers(model), (2, 4, 64), None)
    for name, value in (("temperatures_BS", 0.7), ("limit_B", 4), ("settled_B", False)):
        getattr(graph.rows, name).fill_(value)
    hidden = torch.randn(8, SMALL.hidden_size, generator=torch.Generator().manual_seed(7)).to(DEVICE) * 3
    with torch.inference_mode():
        graph._sample(hidden)
        shaped = model.head(hidden).view(2, 4, -1) / 0.7
        assert torch.equal(graph.rows.best_BC.long(), shaped.argmax(dim=-1))
        expected = model.soft_embed(shaped)
    assert torch.allclose(graph.soft_BCD, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def model():
    return tiny.decided(SMALL).to(DEVICE)


@pytest.fixture
def engine(model, monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    return Engine(model, EngineConfig(max_running=4, prefill_chunk=8))


@pytest.mark.soak
def test_canvases_equal_those_of_generate(engine, model):
    """Different prompts, steps and seeds in one batch; one request with constraints and one with a quota beside them."""
    asked = [
        ([2, 3, 4, 5, 6, 7, 8], CFG, 1, Constraints()),
        ([9, 10], replace(CFG, max_steps=3, max_new_tokens=4, entropy_bound=1.0), 2, Constraints()),
        ([9, 10, 11], replace(CFG, max_new_tokens=4), 3, Constraints(pins={2: 70})),
        ([12], replace(CFG, max_new_tokens=4, quota=True), 4, Constraints()),
    ]
    assert isinstance(engine.runner, CudaGraphRunner)
    requests = [engine.add(prompt, cfg, seed=seed, constraints=constraints) for prompt, cfg, seed, constraints in asked]
    found = engine.run(requests)
    for request, (prompt, cfg, seed, constraints) in zip(requests, asked, strict=True):
        *_, expected = generate(model, [prompt], cfg, seeds=[seed], constraints=[constraints])
        assert torch.equal(found[request].ids_BT, expected.ids_BT)
        assert found[request].stats[0].steps == expected.stats[0].steps


@pytest.mark.soak
def test_a_request_alone_prefills_longer_chunks(model, monkeypatch):
    """Beside another request chunks are as short as before. The tokens are the same."""
    monkeypatch.setenv(backend.ENV_VARIABLE, "triton")
    engine = Engine(model, EngineConfig(max_running=4, prefill_chunk=4, prefill_chunk_alone=8, prefix_cache_entries=0))
    cfg = replace(CFG, max_new_tokens=4, max_steps=2)
    prompt = list(range(2, 21))
    chunks = []
    encode = engine.runner.fused.encode
    monkeypatch.setattr(
        engine.runner.fused, "encode", lambda ids_1S, *rest: (chunks.append(ids_1S.shape[1]), encode(ids_1S, *rest))
    )
    *_, expected = generate(model, [prompt], cfg, seeds=[1])
    alone = engine.add(prompt, cfg, seed=1)
    assert torch.equal(engine.run([alone])[alone].ids_BT, expected.ids_BT)
    assert chunks == [8, 7]  # the last 4 tokens are encoded with the first step
    chunks.clear()
    beside = [engine.add(prompt, cfg, seed=1), engine.add([9, 10], cfg, seed=2)]
    assert torch.equal(engine.run(beside)[beside[0]].ids_BT, expected.ids_BT)
    assert chunks[0] == 4
    assert engine.runner.chunk_buckets  # chunks of the usual length are graphs


@pytest.mark.soak
def test_a_committed_canvas_is_encoded_with_the_first_step_of_the_next(engine, model):
    """One graph for both, for one request or for two, beside a canvas that is at another step or not."""
    cfg = replace(CFG, max_new_tokens=12, max_steps=2)
    asked = {engine.add([2, 3, 4, 5], cfg, seed=1): [2, 3, 4, 5], engine.add([6, 7], cfg, seed=2): [6, 7]}
    found = engine.run(list(asked))
    for request, prompt in asked.items():
        *_, expected = generate(model, [prompt], cfg, seeds=[request.seed])
        assert torch.equal(found[request].ids_BT, expected.ids_BT)
    assert any(bucket.encode_buffers for bucket in engine.runner.step_buckets.values())
    assert not engine.runner.pending_encodes


@pytest.mark.parametrize(
    "settings",
    [{}, {"quota": True, "accept_at_end": True, "spread": 2, "stops_last": True}],
)
def test_watched_requests_and_those_of_small_models_are_sampled_in_the_graph(engine, model, settings):
    """The probabilities of every draft are the reference's, beside a request that does not ask for them."""
    cfg = replace(CFG, max_new_tokens=4, max_steps=3, confidence_threshold=1e-9, **settings)
    watched = engine.add([2, 3, 4, 5], cfg, seed=1, candidates=3)
    plain = engine.add([6, 7], cfg, seed=2)
    reference = Engine(model, EngineConfig(cache_bytes=2**24, prefill_chunk=8))
    reference.runner = Runner(model, 8)
    expected = [event for _, event in reference.events([reference.add([2, 3, 4, 5], cfg, seed=1, candidates=3)])]
    found = list(engine.events([watched, plain]))
    drafts = [event for request, event in found if request is watched and isinstance(event, Draft)]
    assert not engine.runner.layer_buckets
    for mine, theirs in zip(drafts, (event for event in expected if isinstance(event, Draft)), strict=True):
        assert torch.equal(mine.canvas_BC, theirs.canvas_BC)
        assert torch.equal(mine.accepted_BC, theirs.accepted_BC)
        assert torch.equal(mine.top_probs.ids_BCK, theirs.top_probs.ids_BCK)
        for name in ("own_BC", "draft_BC", "probs_BCK"):
            assert torch.allclose(getattr(mine.top_probs, name), getattr(theirs.top_probs, name), atol=1e-5)
    *_, expected_plain = generate(model, [[6, 7]], cfg, seeds=[2])
    assert plain.top_probs is None
    assert found[-1][0] is plain
    assert found[-1][1].ids_BT.tolist() == expected_plain.ids_BT.tolist()


def test_a_step_launched_ahead_is_dropped_when_requests_come_or_leave(engine, model):
    cfg = replace(CFG, max_new_tokens=4, confidence_threshold=1e-9)
    first = engine.add([2, 3, 4], cfg, seed=5)
    engine.step()
    assert engine.runner.launched_ahead
    second = engine.add([5, 6], cfg, seed=6)
    committed = {}
    while not engine.is_idle:
        for request, event in engine.step():
            if isinstance(event, Committed):
                committed[request] = event.ids_BC
        if engine.runner.launched_ahead and not second.is_over:
            engine.cancel(second)
    *_, expected = generate(model, [[2, 3, 4]], cfg, seeds=[5])
    assert torch.equal(committed[first], expected.ids_BT)
    assert second not in committed


def test_warming_up_captures_the_largest_bucket(engine):
    assert (engine.runner.warm_up(3) > 0) == (DEVICE == "cuda")  # bytes of a GPU
    ((count, length, *_),) = engine.runner.step_buckets
    assert (count, length) == (4, 4)


def test_the_backend_decides_the_runner(model, monkeypatch):
    monkeypatch.setenv(backend.ENV_VARIABLE, "reference")
    assert backend.select_backend("cpu") == (False, "REDRAFT_KERNELS=reference")
    assert type(make_runner(model, 16)) is Runner
    monkeypatch.setenv(backend.ENV_VARIABLE, "fastest")
    with pytest.raises(ValueError, match="may be reference or triton, got 'fastest'"):
        backend.select_backend("cpu")
    monkeypatch.delenv(backend.ENV_VARIABLE)
    assert backend.select_backend("cpu") == (False, "no GPU")
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert backend.select_backend("cuda") == (False, "Triton is not installed")


@pytest.mark.soak
def test_prompts_of_any_length_are_encoded_with_the_first_step(engine, model):
    """Shorter than a canvas, longer, longer than a chunk, several at once: padded to a graph's shape, or encoded alone."""
    cfg = replace(CFG, max_new_tokens=4)
    for sizes in ((6,), (2, 11, 8)):
        prompts = [list(range(2, 2 + size)) for size in sizes]
        found = engine.run(requests := [engine.add(prompt, cfg, seed=seed) for seed, prompt in enumerate(prompts)])
        for seed, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
            *_, expected = generate(model, [prompt], cfg, seeds=[seed])
            assert torch.equal(found[request].ids_BT, expected.ids_BT)
    shapes = {shape for bucket in engine.runner.step_buckets.values() for shape in bucket.encode_buffers}
    assert {shape[1] for shape in shapes} == {4, 8}
    assert not engine.runner.pending_encodes


@pytest.mark.soak
def test_a_replayed_run_equals_the_original_and_leaves_a_valid_prefix_cache(engine, model):
    """Cancelled between two replayed canvases, the prefix cache holds the keys and values that `encode` gives."""
    cfg, constraints = replace(CFG, max_new_tokens=16), Constraints(forbidden=(1,))
    whole = list(generate(model, [PROMPT], cfg, seeds=[5], constraints=[constraints]))
    pages = tuple(tuple(event.ids_BC[0].tolist()) for event in whole if isinstance(event, Committed))
    left = engine.add(PROMPT, cfg, seed=5, constraints=constraints, replay=Replay(pages[:3]))
    while not left.block:
        engine.step()
    engine.cancel(left)
    context, kept = engine.scheduler.prefix_cache.take((*PROMPT, *pages[0], *pages[1]))
    assert context[: len(PROMPT) + 4] == [*PROMPT, *pages[0]]
    truth = model.new_cache(1, len(context))
    with torch.inference_mode():
        model.encode(torch.tensor([context], device=DEVICE), truth)
        for layer in range(2):
            for ours, theirs in zip(kept.view(layer), truth.view(layer), strict=True):
                assert torch.allclose(ours[:, -len(context) :], theirs, atol=3e-5)
    replay = Replay(pages[:3], (Intervention(3, 1, ConstraintEdit()),))
    resumed = engine.add(PROMPT, cfg, seed=5, constraints=constraints, replay=replay, candidates=2)
    assert engine.run([resumed])[resumed].ids_BT.tolist() == whole[-1].ids_BT.tolist()


def test_the_cache_of_temperatures_is_bounded():
    """Clients choose the temperature, so the cache keyed by it must not grow with every request."""
    for number in range(1, 200):
        temperatures(CFG.with_temperature(number / 100))
    assert temperatures.cache_info().currsize == temperatures.cache_info().maxsize < 100


def test_a_checkpoint_with_neighbours_in_different_formats_generates(tmp_path, monkeypatch):
    """From the folder to the text: q and gate in fp8, k, v and up in bf16."""
    rules = {r".*\.self_attn\.q_proj": compress_fp8, r".*\.mlp\.gate_proj": compress_fp8}
    save_compressed(tmp_path, rules, compressed_config(describe(FP8), file_format=FP8))
    answers = []
    for kernels, kind in (("triton", MixedRunner), ("reference", Runner)):
        monkeypatch.setenv(backend.ENV_VARIABLE, kernels)
        writer = redraft.load(tmp_path, device=DEVICE, dtype="float32")
        assert type(writer.engine.runner) is kind
        answers.append(writer.write("a", seed=1, max_tokens=4, max_steps=1, canvas_length=4).ids)
    assert answers[0] == answers[1]
