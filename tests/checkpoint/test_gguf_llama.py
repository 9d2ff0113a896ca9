"""GGUF files of Llama, Mistral, Qwen2 and Qwen3: ours = transformers with the numbers that the gguf package reads."""

from pathlib import Path

import pytest
import torch
from llama_gguf import (
    TEMPLATE,
    bpe_metadata,
    byte_level_vocabulary,
    make_file,
    sentencepiece_metadata,
    sentencepiece_vocabulary,
)
from llama_models import make_reference, random_ids
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

from redraft import checkpoint
from redraft.checkpoint import CheckpointError
from redraft.checkpoint.gguf.vocabulary import read_tokenizer
from redraft.config import LlamaConfig
from redraft.diffusion.autoregressive import generate_autoregressive

BLOCKS_OF_32 = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BLOCKS_OF_256 = ("Q4_K", "Q5_K", "Q6_K")
FAMILIES = ("smollm2", "llama 2", "llama 3", "linear RoPE", "mistral without a window", "qwen2", "qwen3")
CASES = [(family, "F16") for family in FAMILIES]
CASES += [("smollm2", kind) for kind in BLOCKS_OF_32 + BLOCKS_OF_256 if kind != "F16"]
AWKWARD = (
    "Hello, World! It's 12345 and 3.14; don't",
    "  two  spaces\n\n\ttab\r\n end ",
    "ÄÖÜ naïve café 日本語 🎉👩‍👩‍👧 ١٢٣ ½ Ⅷ e\u0301",
    "<|im_start|>user\nhi<|im_end|> <|im_st <|endoftext|>",
    "snake_case(x)['a']{0}<=>+-*/ \u00a0 \u2003 x",
    "",
)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_logits_are_those_of_the_files_numbers(family, kind, tmp_path):
    changes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1} if kind in BLOCKS_OF_256 else {}
    if family == "llama 3":  # the converter's numbers stand for a context of 8192
        rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
        changes["rope_parameters"] = rope | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if kind not in BLOCKS_OF_256:
        changes |= {"hidden_size": 64, "intermediate_size": 96}
    reference = make_reference(family, **changes)
    numbers = make_file(tmp_path / "model.gguf", reference, kind)
    reference.load_state_dict(numbers, strict=False)
    model = checkpoint.load_model(tmp_path / "model.gguf", dtype=torch.float32)
    assert isinstance(model.config, LlamaConfig)
    ids = random_ids(1, 24)
    with torch.no_grad():
        expected = reference(ids).logits
    assert expected.std() > 0.05
    assert_near(model.head(model.encode(ids, model.new_cache(1, 24))), expected)


def test_settings_are_read(tmp_path):
    make_file(tmp_path / "model.gguf", make_reference("smollm2"), changes={"general.sampling.temp": 0.5})
    config, sampler = checkpoint.read_configs(tmp_path / "model.gguf")
    assert (config.family, config.has_tied_head, config.is_causal_only) == ("llama", True, True)
    assert config.rms_norm_eps == 1e-5
    assert sampler.eos_token_ids == (2, 0)  # the end of a turn, and that of a text
    assert (sampler.check, sampler.draft_length, sampler.temperature) == ("exact", 0, 0.5)


def test_mistrals_window_is_read(tmp_path):
    reference = make_reference("mistral")
    numbers = make_file(tmp_path / "model.gguf", reference, changes={"llama.attention.sliding_window": 7})
    reference.load_state_dict(numbers, strict=False)
    model = checkpoint.load_model(tmp_path / "model.gguf")
    ids = random_ids(1, 24)
    with torch.no_grad():
        assert_near(model.head(model.encode(ids, model.new_cache(1, 24))), reference(ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, "has 8 experts"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4 and the head size 8"),
        ({"llama.block_count": 2}, "the metadata describes 2 layers, the tensors are of 3"),
        ({"llama.embedding_length": None}, "the metadata has no llama.embedding_length"),
        ({"llama.feed_forward_length": 64}, "ffn_gate.weight has the shape"),
        ({"tokenizer.ggml.eos_token_id": None}, "has no tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "must be a whole number from 0 to 95, got 4000"),
    ],
)
def test_files_that_cannot_run_are_refused(changes, message, tmp_path):
    make_file(tmp_path / "model.gguf", make_reference("smollm2"), changes=changes)
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load_model(tmp_path / "model.gguf")
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_other_frequencies_of_rope_are_refused(tmp_path):
    make_file(tmp_path / "model.gguf", make_reference("llama 3"))  # of a context of 32, not of 8192
    with pytest.raises(CheckpointError, match="has other numbers than the scaling of Llama 3"):
        checkpoint.load_model(tmp_path / "model.gguf")


# Tokenizers


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN2.replace(r"\p{N}| ?[", r"\p{N}{1,3}| ?[")
CUTTERS = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), BYTES]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
}


