"""Configuration: the defaults are the released values, published files are read and written, bad values are refused."""

import json
from contextlib import suppress
from dataclasses import fields, replace

import pytest
import tiny
from transformers import DiffusionGemmaGenerationConfig

from redraft import checkpoint
from redraft.config import FULL, SLIDING, ConfigError, ModelConfig, SamplerConfig

# config.json of google/diffusiongemma-26B-A4B-it: the keys that shape the text model, and what it leaves out.
RELEASED = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "eos_token_id": [1, 106],
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "diffusion_gemma_text",
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
        "sliding_window": 1024,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": "vision",
        "attention_bias": False,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152},
}
GENERATION = {
    "confidence_threshold": 0.005,
    "eos_token_id": [1, 106, 50],
    "max_denoising_steps": 48,
    "max_new_tokens": 256,
    "pad_token_id": 0,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "stability_threshold": 1,
    "t_max": 0.8,
    "t_min": 0.4,
    "transformers_version": "5.8.0.dev0",
}


def with_text(**changes: object) -> dict:
    text = {**RELEASED["text_config"], **changes}
    return {**RELEASED, "text_config": {k: v for k, v in text.items() if v is not ...}}


def test_the_defaults_are_those_of_the_released_files():
    config = checkpoint.parse_model_config(RELEASED)
    assert replace(config, vision=ModelConfig().vision) == ModelConfig()
    assert config.vision["hidden_size"] == 1152
    assert checkpoint.parse_sampler_config(GENERATION, config) == SamplerConfig()


def test_missing_keys_are_derived():
    bare = with_text(layer_types=..., rope_parameters=..., rms_norm_eps=..., num_global_key_value_heads=...)
    config = checkpoint.parse_model_config(bare)
    assert config.layer_types == ModelConfig().layer_types
    assert (config.rope_theta, config.global_rope_theta, config.global_rotary_fraction) == (1e4, 1e6, 0.25)
    assert config.num_global_key_value_heads == 8
    assert checkpoint.parse_model_config(with_text(layer_types=[SLIDING] * 30)).layer_types[-1] == FULL


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_published_config_is_parsed_back(name):
    config = tiny.CONFIGS[name]
    assert checkpoint.parse_model_config(json.loads(json.dumps(checkpoint.publish_model_config(config)))) == config


def test_parameter_counts_are_those_of_the_released_model():
    counts = ModelConfig().parameter_counts()
    billions = {name: round(count / 1e9, 3) for name, count in counts.items()}
    assert billions["attention"] == 1.110
    assert billions["dense MLP"] == 0.535
    assert billions["experts"] == 22.838
    assert billions["embedding"] == 0.738
    assert billions["total"] == 25.251


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_parameter_counts_are_those_of_the_model(name):
    config = tiny.CONFIGS[name]
    model = tiny.build(config)
    assert config.parameter_counts()["total"] == sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, ["MambaForCausalLM"]),
        ({}, ["nothing"]),
        ({**RELEASED, "text_config": None}, ["text_config"]),
        ({**RELEASED, "quantization_config": {"quant_method": "modelopt"}}, ["modelopt"]),
        (with_text(hidden_size=...), ["hidden_size"]),
        (with_text(num_experts=None), ["num_experts"]),
        (with_text(hidden_size=0), ["hidden_size", "0"]),
        (with_text(hidden_size="big"), ["hidden_size", "big"]),
        (with_text(num_key_value_heads=3), ["16", "3"]),
        (with_text(top_k_experts=129), ["129", "128"]),
        (with_text(layer_types=[FULL]), ["1", "30"]),
        (with_text(layer_types=["linear"] * 30), ["linear"]),
        (with_text(attention_bias=True), ["attention_bias"]),
        (with_text(use_bidirectional_attention="all"), ["all"]),
        (with_text(hidden_activation="silu"), ["silu"]),
        (with_text(global_head_dim=...), ["global_head_dim"]),
        (with_text(head_dim=255), ["255"]),
        (with_text(sliding_window=1), ["sliding_window", "1"]),
        (with_text(pad_token_id=262144), ["262144"]),
        (with_text(final_logit_softcapping=-1.0), ["-1.0"]),
        (with_text(per_layer_config={"0": {"head_dim": 64}}), ["per_layer_config"]),
        (with_text(rope_parameters={FULL: {"rope_type": "yarn"}}), ["yarn"]),
    ],
)
def test_bad_model_values_are_refused_by_name(raw, words):
    with pytest.raises(ConfigError) as caught:
        checkpoint.parse_model_config(raw)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "change",
    [
        {"max_steps": 0},
        {"max_steps": 1.5},
        {"max_new_tokens": -3},
        {"canvas_length": True},
        {"entropy_bound": 0.0},
        {"entropy_bound": float("nan")},
        {"confidence_threshold": 0},
        {"t_min": 0.9},
        {"t_min": -0.1},
        {"t_min": False},
        {"stability_threshold": -1},
        {"stability_threshold": 1.0},
        {"t_max": float("inf")},
        {"t_max": 1e-50, "t_min": 0.0},
        {"quota": "yes"},
        {"stops_last": 1},
        {"spread": -1},
        {"spread": 10**8},
        {"spread": 2.5},
        {"eos_token_ids": (-5,)},
        {"heat": "hot"},
        {"check": "yes"},
        {"tolerance": -1.0},
        {"temperature": -0.5},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"3": 101}},
        {"logit_bias": 5},
        {"logit_bias": [(3, 1.0), (4, 2.0), (3, 1.0)]},
        {"draft_length": 65},
        {"draft_steps": 0},
        {"draft_token": -1},
    ],
)
def test_bad_sampler_values_are_refused_by_name(change):
    (name, value), *_ = change.items()
    with pytest.raises(ConfigError) as caught:
        SamplerConfig().changed(**change)
    assert name.removesuffix("s") in str(caught.value)
    assert name == "heat" or str(value).strip("(),") in str(caught.value)


