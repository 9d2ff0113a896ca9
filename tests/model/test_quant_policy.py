"""Policy: which format each weight gets, by part, stored format, device and the user's wishes; what loading says of it."""

from dataclasses import dataclass, field, replace

import pytest
import tiny
import torch
from torch import Tensor

from redraft import checkpoint
from redraft.checkpoint.placement import Placement
from redraft.kernels.fp8 import dequantize
from redraft.kernels.packed import FORMATS
from redraft.model.embedding import PackedEmbedding
from redraft.model.quant import conversion, pack_embedding
from redraft.model.quant.layers import PackedLinear
from redraft.model.quant.policy import ATTENTION, EMBEDDING, EXPERT_DOWN, PLAIN, QuantPolicy, Target, part_of

CPU = QuantPolicy()
GPU = QuantPolicy(runs_packed=True)
SMALL = QuantPolicy(runs_packed=True, packs_dense=True, prefer_small=True)
BF16 = replace(SMALL, keep_bf16=True)


@dataclass(frozen=True)
class FakeStored:
    """A weight of a file whose format fits none of ours."""

    format: str
    weight: Tensor = field(default_factory=lambda: torch.zeros(2, 2))
    packed_format: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes // 2

    def select(self, matrices: slice) -> "FakeStored":
        return replace(self, weight=self.weight[matrices])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)

    def pack(self) -> None:
        return None


PLAIN_WEIGHT = torch.zeros(2, 2)


@pytest.mark.parametrize(
    ("policy", "part", "stored", "target"),
    [
        (GPU, EXPERT_DOWN, "Q4_K", "int4"),
        (GPU, EXPERT_DOWN, "nvfp4-pack-quantized", "nvfp4"),
        (GPU, EXPERT_DOWN, "Q5_0", "fp8"),
        (SMALL, EXPERT_DOWN, "Q8_0", "nvfp4"),
        (SMALL, EXPERT_DOWN, "Q4_0", "int4"),
        (GPU, ATTENTION, "Q4_K", "fp8"),
        (BF16, ATTENTION, "Q4_K", None),
        (SMALL, ATTENTION, None, "fp8"),
        (BF16, ATTENTION, None, None),
        (GPU, ATTENTION, None, None),
        (SMALL, EXPERT_DOWN, None, None),
        (SMALL, EMBEDDING, "Q6_K", None),
        (replace(SMALL, packs_embedding=True), EMBEDDING, "Q6_K", "fp8"),
        (replace(BF16, packs_embedding=True), EMBEDDING, None, None),
        (CPU, EXPERT_DOWN, "Q4_K", None),
        (CPU, EXPERT_DOWN, "float-quantized", "fp8"),
        (BF16, ATTENTION, "float-quantized", "fp8"),
    ],
)
def test_targets(policy, part, stored, target):
    assert policy.target(part, stored) == Target(target)


@pytest.mark.parametrize("quant", ["nvfp4", "int4", "fp8"])
def test_targets_that_the_user_asks_for(quant):
    is_dequantized = quant != "fp8"
    assert QuantPolicy(quant=quant).target(EXPERT_DOWN, None) == Target(quant, is_dequantized)
    on_gpu = QuantPolicy(quant=quant, runs_packed=True)
    assert on_gpu.target(EXPERT_DOWN, None) == Target(quant)
    assert on_gpu.target(ATTENTION, None) == Target("fp8")
    assert replace(on_gpu, keep_bf16=True).target(ATTENTION, None) == PLAIN
    assert on_gpu.target(EMBEDDING, None) == PLAIN


@pytest.mark.parametrize("policy", [GPU, replace(GPU, packs_dense=True), SMALL, replace(SMALL, packs_embedding=True)])
def test_alternatives_lose_no_more_than_they_must(policy):
    """The first is the policy itself; a later one never rounds less to NVFP4; the last one rounds all; none comes twice."""
    first, last = policy.alternatives[0], policy.alternatives[-1]
    assert first == policy
    assert last == replace(SMALL, packs_embedding=True)
    losses = [(each.prefer_small, each.packs_embedding, each.packs_dense) for each in policy.alternatives]
    assert losses == sorted(set(losses))


def test_every_weight_has_a_part():
    counts = dict.fromkeys((name for name in tiny.BASE.parameter_counts()), 0)
    for name, weight in tiny.build(replace(tiny.BASE, draft_head_size=8)).state_dict().items():
        part = part_of(name)
        counts["experts" if part.startswith("experts.") else part] += weight.numel()
    expected = replace(tiny.BASE, draft_head_size=8).parameter_counts()
    assert {name: count for name, count in counts.items() if count} == {
        name: count for name, count in expected.items() if name not in ("total", "active")
    }


def stored_model(formats: dict[str, str]) -> dict:
    """The published tensors of a tiny model, in which weights of some parts are stored in other formats."""
    tensors = {}
    for name, weight in tiny.build(tiny.BASE, dtype=torch.bfloat16).state_dict().items():
        stored = formats.get(part_of(name))
        tensors[checkpoint.published_name(name)] = FakeStored(stored, weight) if stored else weight
    return tensors


