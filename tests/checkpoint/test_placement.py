"""Planned bytes = loaded bytes, whatever the layout of the file and the policy."""

from itertools import product

import gguf_files
import numpy as np
import pytest
import tiny
import torch
from compressed_folders import LAYOUTS, save_compressed

from redraft import checkpoint
from redraft.checkpoint.placement import Placement
from redraft.engine.memory_plan import WeightBytes
from redraft.model.quant.policy import QuantPolicy

POLICIES = {
    "CPU": QuantPolicy(),
    "GPU": QuantPolicy(runs_packed=True),
    "small": QuantPolicy(runs_packed=True, packs_dense=True, packs_embedding=True, prefer_small=True),
    "bf16": QuantPolicy(runs_packed=True, packs_dense=True, packs_embedding=True, prefer_small=True, keep_bf16=True),
    "int4": QuantPolicy(runs_packed=True, quant="int4"),
}
GGUF_FORMATS = {
    "Q4_K": "Q4_K",
    "Q4_0": "Q4_0",
    "Q5_0": "Q5_0",
    "one expert weight in full precision": lambda name: "F16" if "ffn_down_exps" in name else "Q8_0",
}


@pytest.fixture(scope="module", name="files")
def _files(tmp_path_factory):
    """Makes the file of a layout, once."""
    made = {}

    def make(layout: str):
        if layout not in made:
            made[layout] = write(tmp_path_factory.mktemp("planned") / "model.gguf", layout)
        return made[layout]

    return make


def write(path, layout: str):
    """A folder or a GGUF file in this layout."""
    if layout in LAYOUTS:
        rules, config = LAYOUTS[layout]
        save_compressed(path.with_suffix(""), rules, config)
        return path.with_suffix("")
    if layout in GGUF_FORMATS:
        return gguf_files.write_model(path, tiny.build(gguf_files.CONFIG), GGUF_FORMATS[layout])
    model = tiny.build(gguf_files.SMALL)
    tensors = {**gguf_files.make_tensors(model, "Q4_0"), "rope_freqs.weight": gguf_files.rope_freqs(model.config)}
    for name, raw in list(tensors.items()):
        numbers = gguf_files.decode(raw).numpy()
        if layout == "padded" and "ffn_down_exps.weight" in name:
            tensors[name] = gguf_files.encode(np.pad(numbers, [(0, 0), (0, 0), (0, 32)]), "Q4_0")
        if layout == "halves of two formats" and "ffn_gate_up_exps" in name:
            del tensors[name]
            for part, half, kind in zip(("gate", "up"), np.split(numbers, 2, axis=1), ("Q4_0", "Q4_1"), strict=True):
                tensors[name.replace("gate_up", part)] = gguf_files.encode(half.copy(), kind)
    return gguf_files.write_file(path, tensors, {**gguf_files.metadata(model.config), **gguf_files.tokenizer_metadata()})


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        *product([*LAYOUTS, *GGUF_FORMATS, "padded", "halves of two formats"], ["GPU"]),
        *product(["mixed", "padded"], ["CPU", "bf16", "int4", "small"]),
        *((layout, "small") for layout in [*LAYOUTS, *GGUF_FORMATS]),
    ],
)
def test_planned_bytes_are_those_of_the_model(files, layout, policy):
    """The placement is asked once, with the bytes of every part."""
    planned = []

    def place(config, sizes, dtype):
        planned.append(WeightBytes.from_sizes(sizes[POLICIES[policy]], config.num_hidden_layers))
        return Placement(torch.device("cpu"), POLICIES[policy])

    config, tensors = checkpoint.load.open_weights(files(layout))
    model = checkpoint.from_state_dict(config, tensors, dtype=torch.bfloat16, policy=POLICIES[policy], place=place)
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    loaded = WeightBytes.from_sizes(sizes, config.num_hidden_layers)
    assert planned == [loaded]
