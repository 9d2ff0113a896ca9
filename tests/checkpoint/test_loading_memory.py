"""Memory while loading: nothing is copied to a device before the plan, and little more than the result afterwards.

The device is "meta", which holds no numbers: an observer adds up the storages that live there.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from compressed_folders import COMPACT, EXPERTS, FP8, compress_fp8, compressed_config, describe, save_compressed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from redraft import checkpoint
from redraft.checkpoint.placement import Placement
from redraft.checkpoint.tensors import CheckpointTensors
from redraft.cli.main import app
from redraft.config import FULL
from redraft.model.quant import conversion
from redraft.model.quant.policy import QuantPolicy
from redraft.model.quant.quantizers import RoundingError

PIECE = 4 * 128 * 64  # bytes of one expert's gate and up in float32; the tests convert one expert at a time
CONFIG = replace(COMPACT, moe_intermediate_size=64, num_experts=12, top_k_experts=1, layer_types=(FULL,))


class DeviceMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operations make on "meta", and their most since `forget`."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._forgotten: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        result = operation(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._forgotten:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        """Bytes that are in use now."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())

    def forget(self) -> int:
        """Begins anew, without the storages of now. Returns their bytes."""
        live = self.live
        self._forgotten = self._storages  # holds them weakly: their addresses are not used again
        self._storages = {}
        self.peak = 0
        return live


def load_and_measure(folder, policy: QuantPolicy) -> tuple[int, int, int]:
    """Bytes that loading took before the plan and at most after it, and those of the model."""
    before = []

    def place(config, sizes, dtype) -> Placement:
        placeholders = 4 * config.parameter_counts()["total"]  # the model before it is loaded is on "meta" too
        before.append(memory.forget() - placeholders)
        return Placement(torch.device("meta"), policy)

    config, tensors = checkpoint.open_weights(folder, "meta")
    with DeviceMemory() as memory:
        model = checkpoint.from_state_dict(config, tensors, device="meta", policy=policy, place=place)
    return before[0], memory.peak, sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory):
    model = tiny.build(CONFIG).bfloat16()
    return checkpoint.save(model, tmp_path_factory.mktemp("plain") / "model", tokenizer=tiny.byte_tokenizer())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(RoundingError, "relative", 0.0)
    monkeypatch.setattr(conversion, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(conversion, "EXPERTS_AT_ONCE", 1)


@pytest.mark.parametrize("quant", ["fp8", None])
def test_a_device_holds_the_result_and_one_piece(folder, quant):
    """Nothing before the plan. Then never a whole stack, nor the whole embedding, beside what it is packed to."""
    policy = QuantPolicy(quant=quant, runs_packed=True, packs_embedding=quant is not None)
    before, peak, result = load_and_measure(folder, policy)
    assert before == 0
    assert result <= peak <= result + (5 * PIECE if quant else PIECE)


def test_headers_suffice_for_info(tmp_path, monkeypatch):
    """The experts of one layer are in full precision, each apart; none of them is read."""
    rules = {EXPERTS.replace(r"\.experts", r"\.0\.experts"): compress_fp8}
    save_compressed(tmp_path, rules, compressed_config(describe(FP8), file_format=FP8))
    read = CheckpointTensors.__getitem__
    names = []
    monkeypatch.setattr(CheckpointTensors, "__getitem__", lambda tensors, name: names.append(name) or read(tensors, name))
    shown = CliRunner().invoke(app, ["info", "-m", str(tmp_path)]).stdout
    assert re.search(r"experts\.down_proj +\S+ \w+ +float-quantized", shown)
    assert re.search(r"experts\.down_proj +\S+ \w+ +bfloat16 +16\.00", shown)
    assert not [name for name in names if ".experts." in name]
    experts = checkpoint.load_model(tmp_path).layers[1].experts
    expected = tiny.build(COMPACT).bfloat16().layers[1].experts
    assert torch.equal(experts.gate_up_proj, expected.gate_up_proj)
    assert torch.equal(experts.down_proj, expected.down_proj)
