"""Published checkpoints in and out. A checkpoint is a folder: config.json, generation_config.json, safetensors, tokenizer.

names.py    file names, and our tensor names -> the published ones
find.py     where a checkpoint is: a folder, a model in the package, a hub id
tensors.py  the tensors of a folder, memory-mapped
load.py     tensors -> model
save.py     model -> folder
"""

from redraft.checkpoint.find import PACKAGED, find
from redraft.checkpoint.load import PRECISIONS, from_state_dict, laid_out, load_config, load_model
from redraft.checkpoint.names import CheckpointError, published_name
from redraft.checkpoint.save import save, write_text
from redraft.checkpoint.tensors import with_vision

__all__ = [
    "PACKAGED",
    "PRECISIONS",
    "CheckpointError",
    "find",
    "from_state_dict",
    "laid_out",
    "load_config",
    "load_model",
    "published_name",
    "save",
    "with_vision",
    "write_text",
]