@pytest.mark.parametrize(
    ("policy", "words", "experts"),
    [
        (CPU, "Q8_0 -> float32", None),
        (GPU, "Q8_0 -> fp8 by channel, relative error 2.", "fp8"),
        (SMALL, "Q8_0 -> NVFP4, relative error 8.", "nvfp4"),
    ],
)
def test_stored_weights_of_any_file_become_a_model(policy, words, experts):
    """A mapping of StoredWeights is all that the loader needs; the embedding may be one too."""
    formats = {EXPERT_DOWN: "Q8_0", "experts.gate_up_proj": "Q8_0", EMBEDDING: "Q6_K", ATTENTION: "Q8_0"}
    model = checkpoint.from_state_dict(tiny.BASE, stored_model(formats), dtype=torch.float32, policy=policy)
    assert f"experts.down_proj, 3 weights: {words}" in " ".join(model.conversions)
    assert "embedding, 1 weight: Q6_K -> float32" in model.conversions
    assert model.dtype == torch.float32
    assert isinstance(model.layers[0].self_attn.q_proj, PackedLinear) == policy.runs_packed
    if experts:
        assert FORMATS[type(model.layers[2].experts.packed("down_proj"))] == experts
    else:
        expected = tiny.build(tiny.BASE, dtype=torch.bfloat16).float().state_dict()
        assert all(torch.equal(weight, expected[name]) for name, weight in model.state_dict().items())


def test_experts_are_packed_together_or_not_at_all():
    """One of the two weights in full precision becomes fp8, and loading says so."""
    model = checkpoint.from_state_dict(tiny.BASE, stored_model({EXPERT_DOWN: "Q8_0"}), policy=GPU)
    assert {FORMATS[kind] for kind in model.layers[0].experts.formats} == {"fp8"}
    assert any("experts.gate_up_proj, 3 weights: bfloat16 -> fp8" in sentence for sentence in model.conversions)


@pytest.mark.parametrize("formats", [{}, {EXPERT_DOWN: "Q8_0"}, {EXPERT_DOWN: "Q8_0", "experts.gate_up_proj": "Q8_0"}])
def test_experts_lie_where_the_placement_says(formats):
    """Those of layer 1 stay in host memory, in full precision, packed, or packed because their neighbour is."""

    def place(config, sizes, dtype):
        return Placement(torch.device("meta"), GPU, frozenset({1}))

    model = checkpoint.from_state_dict(tiny.BASE, stored_model(formats), policy=GPU, place=place)
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == ("cpu" if name.startswith("layers.1.experts.") else "meta"), name


def test_without_a_dtype_a_quantized_embedding_becomes_bf16():
    assert checkpoint.from_state_dict(tiny.BASE, stored_model({EMBEDDING: "Q6_K"})).dtype == torch.bfloat16


@pytest.mark.parametrize("policy", [CPU, GPU, SMALL, replace(SMALL, packs_embedding=True), replace(GPU, quant="nvfp4")])
def test_planned_bytes_are_those_of_the_model(policy):
    """The placement is asked once, before a second weight is read, with the bytes that the weights will take."""
    formats = {EXPERT_DOWN: "Q8_0", "experts.gate_up_proj": "Q8_0", ATTENTION: "Q4_K"}
    planned = []

    def place(config, sizes, dtype):
        planned.append((sizes[policy], dtype))
        return Placement(torch.device("cpu"), policy, frozenset({1}))

    model = checkpoint.from_state_dict(tiny.BASE, stored_model(formats), policy=policy, place=place)
    ((sizes, dtype),) = planned
    assert dtype == torch.bfloat16
    assert sum(sizes.values()) == sum(tensor.nbytes for tensor in model.state_dict().values())


def test_a_packed_embedding_is_said_saved_and_loaded(tmp_path):
    """It is rounded to fp8 while it is loaded, and published in full precision."""
    policy = replace(SMALL, packs_embedding=True)
    model = checkpoint.from_state_dict(tiny.BASE, stored_model({EMBEDDING: "Q6_K"}), policy=policy)
    assert isinstance(model.embed_tokens, PackedEmbedding)
    assert any(sentence.startswith("embedding, 1 weight: Q6_K -> fp8 by channel") for sentence in model.conversions)
    checkpoint.save(model, tmp_path / "saved")
    loaded = checkpoint.load_model(tmp_path / "saved")
    assert torch.equal(loaded.embed_tokens.weight, dequantize(model.embed_tokens.table_VD, torch.bfloat16))


def test_an_embedding_is_packed_alike_in_memory_and_while_loading(monkeypatch):
    """A few rows at a time or all at once."""
    loaded = checkpoint.from_state_dict(tiny.BASE, stored_model({}), policy=replace(SMALL, packs_embedding=True))
    monkeypatch.setattr(conversion, "ROWS_AT_ONCE", 100)
    packed = pack_embedding(tiny.build(tiny.BASE, dtype=torch.bfloat16))
    for mine, other in zip(packed.embed_tokens.table_VD, loaded.embed_tokens.table_VD, strict=True):
        assert torch.equal(mine.float(), other.float())


def test_a_model_without_its_experts_is_not_saved(tmp_path):
    model = tiny.build(tiny.BASE)
    model.layers[1].experts = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"holds no layers\.1\.experts.* without gpu_memory"):
        checkpoint.save(model, tmp_path / "saved")
