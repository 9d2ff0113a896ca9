"""The memory plan: within the limit, better with more memory, refused only when nothing fits; bytes = those of models."""

import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tiny
import torch
import vision_models
from hypothesis import given, settings
from hypothesis import strategies as st

import redraft
from redraft import Writer, checkpoint
from redraft.checkpoint.placement import Placement
from redraft.config import ConfigError, ModelConfig
from redraft.engine import EngineError, gpu_limit
from redraft.engine.engine import Engine
from redraft.engine.gpu_limit import GpuLimit, explain_lack_of_memory, limit_gpu
from redraft.engine.graph_capture import bucket_contexts
from redraft.engine.memory_plan import (
    MIN_CHUNK,
    RESERVE_SHARE,
    Demand,
    MemoryLimitError,
    MemoryPlan,
    WeightBytes,
    choose_policy,
    parse_bytes,
    plan_memory,
)
from redraft.engine.offload import find_stream, offload_experts
from redraft.kernels.fp8 import FP8_DTYPE
from redraft.model.kv_cache import KVCache
from redraft.model.quant.policy import EXPERTS, QUANTIZED_PARTS, QuantPolicy
from redraft.model.quant.stored import StoredFormat

RELEASED = ModelConfig()
NVIDIA = dict.fromkeys(EXPERTS, StoredFormat("NVFP4 (ModelOpt)", "nvfp4"))
Q8_0 = dict.fromkeys(QUANTIZED_PARTS, StoredFormat("Q8_0", None))
CUDA = torch.device("cuda", 0)
GPU = QuantPolicy(runs_packed=True)
NVIDIA_WEIGHTS = WeightBytes.by_policy(RELEASED, NVIDIA, GPU.alternatives)
WEIGHTS = {
    **dict(zip(("published", "fp8 beside", "fp8 embedding"), NVIDIA_WEIGHTS.values(), strict=False)),
    "bf16": WeightBytes.by_policy(RELEASED, {}, [GPU])[GPU],
}
demands = st.builds(
    Demand,
    context=st.sampled_from([256, 4096, 16_384, 131_072, 262_144]),
    canvases=st.integers(1, 16),
    prefill_chunk=st.sampled_from([64, 256, 2048, 3000]),
    rewind=st.sampled_from([0, 512]),
    kv=st.sampled_from([None, "fp8"]),
    has_constraints=st.booleans(),
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18GB", 18 * 10**9), ("18 gb", 18 * 10**9), ("18G", 18 * 10**9), ("18GiB", 18 * 2**30), ("18e9", 18 * 10**9),
        ("18", 18 * 10**9), (18, 18 * 10**9), (1.8e10, 18 * 10**9), ("7.5GB", 7_500_000_000), ("8000MB", 8 * 10**9),
        ("18000000000", 18 * 10**9), ("512MiB", 2**29),
    ],
)  # fmt: skip
def test_amounts_of_memory(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "18TB", "18 gigs", "1e99", "nan", "inf", "0", "2000", "18GBx", "1e9GB"])
def test_other_texts_are_refused_with_the_text(text):
    with pytest.raises(ConfigError, match="write 18GB, 18GiB or 18e9") as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)


@settings(max_examples=100)
@given(st.sampled_from(sorted(WEIGHTS)), demands, st.integers(1 * 10**9, 90 * 10**9), st.integers(0, 10 * 10**9))
def test_plans(layout, demand, limit, more):
    """The sum is the limit; more memory never means more offloading; only what cannot fit is refused."""
    weights = WEIGHTS[layout]
    try:
        plan = plan_memory(RELEASED, weights, limit, demand)
    except MemoryLimitError:
        smallest = MemoryPlan(
            limit=limit, config=RELEASED, weights=weights, demand=demand, canvases=1,
            prefill_chunk=min(MIN_CHUNK, demand.prefill_chunk),
        )  # fmt: skip
        assert not any(replace(smallest, offloaded=count).fits for count in range(31))
        return
    assert sum(plan.parts.values()) + plan.cache_bytes == limit
    assert all(size >= 0 for size in plan.parts.values())
    assert plan.cache_bytes >= plan.canvases * KVCache.count_bytes(RELEASED, demand.context, plan.kv_dtype, demand.rewind)
    assert plan.canvases <= demand.canvases
    assert plan.prefill_chunk <= demand.prefill_chunk
    on_device = plan.parts["experts"] + plan.host_bytes
    assert on_device == sum(weights.experts)
    assert plan.engine_config.cache_bytes == plan.cache_bytes
    larger = plan_memory(RELEASED, weights, limit + more, demand)
    assert rank(larger) >= rank(plan)
    if plan.offloaded:  # with one layer less in host memory it does not fit, however small
        fewer = replace(plan, offloaded=0 if plan.offloaded == 3 else plan.offloaded - 1, canvases=1)
        assert not replace(fewer, prefill_chunk=min(MIN_CHUNK, demand.prefill_chunk)).fits


