"""Quantized files of others: dequantized = the reference library's numbers, packed = dequantized, logits = those of the
model with these weights; damaged files are refused in one sentence that names the tensor."""

import functools
import json
import re
import shutil

import compressed_reference as reference
import pytest
import tiny
import torch
from compressed_folders import (
    COMPACT,
    DENSE,
    EXPERTS,
    FP8,
    INT4,
    LAYOUTS,
    NVFP4,
    compress_int4,
    compress_modelopt,
    compressed_config,
    describe,
    logits,
    save_compressed,
)
from safetensors.torch import load_file, save_file

from redraft import checkpoint
from redraft.checkpoint import CheckpointError
from redraft.config import ConfigError
from redraft.kernels.packed import FORMATS, dequantize_packed
from redraft.model.quant.layers import PackedLinear
from redraft.model.quant.policy import QuantPolicy


@pytest.fixture(scope="module", name="saved")
def _saved(tmp_path_factory):
    """Makes the folder of a layout, once. Returns it and its compressed modules."""

    @functools.cache
    def save(layout):
        folder = tmp_path_factory.mktemp("layout")
        return folder, save_compressed(folder, *LAYOUTS[layout])

    return save


def expected_weight(module: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight of a compressed module, by the reference."""
    if "weight_scale_2" in module:
        return reference.modelopt_weight(module["weight"], module["weight_scale"], module["weight_scale_2"])
    if "weight_global_scale" in module:
        return reference.decompress(NVFP4, module).float()
    if "weight_packed" not in module:
        return reference.decompress(FP8, module).float()
    groups = module["weight_scale"].shape[1]
    inputs = int(module["weight_shape"][1])
    changes = {"symmetric": "weight_zero_point" not in module, "group_size": inputs // groups}
    return reference.decompress(INT4, module, **changes).float()


def expected_weights(modules: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The weights of all compressed modules under the names of the bf16 layout."""
    weights = {}
    for name, module in modules.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+_proj)", name)
        if match is None:
            weights[f"{name}.weight"] = expected_weight(module)
        elif match[3] != "up_proj":
            parts = [name] if match[3] == "down_proj" else [name, name.replace("gate_proj", "up_proj")]
            stack = "down_proj" if match[3] == "down_proj" else "gate_up_proj"
            rows = torch.cat([expected_weight(modules[part]) for part in parts])
            weights.setdefault(f"{match[1]}.{stack}", {})[int(match[2])] = rows
    return {
        name: torch.stack([weight[n] for n in range(len(weight))]) if isinstance(weight, dict) else weight
        for name, weight in weights.items()
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dequantized_weights_are_the_references(saved, layout):
    folder, modules = saved(layout)
    _, tensors = checkpoint.open_weights(folder)
    expected = expected_weights(modules)
    assert {name for name in tensors if not isinstance(tensors[name], torch.Tensor)} == set(expected)
    for name, weight in expected.items():
        stored = tensors[name]
        assert stored.shape == tuple(weight.shape)
        assert torch.equal(stored.dequantize(), weight), name
        assert torch.equal(stored.dequantize(torch.bfloat16), weight.bfloat16()), name
        some = slice(3, 7) if len(stored.shape) == 3 else slice(8, 16)  # experts, or rows
        assert torch.equal(stored.select(some).dequantize(), weight[some]), name
        is_part = re.compile(
            re.escape(name.removesuffix(".weight")).replace("gate_up", r"\d+\.(gate|up)").replace("s\\.d", r"s\.\d+\.d")
        )
        parts = [module for part, module in modules.items() if is_part.fullmatch(part)]
        assert stored.nbytes == sum(t.nbytes for module in parts for kind, t in module.items() if kind != "input_scale")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_weights_hold_the_same_numbers(saved, layout):
    """Up to rounding: scales and minimums are rounded to bf16 here, products of the reference there."""
    folder, _ = saved(layout)
    _, tensors = checkpoint.open_weights(folder)
    for name in tensors:
        stored = tensors[name]
        if isinstance(stored, torch.Tensor):
            continue
        packed = stored.pack()
        if layout == "int4, groups of 16":
            assert packed is None
            continue
        numbers = dequantize_packed(packed, stored.shape[-1])
        expected = stored.dequantize()
        assert (numbers - expected).abs().amax() <= expected.abs().amax() * 2**-7, name


def dense_logits(folder, modules) -> torch.Tensor:
    """The logits of the unquantized model with the reference's weights."""
    _, tensors = checkpoint.open_weights(folder)
    expected = expected_weights(modules)
    plain = {name: expected[name] if name in expected else tensors[name] for name in tensors}
    return logits(checkpoint.from_state_dict(COMPACT, plain, dtype=torch.float32))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ("fp8", "mixed")])