@pytest.mark.parametrize("pre", CUTTERS)
def test_byte_level_ids_are_those_of_tokenizer_json(pre):
    expected = byte_level_vocabulary(CUTTERS[pre], 400, ignore_merges=pre == "llama-bpe")
    if pre == "qwen2":
        expected.normalizer = normalizers.NFC()
    tokenizer = read_tokenizer(Path("x.gguf"), bpe_metadata(expected, pre))
    for text in AWKWARD:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, keep_special=True) == expected.decode(ids, skip_special_tokens=False)
        if pre != "qwen2":
            assert tokenizer.decode(ids, keep_special=True) == text
    assert (tokenizer.encode_prompt("a") == tokenizer.encode("a")) == (pre != "llama-bpe")
    assert (
        b"".join(filter(None, (tokenizer.token_bytes[token] for token in tokenizer.encode("naïve 12"))))
        == "naïve 12".encode()
    )


def test_sentencepiece_ids_follow_from_the_scores():
    expected, special = sentencepiece_vocabulary()
    tokenizer = read_tokenizer(Path("x.gguf"), sentencepiece_metadata(expected, special))
    reference = Vocabulary.from_str(expected.to_str())
    for text in (*AWKWARD[:3], "the verified mode of the engine", "a b", "▁x"):
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_prompt("a")[0] == 1
    assert tokenizer.decode(tokenizer.encode("<s>"), keep_special=True) == "<s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "deepseek-llm"}, "cuts texts as 'deepseek-llm' does .* redraft knows gpt-2, smollm, qwen2"),
        ({"pre": None}, "does not say how .* \\(tokenizer.ggml.pre is missing\\): convert the model again .* safetensors"),
        ({"pre": "default"}, "does not say how its tokenizer cuts texts \\(tokenizer.ggml.pre is 'default'\\)"),
        ({"pre": ["smollm"]}, "cuts texts as .*smollm"),
        ({"model": ["gpt2"]}, "has a tokenizer of the kind"),
        ({"model": "t5"}, "has a tokenizer of the kind 't5'; redraft reads 'gemma4', 'gpt2', 'llama'"),
        ({"add_space_prefix": True}, "redraft reads tokenizers of gpt2 that add no space"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
        ({"model": "llama", "scores": [0.0]}, "tokens and 1 scores"),
        ({"model": "llama", "scores": None}, "tokenizer.ggml.scores must be an array of float"),
    ],
)
def test_tokenizers_that_cannot_be_used_are_refused(changes, message):
    values = bpe_metadata(byte_level_vocabulary(GPT2, 300), "gpt-2")
    values |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        read_tokenizer(Path("x.gguf"), {key: value for key, value in values.items() if value is not None})


def test_the_whole_file_chats(tmp_path):
    from redraft import load

    vocabulary = byte_level_vocabulary(CUTTERS["smollm"], 300)
    reference = make_reference("smollm2", vocab_size=300)
    make_file(tmp_path / "model.gguf", reference, changes=bpe_metadata(vocabulary, "smollm"))
    writer = load(tmp_path / "model.gguf", device="cpu")
    messages = [{"role": "user", "content": "Hi 12"}]
    assert writer.tokenizer.render(messages) == "<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n"
    answer = writer.chat(messages, max_tokens=5)
    ids = writer.tokenizer.encode_chat(messages)
    expected = list(generate_autoregressive(writer.model, ids, 5, writer.sampler))
    assert list(answer.ids) == [token for token in expected if token not in writer.sampler.eos_token_ids]
    assert writer.chat(messages, choices=["yes", "no"]).text in ("yes", "no")
    with pytest.raises(ValueError, match="chat template has no tool calls that redraft reads"):
        writer.chat(messages, tools=[{"type": "function", "function": {"name": "f"}}])
    assert writer.tokenizer.template == TEMPLATE
    checkpoint.save(writer.model, tmp_path / "folder", tokenizer=writer.tokenizer, sampler=writer.sampler)
    again = load(tmp_path / "folder", device="cpu")
    assert again.chat(messages, max_tokens=5).ids == answer.ids
    assert again.sampler == writer.sampler
