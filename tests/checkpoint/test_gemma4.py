"""Standard Gemma 4 checkpoints as causal-only models: ours = transformers, saved = loaded, other shapes are refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    PreTrainedModel,
)
from typer.testing import CliRunner

from redraft import checkpoint, load
from redraft.checkpoint import CheckpointError, load_checkpoint
from redraft.checkpoint.names import GEMMA4, GEMMA4_TEXT, published_name
from redraft.cli.main import app
from redraft.config import FULL, SLIDING, SMALLEST_VISION, ConfigError, ModelConfig, SamplerConfig
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.generate import generate
from redraft.model.backbone import CausalOnlyError
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant import quantize_fp8
from redraft.tasks.sudoku import solve
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.train.loop import build_model
from redraft.writer import Writer

PROMPT = 70  # tokens: more than four windows of the plain configuration
CAUSAL = replace(tiny.BASE, is_causal_only=True, canvas_length=256, image_token_ids=ModelConfig().image_token_ids)

TEXT: dict[str, Any] = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "top_k_experts": 2,
    "enable_moe_block": True,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "head_dim": 8,
    "global_head_dim": 8,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 512,
    "eos_token_id": [1, 5],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": TEXT,
    "wide full heads": TEXT | {"global_head_dim": 24, "num_global_key_value_heads": 1},
    "short window": TEXT | {"sliding_window": 5, "num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    "one layer": TEXT | {"num_hidden_layers": 1, "layer_types": [FULL]},
    "default layer types": TEXT | {"num_hidden_layers": 7, "layer_types": None},
    "text of the released kind": TEXT | {"use_bidirectional_attention": "vision", "final_logit_softcapping": 5.0},
    "other RoPE": TEXT
    | {
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            FULL: {"rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        }
    },
}


def randomize(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Random weights under which every weight affects the output: norms and scalars differ from one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" or name.startswith(GEMMA4.skipped):  # the first is tied to the embedding
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            scale = 0.1 if tensor.dim() == 1 else 1.5 * tensor.shape[-1] ** -0.5
            tensor.copy_(noise * scale + (tensor.dim() == 1) * 1.0)
        model.get_input_embeddings().weight.mul_(0.3)
    return model.eval()


def build_text_model(name: str = "plain") -> Gemma4ForCausalLM:
    return randomize(Gemma4ForCausalLM(Gemma4TextConfig(**CONFIGS[name])))


def build_whole_model(name: str = "plain") -> Gemma4ForConditionalGeneration:
    """With a vision tower and an audio tower, as small as they can be."""
    vision = Gemma4VisionConfig(**{key: value for key, value in SMALLEST_VISION.items() if key != "model_type"})
    audio = Gemma4AudioConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 4], output_proj_dims=16
    )
    text = Gemma4TextConfig(**CONFIGS[name])
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio, eos_token_id=[1, 5])
    return randomize(Gemma4ForConditionalGeneration(config))


BUILDERS = {"text": build_text_model, "whole": build_whole_model}


def prompts(rows: int = 2) -> torch.Tensor:
    return torch.randint(6, tiny.VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def our_logits(model: DiffusionGemma, ids_BS: torch.Tensor, chunk: int = PROMPT) -> torch.Tensor:
    cache = model.new_cache(len(ids_BS), ids_BS.shape[1])
    hidden = [model.encode(part, cache) for part in ids_BS.split(chunk, dim=1)]
    return model.head(torch.cat(hidden, dim=1))


@torch.inference_mode()
def their_logits(model: PreTrainedModel, ids_BS: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids_BS).logits


def assert_equal_within_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.fixture(name="folder")
def _folder(tmp_path) -> Path:
    """A causal-only checkpoint of ours, with a tokenizer."""
    return checkpoint.save(tiny.build(CAUSAL), tmp_path / "model", tokenizer=tiny.byte_tokenizer())


def change_json(path: Path, **changes: Any) -> None:
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (raw | changes).items() if value != "absent"}))


# 1. Ours = transformers


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name, kind, tmp_path):
    theirs = BUILDERS[kind](name)
    theirs.save_pretrained(tmp_path)
    ours = checkpoint.load_model(tmp_path)
    assert ours.config.is_causal_only
    assert_equal_within_rounding(our_logits(ours, prompts()), their_logits(theirs, prompts()))


@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_encode_equals_whole_encode(name, tmp_path):
    build_text_model(name).save_pretrained(tmp_path)
    ours = checkpoint.load_model(tmp_path)
    for chunk in (1, 7, 64):
        assert_equal_within_rounding(our_logits(ours, prompts(), chunk), our_logits(ours, prompts()))


@pytest.mark.parametrize("kind", BUILDERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(name, kind, tmp_path):
    theirs = BUILDERS[kind](name)
    theirs.save_pretrained(tmp_path)
    ours = checkpoint.load_model(tmp_path)
    ids = prompts(rows=1)
    generated = theirs.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=-1)[0, PROMPT:].tolist()
    unused = min(set(range(tiny.VOCAB)) - set(generated))
    ours.config = replace(ours.config, eos_token_ids=(unused,))  # so that all 40 are generated
    assert len(generated) == 40
    assert list(generate_autoregressive(ours, ids[0].tolist(), 40)) == generated


def test_names_and_shapes_at_the_released_size():
    """Every tensor of the 26B-A4B text model, without memory for any of them."""
    config = ModelConfig(is_causal_only=True)
    published = {k: v for k, v in checkpoint.publish_model_config(config).items() if k not in ("architectures", "dtype")}
    with torch.device("meta"):
        ours = DiffusionGemma(config)
        theirs = Gemma4ForCausalLM(Gemma4TextConfig.from_dict(published))
    our_shapes = {published_name(name, GEMMA4_TEXT): tensor.shape for name, tensor in ours.state_dict().items()}
    their_shapes = {name: tensor.shape for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    assert our_shapes == their_shapes
    assert config.parameter_counts()["total"] == sum(shape.numel() for shape in their_shapes.values())
    assert config.parameter_counts()["self-conditioning"] == 0
    assert our_shapes["model.layers.5.self_attn.k_proj.weight"] == (1024, 2816)


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_parameter_counts_are_those_of_the_model(name):
    config = replace(tiny.CONFIGS[name], is_causal_only=True)
    assert config.parameter_counts()["total"] == sum(t.numel() for t in DiffusionGemma(config).state_dict().values())


# 2. Saved = loaded


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_saved_model_loads_in_transformers_and_here(kind, tmp_path):
    theirs = BUILDERS[kind]("wide full heads")
    theirs.save_pretrained(tmp_path / "theirs")
    ours = checkpoint.load_model(tmp_path / "theirs")
    checkpoint.save(ours, tmp_path / "ours")
    again = checkpoint.load_model(tmp_path / "ours")
    assert again.config == ours.config
    assert again.state_dict().keys() == ours.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in ours.state_dict().items())
    loaded, report = Gemma4ForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(their_logits(loaded.eval(), prompts()), their_logits(theirs, prompts()))


def test_a_causal_only_model_has_no_weights_of_the_denoiser(folder):
    model = checkpoint.load_model(folder)
    assert model.config == CAUSAL
    names = list(model.state_dict())
    assert not any("self_conditioning" in name or name.endswith(".layer_scalar") for name in names)
    assert sum(name.endswith(".encoder_layer_scalar") for name in names) == CAUSAL.num_hidden_layers
    assert sorted(load_file(folder / "model.safetensors")) == sorted(published_name(name, GEMMA4_TEXT) for name in names)


def test_fp8_goes_out_and_in(folder, tmp_path):
    quantized = quantize_fp8(checkpoint.load_model(folder))
    checkpoint.save(quantized, tmp_path / "fp8")
    loaded = checkpoint.load_model(tmp_path / "fp8")
    assert (loaded.config.quant, loaded.config.is_causal_only) == ("fp8", True)
    assert torch.equal(our_logits(loaded, prompts()), our_logits(quantized, prompts()))
    raw = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert raw["quantization_config"]["ignore"] == [*(f"model.layers.{n}.router.proj" for n in range(3)), "lm_head"]


def test_the_command_quantize_writes_a_causal_only_checkpoint(folder, tmp_path):
    result = CliRunner().invoke(app, ["quantize", str(folder), str(tmp_path / "fp8")])
    assert result.exit_code == 0, result.output
    assert checkpoint.read_model_config(tmp_path / "fp8") == replace(CAUSAL, quant="fp8")


def test_vision_weights_are_not_saved(folder, tmp_path):
    with pytest.raises(ValueError, match="without vision weights"):
        checkpoint.save(tiny.build(CAUSAL), tmp_path / "out", vision_from=folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda t: t.update({"model.extra": torch.ones(1)}), "does not have: model.extra"),
        (lambda t: t.update({"model.layers.0.per_layer_projection.weight": torch.ones(1)}), "per_layer_projection"),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "lm_head.weight differs"),
        (lambda t: t.pop("model.layers.0.layer_scalar"), "no tensor model.layers.0.layer_scalar"),
        (lambda t: [t.pop(name) for name in list(t) if ".layers.2." in name], "num_hidden_layers"),
    ],
)
def test_an_error_names_the_damaged_tensor(folder, change, words):
    tiny.remove_manifest(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_model(folder)
    assert words in str(caught.value)


def test_a_duplicate_of_the_embedding_is_accepted(tmp_path):
    build_whole_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors[published_name("embed_tokens.weight", GEMMA4)].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint.load_model(tmp_path).config.is_causal_only


# 3. Settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256; redraft runs 0"),
        ({"hidden_size_per_layer_input": "absent"}, "hidden_size_per_layer_input is 256; redraft runs 0"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; redraft runs 0"),
        ({"enable_moe_block": False}, "enable_moe_block is False; redraft runs True"),
        ({"enable_moe_block": "absent", "num_experts": None}, "enable_moe_block is False; redraft runs True"),
        ({"attention_k_eq_v": False}, "attention_k_eq_v is False; redraft runs True"),
        ({"attention_k_eq_v": None}, "attention_k_eq_v is None; redraft runs True"),
        ({"use_double_wide_mlp": True}, "use_double_wide_mlp is True; redraft runs False"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu'; redraft runs 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias is True; redraft runs False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False; redraft runs True"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping is None"),
        ({"final_logit_softcapping": "absent"}, "final_logit_softcapping is None"),
        ({"num_experts": None}, "no value for num_experts"),
        ({"top_k_experts": 9}, "top_k_experts is 9, but there are only 4 experts"),
        ({"model_type": "gemma4_unified_text", "architectures": ["Gemma4UnifiedForCausalLM"]}, "Gemma4UnifiedForCausalLM"),
        ({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}, "describes 'Gemma3ForCausalLM'"),
    ],
)
@pytest.mark.parametrize("kind", BUILDERS)
def test_another_shape_is_refused_in_one_sentence(kind, changes, words, tmp_path):
    config = json.loads(BUILDERS[kind]().config.to_json_string(use_diff=False))
    inner = config if kind == "text" or "model_type" in changes else config["text_config"]
    if "tie_word_embeddings" in changes:
        inner = config
    inner |= changes
    raw = {key: value for key, value in config.items() if value != "absent"}
    if kind == "whole":
        raw["text_config"] = {key: value for key, value in raw["text_config"].items() if value != "absent"}
    with pytest.raises(ConfigError) as caught:
        checkpoint.parse_model_config(raw)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_model_type_or_the_architecture_is_enough():
    raw = checkpoint.publish_model_config(CAUSAL)
    for name in ("model_type", "architectures"):
        assert checkpoint.parse_model_config({k: v for k, v in raw.items() if k != name}) == CAUSAL
    whole = {"model_type": "gemma4", "text_config": raw, "audio_config": {"hidden_size": 8}, "eos_token_id": [1, 5]}
    assert checkpoint.parse_model_config(whole) == CAUSAL
    with pytest.raises(ConfigError, match="no text_config"):
        checkpoint.parse_model_config({"model_type": "gemma4"})


def test_a_causal_only_model_has_no_draft_head():
    with pytest.raises(ConfigError, match="draft_head_size is 8"):
        replace(CAUSAL, draft_head_size=8)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 1.0, "top_k": 64, "top_p": 0.95}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 106, 50]},
            {"temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_ids": (1, 106, 50)},
        ),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 50}),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1}, {"top_k": 0, "min_p": 0.1}),
        (
            {"max_new_tokens": 9, "repetition_penalty": 1.2},
            {"max_new_tokens": 9, "repetition_penalty": 1.2, "temperature": 0.0},
        ),
    ],
)
def test_the_sampler_is_autoregressive_and_samples_as_transformers_would(generation, expected):
    sampler = checkpoint.parse_sampler_config(generation, CAUSAL)
    expected = {"eos_token_ids": (1, 5), "check": "exact", "draft_length": 0} | expected
    assert sampler == SamplerConfig(**expected)
    theirs, ours = checkpoint.publish_sampler_config(sampler, is_causal_only=True)
    assert checkpoint.parse_sampler_config(theirs, CAUSAL, ours) == sampler


def test_a_nonsense_temperature_is_refused():
    with pytest.raises(ConfigError, match="temperature must be a number"):
        checkpoint.parse_sampler_config({"do_sample": True, "temperature": "hot"}, CAUSAL)


# 4. What works on such a folder, and what is refused


def test_load_checkpoint_and_info(folder):
    change_json(tiny.remove_manifest(folder) / "generation_config.json", do_sample=True, temperature=0.7, top_k=5)
    model, tokenizer, sampler = load_checkpoint(folder, device="cpu", dtype="float32")
    assert model.config.is_causal_only
    assert tokenizer.token_bytes == tiny.byte_tokenizer().token_bytes
    assert (sampler.check, sampler.draft_length, sampler.temperature, sampler.top_k) == ("exact", 0, 0.7, 5)
    result = CliRunner().invoke(app, ["info", "--model", str(folder)])
    assert result.exit_code == 0, result.output
    assert "causal-only (standard Gemma 4): writes left to right" in result.output
    assert "self-conditioning" not in result.output
    assert "causal-only" not in CliRunner().invoke(app, ["info"]).output


def test_methods_of_the_denoiser_are_programming_errors():
    model = tiny.build(CAUSAL)
    ids = torch.zeros(1, 4, dtype=torch.long)
    calls = {
        "denoise": lambda: model.denoise(ids, None, model.new_cache(1, 4)),
        "soft_embed": lambda: model.soft_embed(torch.zeros(1, 4, CAUSAL.vocab_size)),
        "forward_train": lambda: model.forward_train(ids, ids, None, ids, {}),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"{name}\(\) was called on a causal-only model"):
            call()


def test_what_needs_a_denoiser_is_refused_in_one_sentence(folder):
    writer = load(folder, device="cpu")
    assert isinstance(writer, Writer)
    off = writer.sampler.changed(check="off")
    calls = {
        "infill": lambda: writer.fill("a [[ 2 ]] b"),
        "edit": lambda: writer.edit("some text", strength=0.5),
        "Sudoku": lambda: solve.solve(writer.model, [(0,) * 81], off, seed=0),
        "generation without a check": lambda: next(generate(writer.model, [[3]], off, seeds=[0])),
        "training": lambda: build_model(SimpleNamespace(init=str(folder))),
    }
    for name, call in calls.items():
        with pytest.raises(CausalOnlyError) as caught:
            call()
        assert str(caught.value).startswith(name)
        assert str(caught.value).endswith("this one is causal-only (a standard Gemma 4): it writes left to right")


def test_a_diffusion_model_has_a_denoiser():
    tiny.build(tiny.BASE).require_denoiser("infill")


def test_a_tokenizer_comes_along(folder):
    assert Tokenizer.from_folder(folder).size == tiny.VOCAB