def test_logits_are_those_of_the_model_with_these_weights(saved, layout):
    """On a CPU 4-bit weights are dequantized while they are loaded."""
    folder, modules = saved(layout)
    model = checkpoint.load_model(folder, dtype=torch.float32)
    assert model.config.quant is None
    assert torch.equal(logits(model), dense_logits(folder, modules))
    assert any(re.match("experts.down_proj, 2 weights: .* -> float32$", sentence) for sentence in model.conversions)


@pytest.mark.parametrize(
    ("layout", "keep_bf16", "formats"),
    [
        ("ModelOpt", False, ("nvfp4", "nvfp4", None, None)),
        ("NVFP4", False, ("nvfp4", "nvfp4", None, "fp8")),
        ("NVFP4", True, ("nvfp4", "nvfp4", None, None)),
        ("int4, zero points", False, ("int4", "int4", None, None)),
        ("int4, groups of 16", False, ("fp8", "fp8", None, None)),
        ("mixed", False, ("nvfp4", "nvfp4", "fp8", "fp8")),
    ],
)
def test_formats_where_packed_weights_run(saved, tmp_path, layout, keep_bf16, formats):
    folder, _ = saved(layout)
    policy = QuantPolicy(runs_packed=True, keep_bf16=keep_bf16)
    model = checkpoint.load_model(folder, dtype=torch.float32, policy=policy)
    layer = model.layers[0]
    packed = [layer.experts.packed("gate_up_proj"), layer.experts.packed("down_proj")]
    for linear in (layer.self_attn.q_proj, layer.mlp.up_proj):
        packed.append(linear.packed("weight") if isinstance(linear, PackedLinear) else None)
    assert tuple(None if weight is None else FORMATS[type(weight)] for weight in packed) == formats
    assert model.config.quant == "+".join(f for f in ("nvfp4", "int4", "fp8") if f in formats)
    on_cpu = checkpoint.load_model(folder, dtype=torch.float32)
    difference = (logits(model) - logits(on_cpu)).square().mean().sqrt()
    assert difference < (0.2 if "fp8" in formats else 0.05)  # the logits of fp8 layers differ by rounded activations too
    # Saved packed, and loaded again: the same numbers to the bit. ModelOpt's factor is written as a divisor.
    checkpoint.save(model, tmp_path / "again")
    again = checkpoint.load_model(tmp_path / "again", dtype=torch.float32, policy=policy)
    assert again.config == model.config
    for name, tensor in again.state_dict().items():
        before = model.state_dict()[name]
        if layout == "ModelOpt" and name.endswith("global_scale"):
            assert torch.allclose(before, tensor, rtol=2**-23, atol=0)
        else:
            assert torch.equal(before.float(), tensor.float()), name


