"""Published checkpoints in and out. A checkpoint is a folder: config.json, generation_config.json, safetensors, tokenizer,
and for some models a draft head.

Files in reading order:
names.py             file names, and our tensor names -> the published ones of DiffusionGemma and Gemma 4
published_config.py  the JSON files <-> ModelConfig and SamplerConfig
find.py              a folder, a packaged model or a hub id -> the folder of the checkpoint
tensors.py           the tensors of a folder, memory-mapped
manifest.py          checks that the files of a folder were saved together
placement.py         on which device each weight is put
load.py              tensors -> model
atomic_folder.py     replaces a folder as a whole
save.py              model -> folder
parts.py             folder -> model, tokenizer and sampler settings on a device
"""

from redraft.checkpoint.atomic_folder import check_target, put_in_place, replace_folder, sync_files
from redraft.checkpoint.find import PACKAGED, find
from redraft.checkpoint.load import PRECISIONS, from_state_dict, lay_out_for_cpu, load_model
from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.names import CheckpointError, published_name
from redraft.checkpoint.parts import load_checkpoint, load_verifier
from redraft.checkpoint.published_config import (
    parse_model_config,
    parse_sampler_config,
    publish_model_config,
    publish_sampler_config,
    read_model_config,
    read_sampler_config,
)
from redraft.checkpoint.save import save
from redraft.checkpoint.tensors import folder_with_vision

__all__ = [
    "PACKAGED",
    "PRECISIONS",
    "CheckpointError",
    "check_target",
    "find",
    "folder_with_vision",
    "from_state_dict",
    "lay_out_for_cpu",
    "load_checkpoint",
    "load_model",
    "load_verifier",
    "parse_model_config",
    "parse_sampler_config",
    "publish_model_config",
    "publish_sampler_config",
    "published_name",
    "put_in_place",
    "read_model_config",
    "read_sampler_config",
    "replace_folder",
    "save",
    "sync_files",
    "verify_files",
]
