"""Tuning: the base stays as it is, resumed = unbroken, recomputed = stored, packed = dequantized, and a lost loss stops."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from redraft import checkpoint
from redraft.kernels.packed import dequantize_packed
from redraft.model.lora import AdapterConfig, AdapterError, new_adapter
from redraft.model.quant.layers import PackedExperts, PackedLinear
from redraft.model.quant.policy import QuantPolicy
from redraft.model.quant.quantizers import quantize_weight
from redraft.train import export
from redraft.train.config import TrainConfig
from redraft.train.data_check import check_records, estimate_tokens
from redraft.train.held_out import Evaluated
from redraft.train.loop import Ended, LostLossError, Report, Trainer
from redraft.train.loss import LossConfig, compute_losses
from redraft.train.tuning import TuneOptions, tuning_config, tuning_data

EVERY_TARGET = ("attention", "dense", "experts", "self_conditioning")


def write_chats(path: Path, count: int = 40) -> Path:
    """Conversations of two turns, a few texts and a few prompts with completions."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(count):
            turns = [("user", f"say {n % 7}"), ("assistant", "x" * (n % 7 + 1)), ("user", "more"), ("assistant", "yy")]
            record = {"messages": [{"role": role, "content": content} for role, content in turns]}
            if n % 5 == 3:
                record = {"text": f"{n} and {n + 1}"}
            if n % 5 == 4:
                record = {"prompt": f"{n}?", "completion": f"{n + 1}."}
            file.write(json.dumps(record) + "\n")
    return path


def config(folder: Path, **changes: object) -> TrainConfig:
    """A run of a few seconds on a tiny base."""
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / "base"
    if not base.exists():
        tiny.save_folder(base)
        write_chats(folder / "chats.jsonl")
    adapter = AdapterConfig(rank=4, alpha=8.0, dropout=0.2, targets=EVERY_TARGET)
    options = TuneOptions(**{"adapter": adapter, "length": 96, "batch": 4, "rows": 2, "rate": 5e-3, "steps": 8, **changes})
    data = tuning_data([str(folder / "chats.jsonl")], options, tiny.sampler(), 512)
    *_, check = check_records(data)
    estimate = estimate_tokens(check, data, tiny.byte_tokenizer(), 1)
    return tuning_config(str(base), data, options, check, estimate, torch.device("cpu"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.soak
def test_a_run_learns_and_leaves_the_base_as_it_was(tmp_path):
    cfg = config(tmp_path, steps=20, save_every=20)
    before = {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()}
    trainer = Trainer(cfg, tmp_path / "run")
    frozen = {name: t.clone() for name, t in trainer.objective.model.state_dict().items()}
    found = list(trainer.run())
    assert all(torch.equal(t, frozen[name]) for name, t in trainer.objective.model.state_dict().items())
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "base").iterdir()}
    evaluations = [event for event in found if isinstance(event, Evaluated)]
    assert len(evaluations) == 20
    assert evaluations[-1].scores["denoiser"] < evaluations[0].scores["denoiser"]
    assert evaluations[-1].scores["next_token"] < evaluations[0].scores["next_token"]
    best = min(evaluations, key=lambda event: sum(event.scores.values()))
    model = checkpoint.load_model(tmp_path / "base", dtype=torch.float32)
    adapter = checkpoint.load_adapter(tmp_path / "run", model)
    assert adapter.metadata["scores"]["held_out"]["step"] == best.step
    assert adapter.metadata["data"] == ["chats.jsonl"]
    assert checkpoint.load_adapter(tmp_path / "run/last", model).metadata["steps"] == 20
    assert isinstance(found[-1], Ended)
    assert found[-1].model == tmp_path / "run"


def test_another_adapter_in_the_same_folder_is_refused(tmp_path):
    list(Trainer(config(tmp_path, steps=1), tmp_path / "run").run())
    with pytest.raises(
        ValueError, match=r"was made with rank 4, targets .*, this run has rank 2, targets .*: give another folder"
    ):
        Trainer(config(tmp_path, steps=1, adapter=AdapterConfig(rank=2)), tmp_path / "run")


