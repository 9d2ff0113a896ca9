"""Folders of Llama's families: saved = loaded by transformers, tokenizers as in the files, other models are refused."""

import json
from dataclasses import replace

import pytest
import torch
from llama_gguf import CHATML, TEMPLATE, byte_level_vocabulary
from llama_models import FAMILIES, LLAMA3, SHAPE, make_reference, random_ids, save_reference
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from redraft import checkpoint, load
from redraft.checkpoint import CheckpointError
from redraft.cli.main import app
from redraft.config import FULL, SLIDING, ConfigError, LlamaConfig, RopeScaling
from redraft.model.lora import AdapterConfig, AdapterError, new_adapter
from redraft.tokenizer.chat_parser import parse_chat
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError

PRE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
LLAMA = {"model_type": "llama", **SHAPE}
QWEN3 = {"model_type": "qwen3", "head_dim": 8, **SHAPE}


def tokenizer(size=300, template=TEMPLATE, **settings):
    return Tokenizer(byte_level_vocabulary(PRE, size), template=template, settings={"bos_token": CHATML[1], **settings})


@torch.no_grad()
def logits(model, ids):
    return model.head(model.encode(ids, model.new_cache(1, ids.shape[1])))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_we_save_transformers_loads(family, tmp_path):
    reference = save_reference(tmp_path / "theirs", family)
    model = checkpoint.load_model(tmp_path / "theirs")
    checkpoint.save(model, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    ids = random_ids(1, 40)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, reference(ids).logits)
    assert type(again) is type(reference)
    assert checkpoint.read_model_config(tmp_path / "ours") == model.config
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("ours", "theirs")]
    assert names[0] == names[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_published_configuration_of_either_version_is_read(family):
    """Version 5 of transformers writes rope_parameters, version 4 rope_theta and rope_scaling."""
    raw = make_reference(family).config.to_dict()
    config = checkpoint.parse_model_config(raw)
    published = checkpoint.publish_model_config(config)
    assert "rope_theta" in published
    assert checkpoint.parse_model_config(published) == config
    theirs = AutoConfig.for_model(**{key: value for key, value in published.items() if key != "architectures"})
    assert checkpoint.parse_model_config(theirs.to_dict()) == config


def test_a_file_of_llama_2_is_read():
    """Without key-value heads, head size and scaling, with a pad token of -1."""
    raw = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"pad_token_id": -1}
    config = checkpoint.parse_model_config(raw | {"rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "float16"})
    assert (config.num_key_value_heads, config.head_dim, config.pad_token_id) == (4, 8, 2)
    assert config.layer_types == (FULL,) * 3
    assert not config.has_tied_head


def test_windows_follow_from_the_configuration():
    mistral = {"model_type": "mistral", **SHAPE}
    assert checkpoint.parse_model_config(mistral).layer_window(0) == 4096  # as transformers takes it
    assert checkpoint.parse_model_config(mistral | {"sliding_window": None}).layer_window(0) is None
    qwen = QWEN3 | {"sliding_window": 16, "max_window_layers": 1}
    assert checkpoint.parse_model_config(qwen).layer_types == (FULL,) * 3
    assert checkpoint.parse_model_config(qwen | {"use_sliding_window": True}).layer_types == (FULL, SLIDING, SLIDING)
    given = qwen | {"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]}
    assert checkpoint.parse_model_config(given).layer_types == (SLIDING, FULL, SLIDING)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act is 'gelu'; redraft runs 'silu' only"),
        (LLAMA | {"attention_bias": True}, "attention_bias is True; redraft runs False only"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias is True"),
        (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*; redraft does not read it"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE of the kind 'yarn'; redraft runs default, linear"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "no value for low_freq_factor"),
        (LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": -1.0}}, "factor must be a number above 0, got -1.0"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be above low_freq_factor"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        (LLAMA | {"rope_theta": "big"}, "rope_theta must be a number above 0, got 'big'"),
        (LLAMA | {"sliding_window": 16}, "sliding_window is 16"),
        (LLAMA | {"num_attention_heads": 5}, "a hidden_size of 32 is no multiple of 5 attention heads"),
        (LLAMA | {"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads evenly"),
        (LLAMA | {"head_dim": 7}, "head sizes must be even for RoPE, got 7"),
        (LLAMA | {"vocab_size": 0}, "vocab_size must be a whole number from 1"),
        (LLAMA | {"hidden_size": None}, "has no value for hidden_size"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, got 'yes'"),
        (LLAMA | {"eos_token_id": 96}, "eos_token_id must be a whole number from 0 to 95, got 96"),
        (LLAMA | {"eos_token_id": []}, "eos_token_id is empty"),
        (LLAMA | {"num_key_value_heads": None, "num_attention_heads": []}, "num_attention_heads must be a whole number"),
        (LLAMA | {"rope_scaling": 3}, "rope_scaling must be an object, got 3"),
        (QWEN3 | {"eos_token_id": None}, "has no value for eos_token_id"),
        (QWEN3 | {"head_dim": None}, "has no value for head_dim"),
        (QWEN3 | {"layer_types": [SLIDING] * 3}, "but no sliding_window is in use"),
        (QWEN3 | {"layer_types": [FULL]}, "layer_types must list 3 layers"),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 1}, "sliding_window must be a whole number from 2"),
        ({"model_type": "qwen3_moe", **SHAPE}, "describes 'qwen3_moe'; redraft runs .*Qwen3ForCausalLM"),
    ],
)
def test_configurations_that_would_change_the_mathematics_are_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint.parse_model_config(raw)


def test_records_refuse_nonsense():
    with pytest.raises(ConfigError, match="redraft scales RoPE by 'linear' or 'llama3', got 'yarn'"):
        RopeScaling(kind="yarn", factor=2.0)
    config = checkpoint.parse_model_config(LLAMA)
    with pytest.raises(ConfigError, match="family must be one of llama, mistral, qwen2, qwen3, got 'gpt'"):
        replace(config, family="gpt")
    assert isinstance(config, LlamaConfig)


def test_old_files_with_rope_buffers_and_a_repeated_head_load(tmp_path):
    save_reference(tmp_path, "smollm2")
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    extra["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | extra, tmp_path / "model.safetensors")
    assert logits(checkpoint.load_model(tmp_path), random_ids(1, 5)).shape == (1, 5, 96)
    extra["lm_head.weight"][3] += 1
    save_file(tensors | extra, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        checkpoint.load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.layers.1.mlp.up_proj.weight", "has no tensor model.layers.1.mlp.up_proj.weight"), ("", "score.weight")],
)
def test_other_tensors_are_refused(name, message, tmp_path):
    save_reference(tmp_path, "llama 2")
    tensors = load_file(tmp_path / "model.safetensors")
    if name:
        del tensors[name]
    else:
        tensors["score.weight"] = torch.ones(2, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_model(tmp_path)


def test_a_tensor_of_experts_is_refused(tmp_path):
    save_reference(tmp_path, "llama 2")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.0.router.proj.weight": torch.ones(4, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"num_experts is 0 in config.json and 4 in the weights"):
        checkpoint.load_model(tmp_path)


def test_quantizing_is_refused_with_one_sentence(tmp_path):
    save_reference(tmp_path, "llama 2", vocab_size=300)
    tokenizer().save(tmp_path)
    with pytest.raises(CheckpointError, match="quant fp8 rounds the weights of DiffusionGemma and Gemma 4"):
        load(tmp_path, device="cpu", quant="fp8")
    with pytest.raises(ConfigError, match="KV caches in fp8 need normed keys and values"):
        load(tmp_path, device="cpu", kv="fp8")
    result = CliRunner().invoke(app, ["quantize", str(tmp_path), str(tmp_path / "out")])
    assert result.exit_code != 0
    with pytest.raises(AdapterError, match="causal-only model has no denoiser to adapt"):
        new_adapter(AdapterConfig(), checkpoint.read_model_config(tmp_path))


# Tokenizers and generation


@pytest.fixture(name="folder")
def _folder(tmp_path):
    save_reference(tmp_path, "qwen3", vocab_size=300)
    tokenizer().save(tmp_path)
    return tmp_path


def test_generation_settings_are_those_of_the_file_and_the_end_of_a_turn(folder):
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    sampler = load(folder, device="cpu").sampler
    assert (sampler.temperature, sampler.top_k, sampler.top_p) == (0.6, 20, 0.95)
    assert sampler.eos_token_ids == (0, 2)  # <|endoftext|> of the file, <|im_end|> of the template
    assert (sampler.check, sampler.draft_length) == ("exact", 0)


def test_a_text_begins_with_bos_only_where_the_files_say_so(tmp_path):
    plain = tokenizer()
    assert plain.bos_id is None
    assert plain.start_ids == [0]  # the token between documents
    assert tokenizer(add_bos_token=True).encode_prompt("a") == [1, *plain.encode("a")]
    with_processor = byte_level_vocabulary(PRE, 300)
    with_processor.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", 1)]
    )
    assert Tokenizer(with_processor, settings={"bos_token": CHATML[1]}).encode_prompt("a") == [1, *plain.encode("a")]
    plain.save(tmp_path)
    save_reference(tmp_path, "llama 2", vocab_size=300)
    assert AutoTokenizer.from_pretrained(tmp_path)("abc 12").input_ids == plain.encode_prompt("abc 12")
    assert Tokenizer.from_folder(tmp_path).encode_prompt("abc 12") == plain.encode_prompt("abc 12")


def test_a_template_without_bos_token_renders_none():
    own = Tokenizer(byte_level_vocabulary(PRE, 300), template="{{ bos_token }}{{ messages[0]['content'] }}")
    assert own.render([{"role": "user", "content": "hi"}]) == "hi"


QWEN_TEMPLATE = (
    "{% if enable_thinking %}{% endif %}{{ tools }}"
    '{{ "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}'
)


@pytest.mark.parametrize(
    ("template", "tokens"),
    [
        (QWEN_TEMPLATE, []),  # the vocabulary spells <tool_call> in pieces
        (QWEN_TEMPLATE.replace("tools", "x"), ["<tool_call>", "</tool_call>"]),
        (
            "{{ tools }}<tool_call>\n<function=NAME>{{ call.arguments }}</function></tool_call>",
            ["<tool_call>", "</tool_call>"],
        ),
        ('{{ tools }}{"name": "NAME", "arguments": {}}<|eot_id|>', ["<tool_call>", "</tool_call>", "<|python_tag|>"]),
        ("{{ tools }}[TOOL_CALLS]", []),
        (None, ["<|turn>"]),
    ],
)
def test_tools_are_refused_where_nobody_would_read_the_calls(template, tokens):
    vocabulary = byte_level_vocabulary(PRE, 300)
    vocabulary.add_tokens(tokens)
    own = Tokenizer(vocabulary, template=template)
    assert not own.can_call
    with pytest.raises(TokenizerError, match="has no tool calls that redraft reads: leave tools out, or ask for JSON"):
        own.render([{"role": "user", "content": "hi"}], tools=[{"function": {"name": "f"}}])


def test_reasoning_and_calls_of_qwen_are_parsed():
    vocabulary = byte_level_vocabulary(PRE, 300)
    vocabulary.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    own = Tokenizer(vocabulary, template=QWEN_TEMPLATE)
    assert own.can_think
    assert own.can_call
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'
    parsed = parse_chat(own, own.encode(f"<think>\nUlm it is.\n</think>\n\nLet me see.{call}"))
    assert (parsed.reasoning, parsed.text) == ("Ulm it is.", "Let me see.")
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("weather", {"city": "Ulm", "days": 2})]
    broken = parse_chat(own, own.encode('x<tool_call>{"name": 3}</tool_call>'))
    assert broken.text == 'x<tool_call>{"name": 3}</tool_call>'
    assert parse_chat(own, own.encode("a </think> b")).text == "a  b"
    assert parse_chat(own, own.encode("thoughts")).text == "thoughts"


def test_the_command_line_runs_a_folder(folder):
    runner = CliRunner()
    answer = runner.invoke(app, ["hi there", "--model", str(folder), "--max-tokens", "4", "--device", "cpu", "--json"])
    assert answer.exit_code == 0, answer.output
    shown = runner.invoke(app, ["info", str(folder)])
    assert "causal-only (Qwen3): writes left to right" in shown.output
    assert "one token after another" in shown.output


def test_constraints_hold(folder):
    writer = load(folder, device="cpu")
    messages = [{"role": "user", "content": "Pick one."}]
    assert writer.chat(messages, choices=["red", "blue"]).text in ("red", "blue")
    assert writer.chat(messages, regex="[0-9]{3}").text.isdigit()
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    assert set(json.loads(writer.chat(messages, schema=schema).text)) == {"ok"}
    edited = writer.edit("We had a nice time.", seed=1)
    assert isinstance(edited.text, str)  # the repairs of the causal half need no denoiser


def test_an_adapter_of_peft_acts_as_in_peft(tmp_path):
    reference = save_reference(tmp_path / "base", "llama 2")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(reference, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    model = checkpoint.load_model(tmp_path / "base")
    cache = model.new_cache(1, 12, adapter=checkpoint.load_adapter(tmp_path / "adapter", model))
    ids = random_ids(1, 12)
    with torch.no_grad():
        found = model.head(model.encode(ids, cache))
        assert (found - adapted(ids).logits).abs().max() < 1e-4
        assert (found - logits(model, ids)).abs().max() > 0.1