def rank(plan: MemoryPlan) -> tuple[int, int, int]:
    return -plan.offloaded, plan.prefill_chunk, plan.canvases


def test_what_is_refused_says_what_would_fit():
    """The limit and the context that the message names do fit."""
    with pytest.raises(MemoryLimitError) as error:
        plan_memory(RELEASED, WEIGHTS["published"], 8 * 10**9)
    message = str(error.value)
    assert "does not fit 8.00 GB with the experts of 30 layers in host memory" in message
    assert "--kv fp8" in message
    assert "embedding in fp8 (0.74 GB less: leave out --keep-bf16)" in message
    assert "--quant" not in message
    context = int(message.split("a context of ")[1].split(" ")[0].replace(",", ""))
    assert plan_memory(RELEASED, WEIGHTS["published"], 8 * 10**9, Demand(context=context)).offloaded
    limit = round(float(message.split("a limit of ")[1].split(" ")[0]) * 1e9) + 10**7
    assert plan_memory(RELEASED, WEIGHTS["published"], limit).offloaded


def test_the_sums_of_the_released_shape():
    """Published sums, and the promise: 4-bit experts, fp8 elsewhere and 16,384 tokens within 18e9 bytes."""
    totals = {name: round(weights.total / 1e9, 2) for name, weights in WEIGHTS.items()}
    assert totals == {"published": 17.67, "fp8 beside": 16.03, "fp8 embedding": 15.29, "bf16": 50.5}
    plan = plan_memory(RELEASED, WEIGHTS["fp8 embedding"], 18 * 10**9)
    assert (plan.offloaded, plan.demand.context) == (0, 16_384)
    plan = plan_memory(RELEASED, WEIGHTS["published"], 24 * 10**9)
    assert plan.offloaded == 0
    assert plan.allocator_bytes + plan.cuda_context == plan.limit
    assert plan.parts["reserve"] == plan.limit // RESERVE_SHARE


def test_a_capture_needs_as_much_as_its_graph_outside_of_it():
    plan = plan_memory(RELEASED, WEIGHTS["published"], 24 * 10**9, Demand(canvases=1, has_constraints=False))
    soft_embeddings = 2 * 2 * RELEASED.canvas_length * RELEASED.hidden_size * 2  # two contexts, with the sampler and without
    graphs = plan.parts["CUDA graphs: logits and activations"] - soft_embeddings
    assert plan.parts["prefill, captures, constrained requests"] == graphs


def test_the_buffers_of_graphs_are_planned():
    """Graphs are captured for 1, 2 and 4 canvases and for contexts up to 2,048, 16,384 ... tokens."""
    assert [bucket_contexts(count)[-1] for count in (1, 2048, 2049, 32_768, 32_769)] == [2048, 2048, 32_768, 32_768, 524_288]
    short, long = (
        plan_memory(RELEASED, WEIGHTS["bf16"], 90 * 10**9, Demand(context=context, canvases=4)) for context in (2048, 2304)
    )
    graphs = "CUDA graphs: logits and activations"
    soft_embeddings = (1 + 2 + 4) * RELEASED.canvas_length * RELEASED.hidden_size * 2
    assert long.parts[graphs] - short.parts[graphs] == 2 * soft_embeddings


