"""GGUF files: every format, header, settings and names equal what the `gguf` package writes and reads."""

import mmap
from dataclasses import replace

import gguf
import gguf_files
import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from gguf_files import CONFIG, SMALL, decode, encode
from typer.testing import CliRunner

import redraft
from redraft import checkpoint
from redraft.checkpoint.gguf import weights
from redraft.checkpoint.gguf.blocks import BLOCK_TYPES, TYPE_NAMES
from redraft.checkpoint.gguf.header import read_gguf
from redraft.checkpoint.gguf.weights import GgufWeight, StackedWeight
from redraft.cli.main import app
from redraft.config import FULL, SLIDING, ModelConfig, SamplerConfig
from redraft.kernels.packed import dequantize_packed
from redraft.writer import Writer

FORMATS = "F32 F16 BF16 Q8_0 Q6_K Q5_K Q5_1 Q5_0 Q4_K Q4_1 Q4_0 NVFP4".split()
QUANTIZED = FORMATS[3:]
PACKED = ("Q4_K", "Q4_1", "Q4_0", "NVFP4")
CPU = torch.device("cpu")


def random_numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def stored(raw: gguf_files.Raw, scale: torch.Tensor | None = None) -> GgufWeight:
    rows = torch.from_numpy(raw[0]).view(torch.uint8)
    return GgufWeight("blk.0.some.weight", BLOCK_TYPES[raw[1].name], rows, CPU, scale)


def assert_same_bits(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.shape == reference.shape
    assert torch.equal(ours.view(torch.int32), reference.view(torch.int32))


def matrices_in(kind: str):
    """A format for all matrices but the router's. A scale beside NVFP4 down experts would be theirs, so they have Q8_0."""
    others = {"ffn_gate_inp.": "F32", "ffn_down_exps.": "Q8_0" if kind == "NVFP4" else kind}
    return lambda name: next((other for part, other in others.items() if part in name), kind)


# Formats


def test_formats_have_the_numbers_and_sizes_of_the_package():
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType} == TYPE_NAMES
    assert sorted(BLOCK_TYPES) == sorted(FORMATS)
    for name, block in BLOCK_TYPES.items():
        assert (block.size, block.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(3, 512), (2, 5, 256)])
def test_dequantized_numbers_equal_the_packages_to_the_bit(monkeypatch, kind, shape):
    monkeypatch.setattr(weights, "CHUNK", 1000)  # several rows, not all
    raw = encode(random_numbers(*shape), kind)
    weight = stored(raw)
    assert weight.shape == shape
    assert weight.format == kind
    assert weight.nbytes == raw[0].nbytes
    assert_same_bits(weight.dequantize(), decode(raw))
    assert torch.equal(weight.dequantize(torch.bfloat16), decode(raw).bfloat16())
    assert_same_bits(weight.select(slice(1, 9)).dequantize(), decode(raw)[1:])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "NVFP4"])
def test_every_code_and_scale_of_a_block_is_read(kind):
    """Random bytes in the codes, and in NVFP4 every scale there is."""
    raw = encode(random_numbers(127, 256), kind)
    if kind == "NVFP4":
        raw[0].reshape(127, 4, 36)[..., 0] = np.arange(127, dtype=np.uint8)[:, None]
    else:
        raw[0].reshape(127, -1, BLOCK_TYPES[kind].nbytes)[..., 4:] ^= np.arange(127, dtype=np.uint8)[:, None, None]
    assert_same_bits(stored(raw).dequantize(), decode(raw))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, shape) for shape in ((3, 512), (2, 5, 256)) for kind in QUANTIZED] + [("Q4_0", (4, 96)), ("Q4_1", (4, 96))],
)
def test_packed_codes_stand_for_the_same_numbers(monkeypatch, kind, shape):
    """Exactly so where the scales fit into bf16, as they do here."""
    monkeypatch.setattr(weights, "CHUNK", 1000)
    raw = encode(random_numbers(*shape), kind)
    blocks = raw[0].reshape(*shape[:-1], -1, BLOCK_TYPES[kind].nbytes)
    for start in BLOCK_TYPES[kind].halves:
        powers = 2.0 ** np.random.default_rng(1).integers(-9, 3, blocks.shape[:-1])
        blocks[..., start : start + 2] = powers.astype(np.float16)[..., None].view(np.uint8)
    packed = stored(raw).pack()
    assert (packed is None) == (kind not in PACKED)
    if packed is not None:
        assert torch.equal(dequantize_packed(packed, shape[-1]), decode(raw))
        assert all(field.shape[:-1] == shape[:-1] for field in packed[:2])


