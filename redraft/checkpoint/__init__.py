"""Published checkpoints in and out. A checkpoint is a folder: config.json, generation_config.json, safetensors, tokenizer.

names.py    file names, and our tensor names -> the published ones
find.py     where a checkpoint is: a folder, a model in the package, a hub id
tensors.py  the tensors of a folder, memory-mapped
load.py     tensors -> model
save.py     model -> folder
"""

from redraft.checkpoint.find import PACKAGED, find
from redraft.checkpoint.load import PRECISIONS, from_state_dict, lay_out_for_cpu, load_config, load_model
from redraft.checkpoint.names import CheckpointError, published_name
from redraft.checkpoint.save import save, write_text
from redraft.checkpoint.tensors import folder_with_vision

__all__ = [
    "PACKAGED",
    "PRECISIONS",
    "CheckpointError",
    "find",
    "folder_with_vision",
    "from_state_dict",
    "lay_out_for_cpu",
    "load_config",
    "load_model",
    "published_name",
    "save",
    "write_text",
]