def test_adapters_and_their_forwards_are_planned():
    """Their requests run through the reference forwards, which keep scores and a stack of experts in full precision."""
    plain, adapted = (
        plan_memory(RELEASED, WEIGHTS["published"], 40 * 10**9, Demand(canvases=4, adapter_bytes=nbytes))
        for nbytes in (0, 10**8)
    )
    assert plain.parts["adapters"] == plain.parts["reference forwards"] == 0
    assert adapted.parts["adapters"] == 10**8
    assert adapted.parts["reference forwards"] > 2 * 10**9
    assert adapted.cache_bytes == plain.cache_bytes - 10**8 - adapted.parts["reference forwards"]
    assert adapted.fits


def test_the_vision_tower_is_planned_when_it_is_asked_for():
    """The plan counts the bytes that the loaded tower has. A text-only model has no tower."""
    released = replace(RELEASED, vision=vision_models.RELEASED)
    plain, with_vision = (
        plan_memory(released, WEIGHTS["published"], 40 * 10**9, Demand(canvases=4, has_vision=has_vision))
        for has_vision in (False, True)
    )
    assert plain.parts["vision tower"] == plain.parts["reference forwards"] == 0
    weights = 2 * 572_794_416
    assert weights < with_vision.parts["vision tower"] < weights + 200 * 10**6
    added = with_vision.parts["vision tower"] + with_vision.parts["reference forwards"]
    assert with_vision.cache_bytes == plain.cache_bytes - added
    assert with_vision.fits
    text_only = replace(released, vision={"num_hidden_layers": 0})
    assert plan_memory(text_only, WEIGHTS["bf16"], 90 * 10**9, Demand(has_vision=True)).parts["vision tower"] == 0
    assert ("vision tower", "1.30 GB") in with_vision.rows()
    with pytest.raises(MemoryLimitError, match=r"text only, without --vision and --image \(\d\.\d\d GB less\)"):
        plan_memory(released, WEIGHTS["fp8 embedding"], 6 * 10**9, Demand(has_vision=True))


def test_a_context_is_no_longer_than_the_models():
    plans = [plan_memory(RELEASED, WEIGHTS["bf16"], 90 * 10**9, Demand(context=context)) for context in (2**18, 2**20)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("stored", "gigabytes", "rounded", "offloads"),
    [
        (NVIDIA, 24, {}, False),
        (NVIDIA, 20, {"packs_dense": True}, False),
        (NVIDIA, 18, {"packs_dense": True, "packs_embedding": True}, False),
        (NVIDIA, 12, {"packs_dense": True, "packs_embedding": True, "prefer_small": True}, True),
        (Q8_0, 32, {}, False),
        (Q8_0, 24, {"prefer_small": True}, False),
        (Q8_0, 18, {"prefer_small": True, "packs_dense": True, "packs_embedding": True}, False),
    ],
)
def test_no_more_is_rounded_than_it_takes(stored, gigabytes, rounded, offloads):
    """Weights stay as they are if they fit without offloading; the table says what was rounded, and why."""
    weights = WeightBytes.by_policy(RELEASED, stored, GPU.alternatives)
    policy, plan = choose_policy(RELEASED, weights, gigabytes * 10**9, Demand())
    assert policy == replace(GPU, **rounded)
    assert plan.weights == weights[policy]
    assert bool(plan.offloaded) == offloads
    sentence = dict(plan.rows()).get("rounded to fit", "")
    words = {"packs_dense": "dense MLP to fp8", "packs_embedding": "embedding to fp8", "prefer_small": "experts to NVFP4"}
    changed = {"packs_dense": stored is NVIDIA, "packs_embedding": True, "prefer_small": stored is Q8_0}
    assert [word for name, word in words.items() if name in rounded and changed[name]] == [
        word for word in words.values() if word in sentence
    ]
    if sentence:  # with that much more memory, nothing would have to be rounded
        missing = float(sentence.split("otherwise ")[1].split(" GB")[0]) * 1e9 + 10**7
        policy, _ = choose_policy(RELEASED, weights, int(gigabytes * 10**9 + 1.01 * missing), Demand())
        assert policy == GPU