def test_nvfp4_has_a_global_scale_for_each_expert_and_half():
    raws = [encode(random_numbers(3, 4, 64), "NVFP4", seed) for seed in (1, 2)]
    scales = torch.rand(2, 3)
    gate, up = (stored(raw, scale) for raw, scale in zip(raws, scales, strict=True))
    expected = [decode(raw) * scale[:, None, None] for raw, scale in zip(raws, scales, strict=True)]
    stack = StackedWeight(gate, up)
    assert_same_bits(stack.dequantize(), torch.cat(expected, dim=1))
    assert torch.equal(dequantize_packed(stack.pack(), 64), torch.cat(expected, dim=1))
    assert_same_bits(stack.select(slice(1, 3)).dequantize(), torch.cat(expected, dim=1)[1:])
    assert torch.equal(dequantize_packed(gate.select(slice(2, 3)).pack(), 64), expected[0][2:])


@pytest.mark.parametrize(
    ("kinds", "name"),
    [(("Q4_K", "Q4_K"), "Q4_K"), (("Q4_1", "Q4_0"), "Q4_1 and Q4_0"), (("Q8_0", "NVFP4"), "Q8_0 and NVFP4")],
)
def test_gate_and_up_apart_are_one_stack(kinds, name):
    raws = [encode(random_numbers(2, 3, 256, seed=seed), kind) for seed, kind in enumerate(kinds)]
    stack = StackedWeight(*map(stored, raws))
    assert (stack.format, stack.shape, stack.nbytes) == (name, (2, 6, 256), sum(raw[0].nbytes for raw in raws))
    assert_same_bits(stack.dequantize(), torch.cat([decode(raw) for raw in raws], dim=1))
    packed = stack.pack()
    assert (packed is None) == (kinds[0] != kinds[1])
    if packed is not None:
        separate = [dequantize_packed(stored(raw).pack(), 256) for raw in raws]
        assert torch.equal(dequantize_packed(packed, 256), torch.cat(separate, dim=1))


def test_conversions_work_on_few_numbers_at_a_time(monkeypatch):
    sizes = []
    block = BLOCK_TYPES["Q8_0"]
    watched = replace(block, dequantize=lambda blocks: sizes.append(blocks.shape[0]) or block.dequantize(blocks))
    monkeypatch.setattr(weights, "CHUNK", 2048)
    raw = encode(random_numbers(4, 16, 256), "Q8_0")
    replace(stored(raw), type=watched).dequantize()
    assert sizes == [8] * 8
    assert 4 * 8 * weights.CHUNK < 2**30  # a few float32 copies of what is converted at once


# Files


@pytest.mark.parametrize("kind", FORMATS)
def test_the_model_of_a_file_has_the_weights_that_the_package_reads(tmp_path, kind):
    tensors = gguf_files.make_tensors(tiny.decided(CONFIG), matrices_in(kind))
    values = {**gguf_files.metadata(CONFIG), **gguf_files.tokenizer_metadata()}
    if kind == "NVFP4":  # without a scale of its own, an NVFP4 weight has 1
        tensors |= {
            name.replace(".weight", ".input_scale"): (np.ones(1, np.float32), None) for name in tensors if "_q." in name
        }
    path = gguf_files.write_file(
        tmp_path / "model.gguf", {**tensors, "rope_freqs.weight": gguf_files.rope_freqs(CONFIG)}, values
    )
    ours = checkpoint.load_model(path, dtype=torch.float32)
    reference = gguf_files.model_with(CONFIG, tensors)
    for name, weight in reference.state_dict().items():
        assert_same_bits(ours.state_dict()[name], weight)
    ids = torch.arange(12)[None]
    assert torch.equal(
        ours.denoise(ids, None, ours.new_cache(1, 32)), reference.denoise(ids, None, reference.new_cache(1, 32))
    )
    assert checkpoint.load_model(path).dtype == (torch.float32 if kind == "F32" else torch.bfloat16)