def test_sampler_settings_are_read_back_from_a_folder(tmp_path):
    flags = {"quota": True, "accept_at_end": True, "spread": 3, "stops_last": True}
    settings = SamplerConfig(canvas_length=64, max_steps=7, eos_token_ids=(1,), **flags)
    theirs, ours = checkpoint.publish_sampler_config(settings)
    (tmp_path / "generation_config.json").write_text(json.dumps(theirs))
    (tmp_path / "redraft.json").write_text(json.dumps(ours))
    assert checkpoint.read_sampler_config(tmp_path, ModelConfig()) == settings
    with pytest.raises(ConfigError, match="ConfidenceSamplerConfig"):
        checkpoint.parse_sampler_config({"sampler_config": {"_cls_name": "ConfidenceSamplerConfig"}}, ModelConfig())


def test_max_canvases():
    assert [SamplerConfig(max_new_tokens=n).max_canvases for n in (1, 256, 257, 512)] == [1, 1, 2, 2]


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_unreadable_json_is_refused_with_its_file_name(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        checkpoint.read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        checkpoint.read_model_config(tmp_path / "elsewhere")


ODD = [None, True, -1, 0, 2.5, 10**30, float("inf"), float("nan"), "x", "3", "", [], [1, "x"], [[]], {}, {"a": 1}, [None]]


def everywhere(raw: object, path: tuple = ()):
    """The path of every value in a nested dictionary."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            yield (*path, key)
            yield from everywhere(value, (*path, key))


def replaced(raw: dict, path: tuple, value: object) -> dict:
    head, *rest = path
    return {**raw, head: replaced(raw[head], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("path", [p for p in everywhere(RELEASED) if p[0] != "vision_config" or len(p) == 1], ids=".".join)
def test_odd_values_in_config_json_are_parsed_or_refused_but_never_crash(path):
    for value in ODD:
        with suppress(ConfigError):
            config = checkpoint.parse_model_config(replaced(RELEASED, path, value))
            assert checkpoint.parse_model_config(json.loads(json.dumps(checkpoint.publish_model_config(config)))) == config


GEMMA4 = checkpoint.publish_model_config(ModelConfig(is_causal_only=True))
GEMMA4_GENERATION = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "min_p": 0.0} | {
    "eos_token_id": [1, 106, 50],
    "pad_token_id": 0,
    "max_new_tokens": 64,
    "repetition_penalty": 1.0,
}


@pytest.mark.parametrize("path", list(everywhere(GEMMA4)), ids=".".join)
def test_odd_values_of_a_causal_only_checkpoint_are_parsed_or_refused_but_never_crash(path):
    for value in ODD:
        changed = replaced(GEMMA4, path, value)
        for raw in (changed, {"model_type": "gemma4", "text_config": changed, "tie_word_embeddings": value}):
            with suppress(ConfigError):
                config = checkpoint.parse_model_config(raw)
                assert (
                    checkpoint.parse_model_config(json.loads(json.dumps(checkpoint.publish_model_config(config)))) == config
                )


@pytest.mark.parametrize("key", GEMMA4_GENERATION)
def test_odd_values_in_generation_config_json_of_a_causal_only_checkpoint_never_crash(key):
    for value in ODD:
        with suppress(ConfigError):
            checkpoint.parse_sampler_config(GEMMA4_GENERATION | {key: value}, ModelConfig(is_causal_only=True))


@pytest.mark.parametrize("path", list(everywhere(GENERATION)), ids=".".join)
def test_odd_values_in_generation_config_json_never_crash(path):
    for value in ODD:
        with suppress(ConfigError):
            checkpoint.parse_sampler_config(replaced(GENERATION, path, value), ModelConfig())


def test_odd_values_in_redraft_json_never_crash():
    for value in ODD:
        for ours in ({"sampler": value}, *({"sampler": {f.name: value}} for f in fields(SamplerConfig))):
            with suppress(ConfigError):
                checkpoint.parse_sampler_config(GENERATION, ModelConfig(), ours)


def test_endless_nesting_is_unreadable_json(tmp_path):
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="not readable"):
        checkpoint.read_model_config(tmp_path)


def test_equal_temperatures_can_be_saved_for_transformers():
    theirs, ours = checkpoint.publish_sampler_config(SamplerConfig(t_min=0.7, t_max=0.7))
    assert theirs["t_max"] > theirs["t_min"]
    assert checkpoint.parse_sampler_config(theirs, ModelConfig(), ours).t_max == pytest.approx(0.7, rel=1e-9)
    assert DiffusionGemmaGenerationConfig(**theirs).t_min == 0.7