def test_a_partial_last_group(tmp_path):
    """The rows of `down_proj` have 32 inputs here: one group of 48 and none other. Groups are indexed by i // group."""
    words = torch.randint(-(2**31), 2**31 - 1, (8, 4), dtype=torch.int32)
    wide = torch.randint(-(2**31), 2**31 - 1, (32, 8), dtype=torch.int32)
    scales = {(8, 4): torch.rand(8, 1), (32, 8): torch.rand(32, 2)}

    def compress(weight):
        rows, inputs = weight.shape
        packed = (wide if inputs == 64 else words.repeat(8, 1))[:rows].clone()
        scale = (scales[32, 8] if inputs == 64 else scales[8, 4].repeat(8, 1))[:rows].bfloat16()
        return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([rows, inputs])}

    config = compressed_config(describe(INT4, group_size=48), file_format=INT4)
    modules = save_compressed(tmp_path, {EXPERTS: compress}, config)
    _, tensors = checkpoint.open_weights(tmp_path)
    stored = tensors["model.decoder.layers.0.experts.gate_up_proj"]
    module = modules["model.decoder.layers.0.experts.2.up_proj"]
    codes = torch.stack([module["weight_packed"] >> 4 * i & 15 for i in range(8)], dim=-1).flatten(-2)
    group = torch.arange(64) // 48
    expected = (codes - 8).bfloat16() * module["weight_scale"][:, group]
    assert torch.equal(stored.dequantize(torch.bfloat16)[2, 32:], expected)
    assert stored.pack() is None  # groups of 48 are no multiple of 32


@pytest.mark.parametrize("size", [64, 128])
def test_large_groups_repeat_their_scale(tmp_path, size):
    config = compressed_config(describe(INT4, group_size=size), file_format=INT4)
    save_compressed(tmp_path, {DENSE: compress_int4(64)}, config)
    _, tensors = checkpoint.open_weights(tmp_path)
    stored = tensors["model.decoder.layers.0.mlp.up_proj.weight"]
    assert torch.equal(dequantize_packed(stored.pack(), 64).bfloat16(), stored.dequantize(torch.bfloat16))


def test_worked_words(saved, tmp_path):
    """The words and bytes of the formats' descriptions."""
    folder = shutil.copytree(saved("int4, zero points")[0], tmp_path / "int4")
    tensors = load_file(folder / "model.safetensors")
    module = "model.decoder.layers.0.experts.0.gate_proj"
    tensors[f"{module}.weight_packed"][0, 0] = 0x4FBA9870
    tensors[f"{module}.weight_zero_point"][0, 0] = 0xCBA9F810 - 2**32
    tensors[f"{module}.weight_scale"][:, 0] = 1
    save_file(tensors, folder / "model.safetensors")
    weight = checkpoint.open_weights(folder)[1]["model.decoder.layers.0.experts.gate_up_proj"].dequantize()[0]
    assert weight[0, :8].tolist() == [value + 8 for value in (-8, -1, 0, 1, 2, 3, 7, -4)]  # row 0 has zero point -8
    codes = tensors[f"{module}.weight_packed"][:8, 0] & 15
    zeros = torch.tensor([-8, -7, 0, 7, 1, 2, 3, 4]) + 8
    assert weight[:8, 0].tolist() == (codes - zeros).tolist()


MODULE = "model.decoder.layers.1.experts.4.up_proj"


def change(kind, make):
    def apply(tensors):
        tensors[f"{MODULE}.{kind}"] = make(tensors[f"{MODULE}.{kind}"])

    return apply


def fill(value):
    def make(tensor):
        changed = tensor.clone().float()
        changed.view(-1)[-1] = value
        return changed.to(tensor.dtype)

    return make


def remove(kind):
    return lambda tensors: tensors.pop(f"{MODULE}.{kind}")