def test_nvfp4_experts_carry_the_routers_scale_of_each_expert(tmp_path):
    """As llama.cpp's converter writes ModelOpt's files: experts apart, `.scale` for each, the router's folded in."""
    model = tiny.decided(CONFIG)
    tensors = gguf_files.make_tensors(model, lambda name: "NVFP4" if "_exps" in name else "F32")
    expected = gguf_files.model_with(CONFIG, tensors).state_dict()
    for layer in range(CONFIG.num_hidden_layers):
        prefix = f"blk.{layer}.ffn_"
        gate_up, kind = tensors.pop(f"{prefix}gate_up_exps.weight")
        scales = {"gate": random_numbers(2), "up": random_numbers(2), "down": random_numbers(2)}
        halves = np.split(gate_up, 2, axis=1)
        tensors |= {
            f"{prefix}{part}_exps.weight": (half.copy(), kind) for part, half in zip(("gate", "up"), halves, strict=True)
        }
        tensors |= {f"{prefix}{part}_exps.scale": (scale, None) for part, scale in scales.items()}
        tensors |= {f"{prefix}{part}_exps.input_scale": (scale, None) for part, scale in scales.items()}
        experts = f"layers.{layer}.experts."
        per_row = torch.cat([torch.from_numpy(scales[part])[:, None].expand(2, 256) for part in ("gate", "up")], dim=1)
        expected[experts + "gate_up_proj"] = expected[experts + "gate_up_proj"] * per_row[..., None]
        expected[experts + "down_proj"] = expected[experts + "down_proj"] * torch.from_numpy(scales["down"])[:, None, None]
        expected[f"layers.{layer}.router.per_expert_scale"] = torch.ones(2)
    values = {**gguf_files.metadata(CONFIG), **gguf_files.tokenizer_metadata()}
    tensors["rope_freqs.weight"] = gguf_files.rope_freqs(CONFIG)
    ours = checkpoint.load_model(gguf_files.write_file(tmp_path / "a.gguf", tensors, values), dtype=torch.float32)
    for name, weight in expected.items():
        assert_same_bits(ours.state_dict()[name], weight)


def test_older_names_and_missing_encoder_scalars(tmp_path):
    model = tiny.decided(SMALL)
    tensors = {**gguf_files.make_tensors(model, "F16"), "rope_freqs.weight": gguf_files.rope_freqs(SMALL)}
    tensors["self_cond_norm.weight"] = tensors.pop("self_cond_pre_norm.weight")
    for layer in range(2):
        del tensors[f"blk.{layer}.enc_layer_output_scale.weight"]
        raw, kind = tensors.pop(f"blk.{layer}.ffn_gate_up_exps.weight")
        for part, half in zip(("gate", "up"), np.split(raw, 2, axis=1), strict=True):
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = half.copy(), kind
    values = {**gguf_files.metadata(SMALL), **gguf_files.tokenizer_metadata()}
    loaded = checkpoint.load_model(gguf_files.write_file(tmp_path / "a.gguf", tensors, values), dtype=torch.float32)
    expected = {name: weight.half().float() if weight.dim() > 1 else weight for name, weight in model.state_dict().items()}
    for layer in range(2):
        expected[f"layers.{layer}.encoder_layer_scalar"] = expected[f"layers.{layer}.layer_scalar"]
    for name, weight in expected.items():
        assert_same_bits(loaded.state_dict()[name], weight)


def pad(raw: gguf_files.Raw, axis: int, parts: int = 1, value: float = 0.0) -> gguf_files.Raw:
    """Adds 32 rows or inputs to each part of a Q8_0 tensor."""
    numbers = decode(raw).numpy()
    widths = [(0, 0)] * numbers.ndim
    widths[axis] = (0, 32)
    padded = [np.pad(part, widths, constant_values=value) for part in np.split(numbers, parts, axis=axis)]
    return encode(np.concatenate(padded, axis=axis), "Q8_0")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_rows_and_inputs_of_zeros_are_cut_off(tmp_path, value):
    model = tiny.decided(SMALL)
    tensors = {**gguf_files.make_tensors(model, "Q8_0"), "rope_freqs.weight": gguf_files.rope_freqs(SMALL)}
    expected = gguf_files.model_with(SMALL, tensors)
    padded = {"ffn_gate.": (-2, 1), "ffn_down.": (-1, 1), "ffn_gate_up_exps.": (-2, 2), "ffn_down_exps.weight": (-1, 1)}
    for name, raw in list(tensors.items()):
        for part, (axis, parts) in padded.items():
            if part in name:
                tensors[name] = pad(raw, axis, parts, value)
    values = {**gguf_files.metadata(SMALL), **gguf_files.tokenizer_metadata()}
    path = gguf_files.write_file(tmp_path / "a.gguf", tensors, values)
    if value:
        with pytest.raises(checkpoint.CheckpointError, match=r"tensor blk.0.ffn_\w+.weight has the shape .* is not zero"):
            checkpoint.load_model(path)
        return
    loaded = checkpoint.load_model(path, dtype=torch.float32)
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


# Header and settings


