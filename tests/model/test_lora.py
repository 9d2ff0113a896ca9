"""Adapters: equal to peft's in both directions, nothing where there is none, each row its own."""

import json
from dataclasses import replace

import peft
import pytest
import tiny
import torch
import transformers_reference
from peft.utils.other import get_pattern_key
from transformers import DynamicCache

from redraft.checkpoint import adapter_files
from redraft.checkpoint.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, fingerprint, load_adapter, save_adapter
from redraft.config import ConfigError
from redraft.engine.batched_cache import BatchedCache
from redraft.model.lora import DENOISE, ENCODE, AdapterConfig, AdapterError, adaptable_matrices, new_adapter
from redraft.model.lora import TARGETS as EVERY_TARGET

IDS = torch.randint(16, tiny.VOCAB - 3, (3, 24), generator=torch.Generator().manual_seed(1))
CANVAS = torch.randint(16, tiny.VOCAB - 3, (3, 16), generator=torch.Generator().manual_seed(2))
CONFIGS = {name: tiny.CONFIGS[name] for name in ("plain", "wide full heads", "every expert", "more experts than tokens")}


@torch.inference_mode()
def our_logits(model, adapter, rows=slice(None)):
    """Hidden states of the causal half, and logits of two denoising steps."""
    cache = model.new_cache(len(IDS[rows]), 40, adapter=adapter)
    hidden = model.encode(IDS[rows], cache)
    first = model.denoise(CANVAS[rows], None, cache)
    return hidden, first, model.denoise(CANVAS[rows], model.soft_embed(first / 0.7), cache)


@torch.inference_mode()
def reference_logits(reference):
    """The same of transformers, with or without peft around it."""
    base = reference.get_base_model() if isinstance(reference, peft.PeftModel) else reference
    past = DynamicCache(config=base.config.text_config)
    first = reference(input_ids=IDS, past_key_values=past, decoder_input_ids=CANVAS)
    soft = first.logits / 0.7
    second = reference(past_key_values=past, decoder_input_ids=CANVAS, self_conditioning_logits=soft)
    return first.encoder_last_hidden_state, first.logits, second.logits


def assert_close(ours, theirs, bound=1e-4):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert (mine - other).abs().max() <= bound * other.abs().max()


@pytest.mark.parametrize("halves", ["both", DENOISE])
@pytest.mark.parametrize("name", CONFIGS)
def test_peft_loads_our_adapter_and_gives_our_logits(name, halves, tmp_path):
    model = tiny.build(CONFIGS[name])
    adapter = tiny.trained(model.config, halves=halves)
    save_adapter(adapter, tmp_path, base="tiny", dtype=torch.float32)
    ours = our_logits(model, adapter)
    reference = peft.PeftModel.from_pretrained(transformers_reference.same_weights(model), tmp_path)
    assert_close(ours, reference_logits(reference))
    assert (ours[1] - our_logits(model, None)[1]).abs().max() > 0.1


def test_adapters_of_some_layers_or_targets_reach_only_those(tmp_path):
    model = tiny.build(tiny.BASE)
    for number, changes in enumerate([{"targets": ("experts",)}, {"targets": ("attention",), "layers": (1,)}]):
        adapter = tiny.trained(model.config, **changes)
        save_adapter(adapter, tmp_path / str(number), base="tiny", dtype=torch.float32)
        reference = peft.PeftModel.from_pretrained(transformers_reference.same_weights(model), tmp_path / str(number))
        assert_close(our_logits(model, adapter), reference_logits(reference))
        assert load_adapter(tmp_path / str(number), model).cfg.targets == changes["targets"]


OPERATORS = ("(", "([a-z_.0-9]+)+!", "(q|k)_proj", r".*\.q_proj", "layers.[0-9].q_proj", "q_proj|v_proj", "")
TARGETS = {
    "by last name": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "the decoder alone": {"target_modules": r"model\.decoder\..*(o_proj|gate_proj)", "use_rslora": True},
    "experts": {
        "target_modules": ["k_proj"],
        "target_parameters": ["experts.down_proj", "experts.gate_up_proj"],
        "alpha_pattern": {"k_proj": 3},
    },
    "one stack of experts": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "ranks by pattern": {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 2}},
}