def test_an_earlier_adapter_is_the_start(tmp_path):
    cfg = config(tmp_path)
    model = checkpoint.load_model(tmp_path / "base", dtype=torch.float32)
    earlier = new_adapter(cfg.adapter, model.config, seed=7)
    for pair in {id(pair): pair for _, _, pair in earlier.pairs()}.values():
        torch.nn.init.normal_(pair.b, generator=torch.Generator().manual_seed(1))
    checkpoint.save_adapter(earlier, tmp_path / "earlier", base="base", dtype=torch.float32)
    started = Trainer(config(tmp_path, start_adapter=str(tmp_path / "earlier")), tmp_path / "run").part
    assert all(torch.equal(started.pair(half, matrix).b, pair.b) for half, matrix, pair in earlier.pairs())
    assert all(torch.equal(started.pair(half, matrix).a, pair.a) for half, matrix, pair in earlier.pairs())
    assert all(p.requires_grad and p.dtype == torch.float32 for p in started.parameters())
    for other in ({"rank": 2}, {"rank": 4, "alpha": 8.0}, {"rank": 4, "alpha": 1.0, "targets": EVERY_TARGET}):
        changes = {"adapter": AdapterConfig(**other), "start_adapter": str(tmp_path / "earlier")}
        with pytest.raises(AdapterError, match="earlier has another rank, alpha, targets or halves than this run, see "):
            Trainer(config(tmp_path, **changes), tmp_path / "other")


def test_recomputed_layers_give_the_same_gradients(tmp_path):
    cfg = config(tmp_path)
    gradients = []
    for recompute in (False, True):
        trainer = Trainer(TrainConfig(**{**vars(cfg), "recompute": recompute}), tmp_path / f"run {recompute}")
        trainer.task.open()
        torch.manual_seed(0)
        trainer.task.losses(trainer.compute, 0, torch.Generator().manual_seed(0)).total.backward()
        gradients.append({name: p.grad for name, p in trainer.part.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-4, atol=1e-6), name
        assert gradient.abs().max() > 0 or name.endswith(".a")  # b is zero, so a has no gradient yet


@pytest.mark.parametrize("format", ["fp8", "nvfp4", "int4"])
def test_gradients_through_packed_weights_are_those_of_the_dequantized_ones(format):
    """The model keeps its codes; the loss and every gradient agree with a model of the numbers that the codes stand for."""
    losses, gradients = [], []
    for is_packed in (True, False):
        model = tiny.build(tiny.CONFIGS["more experts than tokens"])
        pack(model, format, is_packed)
        adapter = new_adapter(AdapterConfig(rank=4, targets=EVERY_TARGET[:3]), model.config)
        with torch.no_grad():
            for p in adapter.parameters():
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.05)
        loss = objective_loss(model, adapter)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: p.grad for name, p in adapter.named_parameters()})
    assert torch.allclose(*losses, rtol=1e-5)
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=1e-3, atol=1e-5), name


def pack(model, format: str, is_packed: bool) -> None:
    """Packs every matrix of the layers, or rounds it as packing would."""
    for layer in model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, torch.nn.Linear):
                    packed = quantize_weight(child.weight, format)
                    child.weight.data = dequantize_packed(packed, child.in_features)
                    if is_packed:
                        setattr(parent, name, PackedLinear(packed))
        stacks = [quantize_weight(stack, format) for stack in (layer.experts.gate_up_proj, layer.experts.down_proj)]
        for stack, packed in zip((layer.experts.gate_up_proj, layer.experts.down_proj), stacks, strict=True):
            stack.data = dequantize_packed(packed, stack.shape[-1])
        if is_packed:
            layer.experts = PackedExperts(*stacks)