@pytest.mark.parametrize("version", [2, 3])
def test_the_header_equals_what_the_packages_reader_finds(tmp_path, version):
    changes = {"some.float": 0.1, "some.list": [1.5, -2.25], "some.flag": True, "some.empty text": ""}
    path = gguf_files.write_model(tmp_path / "a.gguf", tiny.decided(SMALL), "Q8_0", changes=changes)
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes([version]) + content[5:])
    ours = read_gguf(path)
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.metadata) == list(fields)
    assert set(ours.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        info = ours.tensors[tensor.name]
        found = (info.type.name, list(info.shape)[::-1], info.start, info.nbytes)
        assert found == (tensor.tensor_type.name, tensor.shape.tolist(), tensor.data_offset, tensor.n_bytes)
        assert ours.rows(tensor.name).numpy().tobytes() == tensor.data.tobytes()


def test_a_file_larger_than_the_memory_is_mapped_for_reading_only(tmp_path, monkeypatch):
    path = gguf_files.write_model(tmp_path / "a.gguf", tiny.decided(SMALL))
    map_file = mmap.mmap

    def refuse_private(descriptor, length, access):
        if access == mmap.ACCESS_COPY:
            raise OSError("Cannot allocate memory")
        return map_file(descriptor, length, access=access)

    expected = read_gguf(path).data
    monkeypatch.setattr(mmap, "mmap", refuse_private)
    assert torch.equal(read_gguf(path).data, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_head_dim": 24, "num_global_key_value_heads": 1},
        {"global_rotary_fraction": 1.0, "rope_theta": 100.0, "rms_norm_eps": 1e-5},
        {"layer_types": (FULL,), "final_logit_softcapping": 15.5},
        {"layer_types": (SLIDING, SLIDING, FULL, FULL), "sliding_window": 5, "canvas_length": 7},
    ],
)
def test_settings_become_the_config_that_was_written(tmp_path, changes):
    config = replace(SMALL, **changes)
    opened = checkpoint.open_gguf(gguf_files.write_model(tmp_path / "a.gguf", tiny.decided(config)))
    assert opened.config == config
    expected = SamplerConfig(canvas_length=config.canvas_length, eos_token_ids=(1, 6, 9))
    assert opened.sampler == expected
    assert set(opened.tensors()) == {checkpoint.published_name(name) for name in tiny.decided(config).state_dict()}


def test_the_released_defaults_hold_where_a_file_says_nothing(tmp_path):
    settings = {"max_steps": 12, "t_min": 0.1, "t_max": 0.9, "entropy_bound": 0.3, "stability_threshold": 2}
    keys = {f"diffusion.eb_{name}": value for name, value in settings.items()} | {"diffusion.canvas_length": None}
    opened = checkpoint.open_gguf(gguf_files.write_model(tmp_path / "a.gguf", tiny.decided(SMALL), changes=keys))
    assert opened.config.canvas_length == ModelConfig().canvas_length
    assert opened.sampler == SamplerConfig(**settings, eos_token_ids=(1, 6, 9))


# Generation


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_text_from_a_file_equals_text_from_its_weights(tmp_path, kind):
    tensors = gguf_files.make_tensors(tiny.decided(SMALL), kind)
    changes = {"diffusion.eb_max_steps": 6}
    path = gguf_files.write_model(tmp_path / "model.gguf", tiny.decided(SMALL), kind, changes=changes)
    reference = Writer(
        gguf_files.model_with(SMALL, tensors), gguf_files.reference_tokenizer(), checkpoint.open_gguf(path).sampler
    )
    loaded = redraft.load(path, dtype="float32")
    for seed in range(2):
        assert (
            loaded.write("The model", seed=seed, max_tokens=24).ids
            == reference.write("The model", seed=seed, max_tokens=24).ids
        )
    messages = [{"role": "user", "content": "Which steps?"}]
    assert loaded.chat(messages, seed=1, max_tokens=16).ids == reference.chat(messages, seed=1, max_tokens=16).ids
    output = CliRunner().invoke(
        app, ["-m", str(path), "The model", "--raw", "--seed", "1", "-n", "24", "--dtype", "float32"]
    )
    assert output.stdout.rstrip("\n") == reference.write("The model", seed=1, max_tokens=24).text.rstrip("\n")


def test_info_shows_the_shape_of_a_file(tmp_path):
    path = gguf_files.write_model(tmp_path / "model.gguf", tiny.decided(SMALL), "Q8_0")
    shown = CliRunner().invoke(app, ["info", "-m", str(path)]).stdout
    assert "2 (1 with a window of 16, the rest full)" in shown
    assert f"on disk                {path.stat().st_size / 1000:.2f} kB" in shown