@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapter_of_peft_gives_its_logits_here(targets, tmp_path):
    """The halves get pairs of their own there, which differ; so do the matrices of the vision tower, which are skipped."""
    model = tiny.build(tiny.BASE)
    config = peft.LoraConfig(r=4, lora_alpha=8, **TARGETS[targets])
    theirs = peft.get_peft_model(transformers_reference.same_weights(model), config).eval()
    tiny.randomize(theirs, of="lora_")
    theirs.save_pretrained(tmp_path)
    adapter = load_adapter(tmp_path, model)
    assert_close(our_logits(model, adapter), reference_logits(theirs))
    assert not adapter.is_tied


def test_an_adapter_survives_its_files(tmp_path):
    model = tiny.build(tiny.BASE)
    adapter = tiny.trained(model.config)
    save_adapter(adapter, tmp_path, base="tiny", dtype=torch.float32, metadata={"scores": {"denoiser": 1.5}})
    loaded = load_adapter(tmp_path, model, "style")
    assert loaded.is_tied
    assert loaded.name == "style"
    assert loaded.parameter_count == adapter.parameter_count
    assert loaded.metadata["scores"] == {"denoiser": 1.5}
    assert replace(loaded.cfg, layers=None) == adapter.cfg
    for mine, other in zip(our_logits(model, loaded), our_logits(model, adapter), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_with_different_adapters_share_a_forward(name):
    """A row gives what it gives alone; a row without an adapter, and a model after use of one, the base to the bit."""
    model = tiny.build(CONFIGS[name])
    base = our_logits(model, None)
    adapters = [tiny.trained(model.config, seed=1), None, tiny.trained(model.config, seed=2, targets=("attention",), rank=2)]
    caches = [model.new_cache(1, 60, adapter=adapter) for adapter in adapters]
    together = BatchedCache(caches)
    with torch.inference_mode():
        hidden = model.encode(IDS, together)
        first = model.denoise(CANVAS, None, together)
        second = model.denoise(CANVAS, model.soft_embed(first / 0.7), together)
    for row, adapter in enumerate(adapters):
        alone = our_logits(model, adapter, slice(row, row + 1))
        assert_close([t[row : row + 1] for t in (hidden, first, second)], alone, 1e-5)
    assert all(torch.equal(*pair) for pair in zip(our_logits(model, None), base, strict=True))


def test_a_joint_forward_equals_both_halves():
    model = tiny.build(tiny.BASE)
    adapters = [tiny.trained(model.config, seed=1), tiny.trained(model.config, seed=2, halves=DENOISE), None]
    caches = [model.new_cache(1, 60, adapter=adapter) for adapter in adapters]
    with torch.inference_mode():
        clean, canvases = model.joint(IDS, CANVAS[:, None], [IDS.shape[1] - 1], BatchedCache(caches))
    for row, adapter in enumerate(adapters):
        hidden, first, _ = our_logits(model, adapter, slice(row, row + 1))
        assert_close([clean[row : row + 1], model.head(canvases[row])], [hidden, first], 1e-5)


def test_the_causal_half_stays_the_original_under_an_adapter_of_the_denoiser():
    model = tiny.build(tiny.BASE)
    hidden, first, _ = our_logits(model, tiny.trained(model.config, halves=DENOISE))
    base_hidden, base_first, _ = our_logits(model, None)
    assert torch.equal(hidden, base_hidden)
    assert not torch.equal(first, base_first)


def test_a_new_adapter_changes_nothing():
    model = tiny.build(tiny.BASE)
    adapter = new_adapter(AdapterConfig(targets=EVERY_TARGET), model.config)
    assert_close(our_logits(model, adapter), our_logits(model, None), 1e-6)


def test_every_matrix_is_within_reach():
    """All weights of the layers with two axes or more but the router's, and no other."""
    for config in tiny.CONFIGS.values():
        model = tiny.build(config)
        weights = {name.removesuffix(".weight"): p for name, p in model.named_parameters() if p.dim() >= 2}
        shapes = adaptable_matrices(config)
        assert set(shapes) == {name for name in weights if "router" not in name and "embed" not in name}
        for name, shape in shapes.items():
            experts = () if shape.experts is None else (shape.experts,)
            assert tuple(weights[name].shape) == (*experts, shape.outputs, shape.inputs)


def test_wrong_adapters_are_refused_with_a_sentence(tmp_path):
    model = tiny.build(tiny.BASE)
    adapter = tiny.trained(model.config)
    folder = save_adapter(adapter, tmp_path / "a", base="tiny", metadata={"fingerprint": fingerprint(model)})
    load_adapter(folder, model)
    with pytest.raises(AdapterError, match=r"was trained for another model, 'tiny'"):
        load_adapter(folder, tiny.build(tiny.BASE, seed=1))
    other = save_adapter(adapter, tmp_path / "b", base="tiny")
    with pytest.raises(AdapterError, match=r"another shape: .*experts.* is \[16, 32\]"):
        load_adapter(other, tiny.build(replace(tiny.BASE, hidden_size=40)))
    dense = save_adapter(tiny.trained(model.config, targets=("dense",)), tmp_path / "c", base="tiny")
    with pytest.raises(AdapterError, match=r"another shape: its pair for layers.0.mlp.down_proj is \[4, 48\]"):
        load_adapter(dense, tiny.build(replace(tiny.BASE, hidden_size=40)))
    with pytest.raises(AdapterError, match=r"no matrix: base_model.model.model.decoder.layers.0.self_attn.v_proj"):
        load_adapter(other, tiny.build(tiny.CONFIGS["one layer"]))
    for changes, message in [
        ({"use_dora": True}, "use_dora True, which redraft does not run"),
        ({"peft_type": "IA3"}, "of the kind 'IA3'; redraft runs LORA"),
        ({"r": "four"}, "r must be a whole number"),
        *[({"alpha_pattern": {pattern: 2}}, "reads names of modules only") for pattern in OPERATORS],
    ]:
        raw = json.loads((folder / ADAPTER_CONFIG).read_text()) | changes
        (other / ADAPTER_CONFIG).write_text(json.dumps(raw))
        with pytest.raises((AdapterError, ConfigError), match=message):
            load_adapter(other, model)
    for content in (b"", b"x" * 100, (folder / ADAPTER_WEIGHTS).read_bytes()[:-10]):
        (folder / ADAPTER_WEIGHTS).write_bytes(content)
        with pytest.raises(AdapterError, match="cannot be read"):
            load_adapter(folder, model)
    with pytest.raises(AdapterError, match="holds no adapter"):
        load_adapter(tmp_path, model)


NAMES = ["k_proj", "self_attn.k_proj", r"self_attn\.k_proj$", "^k_proj", "^model.decoder.layers.0.self_attn.k_proj", "_proj"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_alpha_pattern_counts_as_in_peft(name):
    """A whole module's name or the end of it, in whole parts."""
    settings = {"lora_alpha": 8, "alpha_pattern": {name: 3, "k_proj": 4}}
    for matrix in ("layers.0.self_attn.k_proj", "layers.10.self_attn.k_proj", "layers.0.self_attn.q_proj"):
        found = get_pattern_key(settings["alpha_pattern"], f"model.decoder.{matrix}")
        alpha = settings["alpha_pattern"].get(found, 8)
        assert adapter_files._find_scale(settings, DENOISE, matrix, 2) == alpha / 2


def test_settings_that_cannot_be_are_refused():
    for changes, message in [
        ({"rank": 0}, "rank must be between 1"),
        ({"targets": ("attention", "router")}, "no target 'router'; known are attention, dense, experts"),
        ({"targets": ()}, "give targets"),
        ({"dropout": 1.0}, "dropout"),
        ({"halves": ENCODE + "r"}, "halves is both"),
        ({"layers": (-1,)}, "numbers from 0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            AdapterConfig(**changes)
    with pytest.raises(AdapterError, match="no layer 7: the model has layers 0 to 2"):
        new_adapter(AdapterConfig(layers=(7,)), tiny.BASE)