@pytest.mark.parametrize(
    ("layout", "damage", "words"),
    [
        ("NVFP4", change("weight_scale", fill(float("nan"))), r"up_proj\.weight_scale holds a scale of nan"),
        ("NVFP4", change("weight_scale", fill(-1.0)), r"up_proj\.weight_scale holds a scale of -1"),
        ("NVFP4", change("weight_global_scale", fill(0.0)), r"weight_global_scale holds a scale of 0"),
        ("NVFP4", change("weight_global_scale", fill(float("inf"))), "weight_global_scale holds a scale of inf"),
        ("NVFP4", change("weight_global_scale", lambda t: t.repeat(2)), r"shape \[2\], its weight needs one number"),
        (
            "NVFP4",
            change("weight_scale", lambda t: t[:, :-1].clone()),
            r"weight_scale has shape \[32, 3\], its weight needs \[32, 4\]",
        ),
        ("NVFP4", change("weight_scale", lambda t: t.float()), "weight_scale is F32; in its format it is F8_E4M3"),
        ("NVFP4", change("weight_packed", lambda t: t[:, :16].clone()), "its weight needs"),
        ("NVFP4", remove("weight_scale"), r"no tensor .*up_proj\.weight_scale"),
        ("NVFP4", remove("weight_global_scale"), "no tensor .*weight_global_scale"),
        ("NVFP4", remove("weight_packed"), r"no tensor .*up_proj\.weight"),
        ("ModelOpt", change("weight_scale_2", fill(float("nan"))), "weight_scale_2 holds a scale of nan"),
        ("ModelOpt", remove("weight_scale_2"), "no tensor .*weight_scale_2"),
        ("int4", change("weight_scale", fill(float("inf"))), "weight_scale holds a scale of inf"),
        ("int4", change("weight_shape", lambda t: t + 9), r"weight_shape says \[41, 73\]"),
        ("int4, zero points", remove("weight_zero_point"), "no tensor .*weight_zero_point"),
        ("int4, zero points", change("weight_zero_point", lambda t: t[:-1].clone()), "weight_zero_point has shape"),
        ("fp8", change("weight_scale", fill(float("nan"))), "weight_scale holds a scale of nan"),
        ("fp8", change("weight", lambda t: t.bfloat16()), "is BF16; in its format it is F8_E4M3"),
        ("int4", lambda t: [t.pop(n) for n in list(t) if n.startswith(MODULE)], "no tensor .*experts.4.up_proj"),
    ],
)
def test_damaged_files_are_refused(saved, tmp_path, layout, damage, words):
    shutil.copytree(saved(layout)[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as error:
        checkpoint.load_model(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_reordered_inputs_are_refused_and_trivial_orders_are_not(saved, tmp_path):
    folder, modules = saved("int4")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    order = (torch.arange(64) // 32).int()
    save_file(tensors | {f"{MODULE}.weight_g_idx": order}, tmp_path / "model.safetensors")
    assert torch.equal(logits(checkpoint.load_model(tmp_path, dtype=torch.float32)), dense_logits(tmp_path, modules))
    save_file(tensors | {f"{MODULE}.weight_g_idx": order.flip(0).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="weight_g_idx reorders the inputs"):
        checkpoint.load_model(tmp_path)


def test_modelopts_own_file_says_the_same(tmp_path):
    save_compressed(tmp_path, {EXPERTS: compress_modelopt}, None)
    with pytest.raises(CheckpointError, match="a tensor that this model does not have"):
        checkpoint.load_model(tmp_path)
    settings = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    assert checkpoint.read_model_config(tmp_path).quant == "nvfp4"
    checkpoint.load_model(tmp_path)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "awq"}, "'awq'"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {}}},
            "MIXED_PRECISION.*a.b",
        ),
        (compressed_config(describe(NVFP4), file_format="mxfp4-pack-quantized"), "Linear.*'mxfp4-pack-quantized'"),
        (compressed_config(describe(INT4, num_bits=8), file_format=INT4), "Linear.*'pack-quantized', 8 bits"),
        (compressed_config(describe(FP8, strategy="tensor"), file_format=FP8), "Linear.*'float-quantized'.*'tensor'"),
        (compressed_config(describe(NVFP4), file_format="mixed-precision"), "format 'mixed-precision'"),
        (compressed_config(file_format=NVFP4), "without config_groups"),
        (compressed_config(describe(INT4, group_size=0), file_format=INT4), "group_size of group_0"),
    ],
)
def test_other_formats_are_refused_by_name(config, words):
    raw = checkpoint.publish_model_config(tiny.BASE) | {"quantization_config": config}
    with pytest.raises(ConfigError, match=words):
        checkpoint.parse_model_config(raw)