def test_quantized_weights_take_the_precision_of_the_embedding(tmp_path):
    """Not by way of bf16, which would round them twice."""
    tensors = gguf_files.make_tensors(tiny.decided(SMALL), lambda name: "F32" if "token_embd" in name else "Q8_0")
    values = {**gguf_files.metadata(SMALL), **gguf_files.tokenizer_metadata()}
    tensors["rope_freqs.weight"] = gguf_files.rope_freqs(SMALL)
    loaded = checkpoint.load_model(gguf_files.write_file(tmp_path / "a.gguf", tensors, values))
    expected = gguf_files.model_with(SMALL, tensors)
    for name, weight in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_a_file_is_quantized_to_a_folder(tmp_path):
    path = gguf_files.write_model(tmp_path / "model.gguf", tiny.decided(SMALL), "Q8_0")
    expected = redraft.load(path, dtype="float32", quant="fp8").write("The", seed=1, max_tokens=16, max_steps=4)
    loaded = checkpoint.load_checkpoint(path, dtype="float32", quant="fp8")
    folder = checkpoint.save(loaded[0], tmp_path / "out", tokenizer=loaded[1], sampler=loaded[2])
    assert checkpoint.folder_with_vision(path) is None
    assert redraft.load(folder, dtype="float32").write("The", seed=1, max_tokens=16, max_steps=4).ids == expected.ids


def test_codes_of_a_file_are_published_as_they_are(tmp_path):
    """Q4_0 has negative scales, which compressed-tensors can store too."""
    path = gguf_files.write_model(tmp_path / "model.gguf", tiny.decided(SMALL), "Q4_0")
    options = checkpoint.QuantizeOptions(to="int4", rest="bf16")
    *_, projections = checkpoint.quantize_checkpoint(path, tmp_path / "out", options)
    assert not any(projection.rounded for projection in projections.values())
    expected = checkpoint.load_model(path).state_dict()
    for name, weight in checkpoint.load_model(tmp_path / "out").state_dict().items():
        assert torch.allclose(weight.float(), expected[name].float(), rtol=2**-7), name


# Hub


def test_a_folder_of_gguf_files_is_refused_by_the_name_of_one(tmp_path, monkeypatch):
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(checkpoint.CheckpointError, match=r"has no config.json, but GGUF files: name one of .*/a\.gguf$"):
        checkpoint.find(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **patterns: tmp_path)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"if it has GGUF files, name one of them, such as OWNER/NAME:Q4_K_M$"
    ):
        checkpoint.find("OWNER/NAME")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("OWNER/NAME/model-Q8_0.gguf", "model-Q8_0.gguf"),
        ("hf.co/OWNER/NAME/sub folder/model-Q8_0.gguf", "sub folder/model-Q8_0.gguf"),
        ("OWNER/NAME:Q4_K_M", "model-Q4_K_M.gguf"),
        ("hf.co/OWNER/NAME:bf16", "BF16/model-BF16.gguf"),
    ],
)
def test_a_file_on_the_hub_is_named_by_file_or_tag(tmp_path, monkeypatch, name, file):
    files = ["README.md", "model-Q8_0.gguf", "model-Q4_K_M.gguf", "BF16/model-BF16.gguf", "mmproj-BF16.gguf", "Q8_0.txt"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository: files)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repository, name: f"{tmp_path}/{repository}/{name}")
    assert checkpoint.find(name) == tmp_path / "OWNER" / "NAME" / file


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("OWNER/NAME:Q2_K", "'OWNER/NAME' has 0 GGUF files that end in Q2_K; it has a-Q8_0.gguf, b-Q8_0.gguf"),
        ("OWNER/NAME:Q8_0", "'OWNER/NAME' has 2 GGUF files that end in Q8_0; it has a-Q8_0.gguf, b-Q8_0.gguf"),
        ("missing.gguf", "there is no file 'missing.gguf', and it is not one on the hub (OWNER/NAME/FILE.gguf)"),
        ("/somewhere/missing/x.gguf", "there is no file '/somewhere/missing/x.gguf'"),
        ("OWNER/NAME/../../x.gguf", "there is no file 'OWNER/NAME/../../x.gguf'"),
        ("OWNER/NAME/x.gguf", "'OWNER/NAME' is no local folder, and the hub did not deliver it: no network"),
    ],
)
def test_a_file_that_cannot_be_had_is_refused(monkeypatch, name, sentence):
    def fail(*arguments):
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repository: ["a-Q8_0.gguf", "b-Q8_0.gguf"])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.find(name)
    assert sentence in str(caught.value)
