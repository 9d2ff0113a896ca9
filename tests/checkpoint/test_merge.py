"""redraft merge: merged = adapter within the rounding of the base's format; transformers loads the folder."""

import compressed_reference
import gguf_files
import peft
import pytest
import tiny
import torch
import transformers_reference
from compressed_folders import COMPACT, LAYOUTS, save_compressed
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

from redraft import checkpoint
from redraft.checkpoint import CheckpointError, QuantizeOptions, load_adapter, quantize_checkpoint, save_adapter
from redraft.checkpoint.merge import Conversions, merge_into
from redraft.kernels.packed import dequantize_packed
from redraft.model.lora import DENOISE, AdapterError, adaptable_matrices
from redraft.model.quant.policy import QuantPolicy

PACKED = QuantPolicy(runs_packed=True)
IDS = torch.arange(16, 40).view(2, 12)
CANVAS = torch.arange(40, 56).view(2, 8)


@torch.inference_mode()
def logits(model, adapter=None):
    """Hidden states of the causal half, and logits of two steps."""
    cache = model.new_cache(2, 12, adapter=adapter)
    hidden = model.encode(IDS, cache)
    first = model.denoise(CANVAS, None, cache)
    return torch.cat([t.float().flatten() for t in (hidden, first, model.denoise(CANVAS, model.soft_embed(first), cache))])


def error(found, expected):
    """Relative to the expected numbers, by root mean square."""
    return float((found - expected).norm() / expected.norm())


def make_base(folder, kind):
    """A base of a kind of weights."""
    source = folder / "source"
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    options = {"tokenizer": tiny.byte_tokenizer(), "sampler": tiny.sampler(max_new_tokens=32)}
    checkpoint.save(tiny.decided(COMPACT).to(dtype), source, **options)
    if kind in ("float32", "bf16"):
        return source
    list(quantize_checkpoint(source, folder / "base", QuantizeOptions(to=kind)))
    return folder / "base"


def merge(base, adapter, out, **options):
    return list(checkpoint.merge_checkpoint(base, adapter, out, **options))


def weight_of(model, matrix):
    """The numbers that a matrix stands for, float32."""
    last = "weight" if f"{matrix}.weight" in model.state_dict() else matrix.rpartition(".")[2]
    layer = model.get_submodule(matrix if last == "weight" else matrix.rpartition(".")[0])
    if not hasattr(layer, "packed"):
        return getattr(layer, last).float()
    return dequantize_packed(layer.packed(last), adaptable_matrices(model.config)[matrix].inputs)


ROUNDING = {"float32": 1e-6, "bf16": 3e-3, "fp8": 0.03, "nvfp4": 0.1, "int4": 0.09}  # relative, of a matrix
# Of logits, which one more rounding of all weights moves about so much. The adapter moves them by 1.
BOUNDS = {"float32": 1e-4, "bf16": 0.1, "fp8": 0.25, "nvfp4": 0.3, "int4": 0.3}


@pytest.mark.parametrize("kind", ROUNDING)
def test_merged_equals_the_adapter_within_rounding(kind, tmp_path):
    base = make_base(tmp_path, kind)
    model = checkpoint.load_model(base, policy=PACKED)
    folder = save_adapter(tiny.trained(COMPACT), tmp_path / "adapter", base="base", dtype=torch.float32)
    adapter = load_adapter(folder, model)
    events = merge(base, folder, tmp_path / "merged")
    assert isinstance(events[0], Conversions)
    assert events[-1].done == events[-1].total == len(events) - 1
    merged = checkpoint.load_model(tmp_path / "merged", policy=PACKED)
    assert merged.config == model.config  # the same formats, too
    for matrix in adaptable_matrices(COMPACT):
        wished = weight_of(model, matrix) + adapter.pair(DENOISE, matrix).delta()
        assert error(weight_of(merged, matrix), wished) <= ROUNDING[kind]
    expected = logits(model, adapter)
    assert error(logits(merged), expected) <= BOUNDS[kind] < error(logits(model), expected) / 3
    parts = checkpoint.measure_parts(checkpoint.open_weights(base)[1], checkpoint.read_model_config(base))
    new_parts = checkpoint.measure_parts(checkpoint.open_weights(tmp_path / "merged")[1], checkpoint.read_model_config(base))
    assert [(p.part, p.format) for p in new_parts] == [(p.part, p.format) for p in parts]
    writer = checkpoint.load_checkpoint(tmp_path / "merged", device="cpu")
    assert writer[2].max_new_tokens == 32