def objective_loss(model, adapter) -> torch.Tensor:
    from redraft.model.masks import Layout
    from redraft.train.loss import Batch, Objective, dense_masks, prepare, slice_masks

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(16, tiny.VOCAB, (2, 24), generator=generator)
    positions = torch.arange(24).expand(2, -1)
    batch = Batch(ids, Layout(positions, torch.where(positions < 8, -1, positions // 8 * 8), torch.zeros_like(ids)))
    cfg = LossConfig(self_condition=0.0)  # its forward has no gradient, and fp8 products there round their inputs
    batch, noise = prepare(batch, cfg, model.config.vocab_size, generator)
    mask_of = dense_masks(model.config, batch.layout)
    return Objective(model, cfg, adapter)(batch, noise, mask_of, slice_masks(mask_of, 0)).total


def test_packed_bases_stay_packed(tmp_path, monkeypatch):
    """A base of 4-bit experts trains with its codes in memory."""
    cfg = config(tmp_path, steps=2)
    runs_packed = QuantPolicy(quant="int4", runs_packed=True)
    monkeypatch.setattr(export.QuantPolicy, "for_device", lambda *_, **__: runs_packed)
    trainer = Trainer(cfg, tmp_path / "run")
    model = trainer.objective.model
    assert model.config.quant == "int4+fp8"
    assert all(isinstance(layer.experts, PackedExperts) for layer in model.layers)
    assert all(isinstance(event, Report | Evaluated | Ended) or event.folder for event in trainer.run())
    assert checkpoint.load_adapter(tmp_path / "run", checkpoint.load_model(tmp_path / "base")).metadata["steps"] >= 1


def test_a_lost_loss_stops_the_run_and_names_the_records(tmp_path, monkeypatch):
    """The weights before it are kept; nothing of the bad step reaches a checkpoint."""
    cfg = config(tmp_path, save_every=2)
    trainer = Trainer(cfg, tmp_path / "run")
    usual = trainer.task.compute_losses

    def sometimes_nan(*arguments):
        losses = usual(*arguments)
        return losses._replace(total=losses.total * float("nan")) if trainer.step == 5 else losses

    monkeypatch.setattr(trainer.task, "compute_losses", sometimes_nan)
    with pytest.raises(LostLossError, match=r"the loss is nan at step 6, in the rows of .*chats\.jsonl:\d+.*is kept: lower"):
        list(trainer.run())
    again = Trainer(cfg, tmp_path / "run")
    assert again.step == 4
    assert all(p.isfinite().all() for p in again.part.parameters())


def test_only_answers_are_learned(tmp_path):
    """The next-token loss leaves out the tokens of prompts; the denoiser has none of them anyway."""
    cfg = config(tmp_path)
    assert not cfg.loss.learns_prompts
    trainer = Trainer(cfg, tmp_path / "run")
    trainer.task.open()
    parts, _ = next(trainer.task.streams[0][0])
    from redraft.train.data import to_batch

    batch = to_batch(parts)
    model = checkpoint.load_model(tmp_path / "base", dtype=torch.float32)
    learned = compute_losses(model, batch, cfg.loss, torch.Generator().manual_seed(0))
    with_prompts = LossConfig(**{**vars(cfg.loss), "learns_prompts": True})
    everything = compute_losses(model, batch, with_prompts, torch.Generator().manual_seed(0))
    assert torch.equal(learned.denoiser, everything.denoiser)
    assert not torch.equal(learned.ar, everything.ar)


def test_options_that_cannot_be_are_refused(tmp_path):
    for changes, message in [
        ({"batch": 3, "rows": 2}, "batch 3 is no multiple"),
        ({"epochs": 0.0}, "epochs must be above 0"),
        ({"held_out": 0.9}, "share from 0 to 0.5"),
        ({"length": 20}, "no room for a prompt and a canvas of 16: give 32"),
    ]:
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **changes)


@pytest.mark.soak
def test_two_processes_train_the_adapter_of_one(tmp_path):
    """FSDP2 shards the frozen base and the adapter: the same losses, within rounding, and an adapter that loads."""
    root = Path(__file__).parents[2]
    config(tmp_path)  # writes the base and the records
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "redraft"]
    flags = ["tune", str(tmp_path / "base"), "--data", str(tmp_path / "chats.jsonl"), "--device", "cpu"]
    flags += ["--length", "96", "--batch", "4", "--rank", "4", "--steps", "6", "--targets", "attention,dense,experts"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": environment}
    for name, command in (("two", launcher), ("one", [sys.executable, "-m", "redraft"])):
        done = subprocess.run([*command, *flags, "--out", str(tmp_path / name)], **options)
        assert done.returncode == 0, done.stderr[-3000:]
    metrics = {
        name: [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    }
    for one, two in zip(metrics["one"], metrics["two"], strict=True):
        assert one.keys() == two.keys()
        if "loss" in one:
            assert abs(one["loss"] - two["loss"]) < 1e-3
    one, two = (tensors(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(one[name].float(), two[name].float(), atol=2e-3) for name in one)