def test_a_plan_runs(tmp_path):
    """Loading asks where weights go; offloaded experts are loaded to the host, streamed, and give the same tokens."""
    config = replace(tiny.BASE, layer_types=("sliding_attention",) * 5 + ("full_attention",), hidden_size=64)
    folder = tiny.save_folder(tmp_path / "model", config)
    expected, tokenizer, sampler = checkpoint.load_checkpoint(folder, device="cpu", dtype="float32")
    plans: list[MemoryPlan] = []

    def place(config, sizes, dtype) -> Placement:
        policy = next(iter(sizes))
        weights = WeightBytes.from_sizes(sizes[policy], config.num_hidden_layers)
        assert weights.total == sum(tensor.nbytes for tensor in expected.state_dict().values())
        options = {"dtype": dtype, "cuda_context": 0}
        unlimited = plan_memory(config, weights, 10**12, Demand(context=256), **options)
        smallest = replace(unlimited, canvases=1, prefill_chunk=MIN_CHUNK)
        used = sum(smallest.parts.values()) - smallest.parts["reserve"] + smallest.context_bytes
        limit = (used - weights.experts[0] + 8192) * RESERVE_SHARE // (RESERVE_SHARE - 1) + 1
        plans.append(plan_memory(config, weights, limit, Demand(context=256), **options))
        return Placement(torch.device("cpu"), policy, frozenset(plans[0].offloaded_layers))

    model, _, _ = checkpoint.load_checkpoint(folder, device="cpu", dtype="float32", place=place)
    (plan,) = plans
    assert (plan.offloaded, plan.canvases) == (3, 1)
    offload_experts(model, plan.offloaded_layers)
    stream = find_stream(model)
    assert stream is not None
    assert stream.device_bytes <= plan.slot_bytes
    assert stream.step_bytes == plan.step_bytes
    prompt = [2, *range(30, 40)]
    found = []
    for each in (expected, model):
        engine = Engine(each, plan.engine_config)
        request = engine.add(prompt, sampler.changed(max_new_tokens=16, max_steps=2), seed=0)
        found.append(engine.run([request])[request].ids_BT)
    assert torch.equal(*found)
    assert tokenizer.size <= config.vocab_size


def test_a_limit_needs_a_gpu_and_a_plan():
    with pytest.raises(ConfigError, match="runs on cpu"):
        redraft.load(gpu_memory="18GB", device="cpu")
    with pytest.raises(ConfigError, match="context is 99"):
        limit_gpu("cpu", None, 99, None, None)
    with pytest.raises(ConfigError, match="verify_with"):
        limit_gpu("cpu", "18GB", None, None, "tiny")
    with pytest.raises(ConfigError, match="'int3'"):
        redraft.load(kv="int3", device="cpu")


@pytest.fixture(name="fractions")
def _fractions(monkeypatch):
    """A card of 24 GB. Returns the shares of it that torch was given."""
    fractions = []
    card = SimpleNamespace(total_memory=24 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: int(fractions[-1] * 24e9) / 24e9)
    monkeypatch.setattr(gpu_limit, "measure_cuda_context", lambda device: 6 * 10**8)
    monkeypatch.setattr(gpu_limit, "use_expandable_segments", lambda: None)
    lifts = []

    def finalize(*arguments) -> weakref.finalize:
        lifts.append(weakref.finalize(*arguments))
        return lifts[-1]

    monkeypatch.setattr(gpu_limit, "weakref", SimpleNamespace(finalize=finalize))
    yield fractions
    for lift in lifts:  # while the card is there, not when Python finds the limit
        lift()


@pytest.mark.soak
def test_a_limit_ends_with_its_owner(fractions):
    """Without an owner torch may allocate all memory; a newer limit stays when an older one ends."""
    first = GpuLimit(CUDA, "12GB", Demand())
    del first
    assert fractions == [pytest.approx(11.4 / 24), 1.0]
    older = GpuLimit(CUDA, "12GB", Demand())
    newer = GpuLimit(CUDA, "18GB", Demand())
    older.lift()
    assert fractions[-1] == pytest.approx(17.4 / 24)
    newer.lift()
    assert fractions[-1] == 1.0