@pytest.mark.parametrize("kind", ["float32", "nvfp4"])
def test_weights_without_a_pair_stay_to_the_bit(kind, tmp_path):
    base = make_base(tmp_path, kind)
    adapter = tiny.trained(COMPACT, targets=("attention", "experts"), layers=(1,))
    folder = save_adapter(adapter, tmp_path / "adapter", base="base")
    merge(base, folder, tmp_path / "merged")
    before, after = (checkpoint.load_model(each, policy=PACKED).state_dict() for each in (base, tmp_path / "merged"))
    changed = {name for name in before if not torch.equal(before[name].float(), after[name].float())}
    assert changed
    assert all(name.startswith(("layers.1.self_attn.", "layers.1.experts.")) and "norm" not in name for name in changed)


def test_four_bit_weights_with_zero_points_keep_them(tmp_path):
    save_compressed(tmp_path / "base", *LAYOUTS["int4, zero points"])
    model = checkpoint.load_model(tmp_path / "base", policy=PACKED)
    folder = save_adapter(tiny.trained(COMPACT), tmp_path / "adapter", base="base", dtype=torch.float32)
    merge(tmp_path / "base", folder, tmp_path / "merged")
    merged = checkpoint.load_model(tmp_path / "merged", policy=PACKED)
    adapter = load_adapter(folder, model)
    for name in ("gate_up_proj", "down_proj"):
        assert merged.layers[0].experts.packed(name).minimum is not None
        matrix = f"layers.0.experts.{name}"
        wished = weight_of(model, matrix) + adapter.pair(DENOISE, matrix).delta()
        assert error(weight_of(merged, matrix), wished) <= ROUNDING["int4"]


@pytest.mark.parametrize("kind", ["float32", "nvfp4"])
def test_transformers_loads_the_merged_folder(kind, tmp_path):
    base = make_base(tmp_path, kind)
    adapter = save_adapter(tiny.trained(COMPACT), tmp_path / "adapter", base="base")
    merge(base, adapter, tmp_path / "merged")
    ours = checkpoint.load_model(tmp_path / "merged", dtype=torch.float32, policy=QuantPolicy())
    if kind == "float32":
        theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    else:
        theirs = compressed_reference.load_in_transformers(tmp_path / "merged", kind)
    with torch.inference_mode():
        past = DynamicCache(config=theirs.config.text_config)
        expected = theirs(input_ids=IDS, past_key_values=past, decoder_input_ids=CANVAS).logits
        cache = ours.new_cache(2, 12)
        ours.encode(IDS, cache)
        found = ours.denoise(CANVAS, None, cache)
    assert error(found, expected) < 1e-2


def test_an_adapter_of_peft_can_be_merged(tmp_path):
    """peft itself merges it to the same weights."""
    base = make_base(tmp_path, "float32")
    model = checkpoint.load_model(base)
    ours = tiny.trained(COMPACT, targets=("attention", "experts"))
    save_adapter(ours, tmp_path / "ours", base="base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(transformers_reference.same_weights(model), tmp_path / "ours")
    theirs.peft_config["default"].base_model_name_or_path = None  # it would look for it on the hub
    theirs.save_pretrained(tmp_path / "theirs")
    merge(base, tmp_path / "theirs", tmp_path / "merged")
    expected = logits(model, load_adapter(tmp_path / "ours", model))
    assert error(logits(checkpoint.load_model(tmp_path / "merged")), expected) < 1e-5


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
def test_a_gguf_base_becomes_full_precision(kind, tmp_path):
    config = gguf_files._config()
    model = tiny.build(config)
    file = gguf_files.write_model(tmp_path / "base.gguf", model, kind)
    base = checkpoint.load_model(file, policy=QuantPolicy())
    adapter = save_adapter(tiny.trained(config, alpha=3.0), tmp_path / "adapter", base="base", dtype=torch.float32)
    merge(file, adapter, tmp_path / "merged")
    merged = checkpoint.load_model(tmp_path / "merged")
    assert merged.config.quant is None
    assert error(logits(merged), logits(base, load_adapter(adapter, base))) < 0.03


def test_mistakes_are_sentences_and_leave_no_folder(tmp_path):
    base = make_base(tmp_path, "float32")
    one_half = save_adapter(tiny.trained(COMPACT, halves=DENOISE), tmp_path / "half", base="base")
    good = save_adapter(tiny.trained(COMPACT), tmp_path / "good", base="base")
    wider = tiny.save_folder(tmp_path / "wider")
    for arguments, message in [
        ((base, one_half), "two halves of this adapter differ"),
        ((base, tmp_path / "nothing"), "holds no adapter"),
        ((tmp_path / "nothing", good), "there is no folder"),
        ((good, good), "holds an adapter, not a model"),
        ((wider, good), "another shape"),
    ]:
        with pytest.raises((AdapterError, CheckpointError), match=message):
            merge(*arguments, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    merge(base, good, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        merge(base, good, tmp_path / "out")
    merge(base, good, tmp_path / "out", force=True)
    assert not list(merge_into(tiny.build(COMPACT), tiny.trained(COMPACT)))[-1].matrix.startswith("embed")
