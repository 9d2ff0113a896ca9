"""fp8: quantized = unquantized within rounding, saved = loaded exactly, published names, and the layers that stay bf16."""

import json

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import redraft
from redraft import checkpoint
from redraft.checkpoint import CheckpointError
from redraft.config import ConfigError
from redraft.diffusion.generate import generate
from redraft.kernels.fp8 import FP8_DTYPE, Fp8Tensor, dequantize, quantize
from redraft.kernels.linear_fp8 import linear_fp8
from redraft.model import quant
from redraft.model.quant.layers import PackedExperts, PackedLinear


@given(st.integers(0, 10**6), st.sampled_from([1e-6, 1e-3, 1.0, 1e6]))
def test_quantization_error_is_at_most_a_sixteenth(seed, size):
    x = torch.randn(3, 17, generator=torch.Generator().manual_seed(seed)) * size
    x[1] = 0
    quantized = quantize(x, torch.bfloat16)
    assert quantized.qdata.dtype == FP8_DTYPE
    assert quantized.scale.shape == (3, 1)
    largest = x.abs().amax(dim=-1, keepdim=True)
    error = (dequantize(quantized) - x).abs()
    assert (
        error <= x.abs() / 16 + largest / 448
    ).all()  # e4m3 has three bits of fraction; small numbers are rounded to a fixed grid
    again = quantize(dequantize(quantized), torch.bfloat16)
    assert torch.allclose(dequantize(again), dequantize(quantized), rtol=0.13)


def test_linear_fp8_multiplies_rounded_numbers():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 5, 24, generator=generator), torch.randn(7, 24, generator=generator)
    quantized = quantize(w, torch.bfloat16)
    rounded = dequantize(quantize(x.reshape(-1, 24))).view_as(x)
    expected = rounded @ dequantize(quantized).T
    assert torch.allclose(linear_fp8(x, quantized), expected, atol=1e-4)
    assert linear_fp8(x.bfloat16(), quantized).dtype == torch.bfloat16
    assert not torch.allclose(linear_fp8(x, quantized), x @ w.T, atol=1e-3)
    stack = Fp8Tensor(quantized.qdata[None], quantized.scale[None])
    assert torch.equal(stack.select(0).qdata.float(), quantized.qdata.float())


def test_which_layers_are_quantized():
    model = quant.quantize_fp8(tiny.build(tiny.BASE))
    kinds = {name: type(module) for name, module in model.named_modules()}
    for name, kind in kinds.items():
        last = name.rsplit(".", 1)[-1]
        if last in ("q_proj", "k_proj", "v_proj", "o_proj") or (".mlp." in name and last.endswith("_proj")):
            assert kind is PackedLinear, name
        if last == "experts":
            assert kind is PackedExperts, name
        if "router" in name or "self_conditioning" in name or "embed" in name:
            assert kind not in (PackedLinear, PackedExperts), name
    assert model.config.quant == "fp8"
    assert quant.quantize_fp8(model) is model  # a second call changes nothing


@pytest.mark.parametrize("name", ["plain", "one layer", "more experts than tokens", "every expert"])
def test_saved_equals_loaded_exactly(tmp_path, name):
    model = quant.quantize_fp8(tiny.decided(tiny.CONFIGS[name], 3))
    checkpoint.save(model, tmp_path)
    again = checkpoint.load_model(tmp_path)
    assert again.config == model.config
    saved = model.state_dict()
    loaded = again.state_dict()
    assert set(saved) == set(loaded)
    for key in saved:
        assert saved[key].dtype == loaded[key].dtype, key
        assert torch.equal(saved[key].float(), loaded[key].float()), key
    events = [list(generate(m, [[2, 30, 40]], tiny.sampler(max_new_tokens=16), seeds=[1])) for m in (model, again)]
    assert torch.equal(events[0][-1].ids_BT, events[1][-1].ids_BT)


def test_the_file_has_the_published_layout(tmp_path):
    checkpoint.save(quant.quantize_fp8(tiny.build(tiny.BASE)), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        stem = "model.decoder.layers.0"
        for part in ("experts.3.gate_proj", "experts.0.up_proj", "experts.0.down_proj", "self_attn.q_proj", "mlp.down_proj"):
            weight, scale = (file.get_tensor(f"{stem}.{part}.{kind}") for kind in ("weight", "weight_scale"))
            assert (weight.dtype, scale.dtype) == (FP8_DTYPE, torch.bfloat16)
            assert scale.shape == (weight.shape[0], 1)
        assert file.get_tensor(f"{stem}.experts.0.gate_proj.weight").shape == (24, 32)
    assert not any("experts.gate_up_proj" in name for name in names)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "float-quantized")
    assert "model.decoder.layers.2.router.proj" in config["ignore"]
    assert "lm_head" in config["ignore"]


def test_other_quantizations_are_refused(tmp_path):
    checkpoint.save(quant.quantize_fp8(tiny.build(tiny.BASE)), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, words in (
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantized as 'modelopt', 'FP8'"),
        ({"quant_method": "gptq"}, "quantized as 'gptq'"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"config_groups": {}}, "fp8 by channel"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "fp8 by channel"),
        ({"config_groups": [1]}, "config_groups must be an object"),
    ):
        with pytest.raises(ConfigError, match=words):
            checkpoint.parse_model_config(raw | {"quantization_config": raw["quantization_config"] | change})
    tiny.remove_manifest(tmp_path)
    del raw["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="a tensor that this model does not"):
        checkpoint.load_model(tmp_path)
    with pytest.raises(ValueError, match="no quantization 'int3'; try nvfp4, int4, fp8"):
        redraft.load(quant="int3")


def test_quantizing_at_load_equals_quantizing_on_disk(tmp_path, monkeypatch, capsys):
    from redraft.cli import main  # the command line, in this process

    tiny.save_folder(tmp_path / "plain")
    monkeypatch.setattr("sys.argv", ["redraft", "quantize", str(tmp_path / "plain"), str(tmp_path / "quantized")])
    with pytest.raises(SystemExit) as left:
        main.main()
    assert not left.value.code
    assert capsys.readouterr().out == f"{tmp_path / 'quantized'}\n"
    sizes = [sum(f.stat().st_size for f in (tmp_path / n).glob("*.safetensors")) for n in ("plain", "quantized")]
    assert sizes[1] < sizes[0]
    at_load = redraft.load(tmp_path / "plain", quant="fp8")
    from_disk = redraft.load(tmp_path / "quantized")
    assert at_load.write("Hello", seed=2).ids == from_disk.write("Hello", seed=2).ids
    assert redraft.load(tmp_path / "quantized", quant="fp8").model.config.quant == "fp8"