def test_a_limit_has_room_for_the_vision_tower_if_it_is_asked_for(fractions, monkeypatch):
    monkeypatch.setattr(gpu_limit, "select_device", lambda device: device)
    plain, with_vision = (limit_gpu(CUDA, "18GB", 4096, None, None, vision=vision) for vision in (False, True))
    assert (plain.demand.has_vision, with_vision.demand.has_vision) == (False, True)
    assert plain.context_bytes == 0  # before a model is placed
    plain.plan = plan_memory(RELEASED, WEIGHTS["fp8 embedding"], plain.limit, plain.demand)
    assert plain.context_bytes == KVCache.count_bytes(RELEASED, 4096, torch.bfloat16, plain.demand.rewind)


def test_the_peak_is_what_is_measured(fractions, monkeypatch):
    """Torch's peak and all that is in use beside torch, however much."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**9, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 18 * 10**9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 19 * 10**9)
    assert gpu_limit.peak_bytes(CUDA) == 23 * 10**9
    peak = GpuLimit(CUDA, "20GB", Demand()).peak
    assert peak == "GPU memory: at most 23.00 of 20.00 GB, 19.00 by torch and 4.00 by CUDA and other programs"


def test_a_lack_of_memory_names_limit_plan_and_ways_out(fractions, monkeypatch):
    """While loading it is a MemoryLimitError, in a request the message of its error."""
    limit = GpuLimit(CUDA, "18GB", Demand())

    def fail(*_, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    message = r"out of GPU memory while the model is loaded: the limit is 18\.00 GB; raise --gpu-memory"
    with pytest.raises(MemoryLimitError, match=message), explain_lack_of_memory(limit):
        fail()
    limit.plan = plan_memory(RELEASED, WEIGHTS["fp8 embedding"], limit.limit)
    writer = Writer(tiny.build(tiny.BASE), tiny.byte_tokenizer(), tiny.sampler(), gpu_limit=limit)
    monkeypatch.setattr(writer.engine.runner, "prefill", fail)
    with pytest.raises(EngineError) as error:
        writer.write("abc", seed=1)
    sentence = str(error.value)
    assert sentence.startswith("out of GPU memory: the limit is 18.00 GB (planned: weights 15.29, KV caches 0.")
    assert "--gpu-memory" in sentence
    assert "--context (16,384)" in sentence


def test_a_limit_is_set_before_loading(fractions):
    """Torch may allocate what CUDA does not take; a card that is too small is refused with both numbers."""
    limit = GpuLimit(CUDA, "18GB", Demand(context=4096))
    assert fractions == [(18e9 - 6e8) / 24e9]
    sizes = {"embed_tokens.weight": 10**9, **{f"layers.{n}.experts.down_proj": 6 * 10**8 for n in range(30)}}
    placement = limit.place(RELEASED, {GPU: sizes}, torch.bfloat16)
    assert placement.policy == GPU
    assert limit.plan.cuda_context == 6 * 10**8
    assert placement.host_layers == frozenset(limit.plan.offloaded_layers)
    assert placement.host_layers
    for layer in range(30):
        where = "cpu" if layer in placement.host_layers else "cuda"
        assert placement.device_of(f"layers.{layer}.experts.down_proj").type == where
        assert placement.device_of(f"layers.{layer}.mlp.down_proj.weight").type == "cuda"
    with pytest.raises(ConfigError, match=r"25\.00 GB, but cuda:0 has 24\.00 GB"):
        GpuLimit(CUDA, "25GB", Demand())


def test_load_with_an_fp8_cache(tmp_path):
    writer = redraft.load(tiny.save_folder(tmp_path / "model"), device="cpu", kv="fp8")
    assert writer.model.cache_dtype == FP8_DTYPE
    assert writer.write("abc", seed=1).text == writer.write("abc", seed=1).text


def test_the_table_names_every_part():
    plan = plan_memory(RELEASED, WEIGHTS["published"], 12 * 10**9)
    rows = dict(plan.rows(25e9))
    assert float(rows["limit"].split()[0]) == 12.0
    named = [float(value.split()[0]) for name, value in rows.items() if name in plan.parts or name == "KV caches"]
    assert sum(named) == pytest.approx(12.0, abs=0.01 * len(named))
    assert f"{plan.offloaded} of 30 layers" in rows["in host memory"]
    assert f"{1e3 * plan.step_bytes / 25e9:.0f} ms at 25.0 GB/s" in rows["over the bus"]
    assert "asked for 8" in rows["canvases"]
