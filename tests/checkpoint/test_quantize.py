"""redraft quantize: on disk = while loading, resumed = unbroken; transformers loads what it writes and gives our logits."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import compressed_reference as reference
import pytest
import tiny
import torch
from compressed_folders import (
    ATTENTION,
    COMPACT,
    EXPERTS,
    LAYOUTS,
    compress_int4,
    compressed_config,
    describe,
    logits,
    save_compressed,
)
from safetensors import safe_open
from transformers import DynamicCache
from typer.testing import CliRunner

from redraft import checkpoint
from redraft.checkpoint import CheckpointError, QuantizeOptions, quantize_checkpoint
from redraft.cli.main import app
from redraft.config import FULL
from redraft.kernels.fp8 import quantize
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.quant.policy import QuantPolicy

PACKED = QuantPolicy(runs_packed=True)


@pytest.fixture(scope="module", name="source")
def _source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    model = tiny.build(COMPACT).bfloat16()
    return checkpoint.save(model, folder, tokenizer=tiny.byte_tokenizer(), sampler=tiny.sampler(max_new_tokens=32))


def write(source: Path, out: Path, **options) -> dict:
    *_, projections = quantize_checkpoint(source, out, QuantizeOptions(**options))
    return projections


def same_tensors(one: Path, other: Path) -> bool:
    first, second = (checkpoint.tensors.CheckpointTensors(folder) for folder in (one, other))
    return set(first) == set(second) and all(torch.equal(first[name].float(), second[name].float()) for name in first)


@pytest.mark.parametrize("to", ["nvfp4", "int4", "fp8"])
def test_quantizing_on_disk_equals_quantizing_while_loading(source, tmp_path, to):
    projections = write(source, tmp_path / "out", to=to, shard_bytes=60_000)
    from_disk = checkpoint.load_model(tmp_path / "out", policy=PACKED)
    at_load = checkpoint.load_model(source, policy=QuantPolicy(quant=to, runs_packed=True))
    assert from_disk.config == at_load.config
    assert at_load.config.quant == {"nvfp4": "nvfp4+fp8", "int4": "int4+fp8", "fp8": "fp8"}[to]
    saved, loaded = from_disk.state_dict(), at_load.state_dict()
    assert set(saved) == set(loaded)
    for name in saved:
        assert torch.equal(saved[name].float(), loaded[name].float()), name
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert projections["experts.gate_up_proj"].matrices == 2 * COMPACT.num_experts
    assert projections["experts.gate_up_proj"].bits == pytest.approx({"nvfp4": 4.5, "int4": 4.5, "fp8": 8.25}[to], abs=0.3)
    assert 0.02 < projections["experts.down_proj"].relative_error < 0.1
    assert "experts.down_proj" in " ".join(at_load.conversions)
    # A model that is packed in memory is written packed, and nothing changes.
    checkpoint.save(at_load, tmp_path / "saved")
    assert checkpoint.load_model(tmp_path / "saved", policy=PACKED).config == at_load.config
    again = checkpoint.load_model(tmp_path / "saved", policy=PACKED).state_dict()
    assert all(torch.equal(again[name].float(), loaded[name].float()) for name in loaded)


def test_the_rest_stays_as_it_is(source, tmp_path):
    write(source, tmp_path / "out", to="nvfp4", rest="bf16")
    stored = checkpoint.tensors.CheckpointTensors(source)
    written = checkpoint.tensors.CheckpointTensors(tmp_path / "out")
    kept = [name for name in stored if ".experts." not in name]
    assert all(torch.equal(stored[name], written[name]) for name in kept)
    assert all(name in stored or ".experts." in name for name in written)
    assert {path.name for path in source.iterdir()} == {path.name for path in (tmp_path / "out").iterdir()}
    for file in ("generation_config.json", "tokenizer.json"):
        assert (source / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    gate, up = (written[f"model.decoder.layers.0.experts.3.{part}_proj.weight_global_scale"] for part in ("gate", "up"))
    assert torch.equal(gate, up)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "nvfp4-pack-quantized"
    assert any("self_attn" in name and "mlp" in name for name in config["ignore"])


@pytest.mark.parametrize("to", ["nvfp4", "int4"])
@pytest.mark.parametrize("rest", ["fp8", "bf16"])
def test_transformers_loads_what_redraft_writes(source, tmp_path, to, rest):
    """Weights are equal to the bit; logits too, except where fp8 layers round their activations.

    In float32, because transformers rounds the global scales of NVFP4 to the dtype that it loads in.
    """
    write(source, tmp_path / "out", to=to, rest=rest)
    model = reference.load_in_transformers(tmp_path / "out", to)
    theirs = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    config, ours = checkpoint.open_weights(tmp_path / "out")
    for name in ours:
        weight = ours[name] if isinstance(ours[name], torch.Tensor) else ours[name].dequantize(torch.bfloat16)
        assert torch.equal(theirs[name], weight), name
        if name.startswith("model.decoder.layers") and "scalar" not in name:
            assert torch.equal(theirs[name.replace("decoder", "encoder.language_model")], weight), name
    if rest == "bf16":
        ids = torch.arange(16, 40).view(2, 12)
        past = DynamicCache(config=model.config.text_config)
        with torch.inference_mode():
            expected = model(input_ids=ids, past_key_values=past, decoder_input_ids=ids.flip(1)).logits
        mine = logits(checkpoint.load_model(tmp_path / "out", dtype=torch.float32))
        assert torch.allclose(mine, expected, atol=1e-5)
        assert config.quant == to


def test_a_quantized_source_is_quantized_again(source, tmp_path):
    """Codes of the same format are copied, others are rounded; zero points become symmetric codes."""
    write(source, tmp_path / "nvfp4", to="nvfp4")
    copied = write(tmp_path / "nvfp4", tmp_path / "copy", to="nvfp4")
    assert all(projection.rounded == 0 for projection in copied.values())
    assert same_tensors(tmp_path / "nvfp4", tmp_path / "copy")
    config = LAYOUTS["int4, zero points"][1]
    save_compressed(
        tmp_path / "other",
        {EXPERTS: compress_int4(32, symmetric=False), ATTENTION: compress_int4(32, symmetric=False)},
        config,
    )
    rounded = write(tmp_path / "other", tmp_path / "int4", to="int4", rest="bf16")
    assert all(projection.relative_error > 0.02 for projection in rounded.values())
    assert checkpoint.read_model_config(tmp_path / "int4").quant == "int4"
    model = checkpoint.load_model(tmp_path / "int4", policy=PACKED)
    assert model.layers[0].experts.packed("gate_up_proj").minimum is None


def test_scales_in_float32_stay_so(tmp_path):
    """Written again by redraft quantize, and saved after loading. Scales of weights that redraft rounds are bf16."""

    def compress(weight):
        rounded = quantize(weight.float())
        return {"weight": rounded.qdata, "weight_scale": rounded.scale}

    config = compressed_config(describe("float-quantized"), file_format="float-quantized")
    save_compressed(tmp_path / "source", {EXPERTS: compress, ATTENTION: compress}, config)
    copied = write(tmp_path / "source", tmp_path / "copy", to="fp8")
    assert copied["experts.down_proj"].rounded == 0
    checkpoint.save(checkpoint.load_model(tmp_path / "source"), tmp_path / "saved")
    stored, *others = (checkpoint.tensors.CheckpointTensors(tmp_path / name) for name in ("source", "copy", "saved"))
    for written in others:
        scales = [name for name in stored if name.endswith("weight_scale")]
        assert all(torch.equal(stored[name], written[name]) for name in scales)
        assert {written.dtype(name) for name in scales} == {"F32"}
    assert others[0].dtype("model.decoder.layers.0.mlp.up_proj.weight_scale") == "BF16"


def interrupt(source: Path, out: Path, after: int, **options) -> None:
    """Runs the command until some bytes are there, and leaves it like a killed process."""
    code = (
        "import os, sys; from pathlib import Path; from redraft.checkpoint import QuantizeOptions, quantize_checkpoint\n"
        f"events = quantize_checkpoint(Path({str(source)!r}), {str(out)!r}, QuantizeOptions(**{options!r}))\n"
        f"for event in events:\n    if event.done > {after}: os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9


@pytest.mark.soak
def test_a_killed_run_continues(source, tmp_path, monkeypatch):
    options = {"to": "int4", "shard_bytes": 60_000}
    whole = write(source, tmp_path / "whole", **options)
    interrupt(source, tmp_path / "out", 130_000, **options)
    assert not (tmp_path / "out").exists()
    (work,) = tmp_path.glob(".out.quantize-*")
    finished = {path.name: path.stat().st_mtime_ns for path in work.glob("*.safetensors")}
    assert len(finished) >= 2
    resumed = write(source, tmp_path / "out", **options)
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == finished  # not written again
    assert resumed == whole
    assert same_tensors(tmp_path / "whole", tmp_path / "out")
    assert not work.exists()
    checkpoint.load_model(tmp_path / "out")


@pytest.mark.soak
def test_other_options_and_sources_do_not_use_old_shards(source, tmp_path):
    interrupt(source, tmp_path / "out", 60_000, to="int4", shard_bytes=30_000)
    (work,) = tmp_path.glob(".out.quantize-*")
    write(source, tmp_path / "out", to="nvfp4", shard_bytes=30_000)
    assert not work.exists()
    assert checkpoint.read_model_config(tmp_path / "out").quant == "nvfp4+fp8"
    interrupt(source, tmp_path / "next", 60_000, to="int4", shard_bytes=30_000)
    other = checkpoint.save(tiny.build(COMPACT, 1).bfloat16(), tmp_path / "other", tokenizer=tiny.byte_tokenizer())
    write(other, tmp_path / "next", to="int4", shard_bytes=30_000)
    write(other, tmp_path / "unbroken", to="int4", shard_bytes=30_000)
    assert same_tensors(tmp_path / "next", tmp_path / "unbroken")
    assert not list(tmp_path.glob(".*quantize*"))


def test_another_version_does_not_use_old_shards(source, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.mkdir()
    monkeypatch.setattr(checkpoint.quantize, "PROGRAM", program)
    finished = []
    for line in ("old", "older", "older"):
        (program / "quantizers.py").write_text(line)
        if len(finished) == 2:
            os.utime(program / "quantizers.py", ns=(7, 7))
        events = quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(shard_bytes=60_000))
        assert next(events).done < 60_000
        (work,) = tmp_path.glob(".out.quantize-*")  # the one before it is gone
        finished.append(work.name)
        events.close()
    assert len(set(finished)) == 3


def test_the_command(source, tmp_path):
    run = CliRunner().invoke(app, ["quantize", str(source), "--to", "nvfp4", "--out", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    assert run.stdout == f"{tmp_path / 'out'}\n"
    assert "experts.gate_up_proj" in run.stderr
    info = CliRunner().invoke(app, ["info", "-m", str(tmp_path / "out")])
    assert "nvfp4-pack-quantized" in info.output
    assert "float-quantized" in info.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "int3", "--out", "OUT"], "no format 'int3'; try nvfp4, int4, fp8"),
        (["--rest", "int4", "--out", "OUT"], "can be fp8 or bf16, not 'int4'"),
        ([], "name the folder to write"),
        (["OUT", "--out", "OUT"], "name the folder to write"),
    ],
)
def test_bad_options_are_refused(source, tmp_path, arguments, words):
    arguments = [str(tmp_path / "out") if argument == "OUT" else argument for argument in arguments]
    run = CliRunner().invoke(app, ["quantize", str(source), *arguments])
    assert isinstance(run.exception, ValueError)
    assert words in str(run.exception)
    assert not (tmp_path / "out").exists()


def test_sizes_that_have_no_layout_are_refused(tmp_path):
    folder = tiny.save_folder(tmp_path / "model")  # its experts have 24 inputs
    for to, group in (("nvfp4", 16), ("int4", 32)):
        with pytest.raises(CheckpointError, match=f"has 24 inputs, and {to} needs a multiple of {group}"):
            write(folder, tmp_path / "out", to=to)


def test_parts_add_up_to_the_file(source, tmp_path):
    write(source, tmp_path / "out", to="int4")
    config, tensors = checkpoint.open_weights(tmp_path / "out")
    parts = checkpoint.measure_parts(tensors, config)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert sum(part.nbytes for part in parts) == sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    counts = config.parameter_counts()
    for name in ("attention", "dense MLP", "router", "embedding", "self-conditioning", "norms and scalars"):
        assert sum(part.weights for part in parts if part.part == name) == counts[name], name
    assert sum(part.weights for part in parts if part.part.startswith("experts.")) == counts["experts"]


def test_quant_on_a_cpu_rounds_and_dequantizes(source):
    """So an eval tells what a format costs."""
    for to in ("nvfp4", "int4"):
        rounded = checkpoint.load_model(source, policy=QuantPolicy(quant=to, keep_bf16=True))
        packed = checkpoint.load_model(source, policy=QuantPolicy(quant=to, keep_bf16=True, runs_packed=True))
        assert (rounded.config.quant, packed.config.quant) == (None, to)
        difference = logits(rounded.float()) - logits(packed.float())
        assert difference.abs().max() < 0.1
        assert any(f"relative error {error}" in rounded.conversions[0] for error in ("8.", "9."))


MEASURE = """
import sys, threading, time
from pathlib import Path
from redraft.checkpoint import QuantizeOptions, quantize_checkpoint
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
most = 0
def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.002)
list(quantize_checkpoint(Path(sys.argv[1]), sys.argv[3] + "-first", QuantizeOptions(to="nvfp4")))  # torch starts its threads
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
list(quantize_checkpoint(Path(sys.argv[2]), sys.argv[3], QuantizeOptions(to="nvfp4")))
print(most - before)
"""


@pytest.mark.soak
def test_memory_does_not_grow_with_experts_and_layers(source, tmp_path):
    """A few experts are quantized at a time: 24 times as many weights need hardly more memory."""
    peaks = []
    for experts, layers in ((8, 1), (64, 3)):
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": experts, "layer_types": (FULL,) * layers}
        model = DiffusionGemma(replace(tiny.BASE, **sizes)).to(torch.bfloat16).requires_grad_(False)
        for weight in model.parameters():
            weight.normal_(std=0.02)
        folder = checkpoint.save(model, tmp_path / f"{experts} experts", tokenizer=tiny.byte_tokenizer())
        arguments = [str(folder), str(tmp_path / f"out {experts}")]
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, str(source), *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # so that freed tensors go back to the system
        )
        peaks.append(int(run.stdout))
    assert peaks[1] < 1.5 * peaks[0] + 10e6, peaks


def test_describe_names_what_loading_did(tmp_path):
    config = compressed_config(describe("pack-quantized", group_size=16), file_format="pack-quantized")
    save_compressed(tmp_path, {EXPERTS: compress_int4(16)}, config)
    for small, words in ((False, "fp8 by channel"), (True, "NVFP4")):
        model = checkpoint.load_model(tmp_path, policy=QuantPolicy(runs_packed=True, prefer_small=small))
        sentence = next(sentence for sentence in model.conversions if "down_proj" in sentence)
        assert sentence.startswith(f"experts.down_proj, 2 weights: pack-quantized -> {words}, relative error")
