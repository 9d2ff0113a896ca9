"""Published checkpoints in and out. A checkpoint is a folder: config.json, generation_config.json, safetensors, tokenizer,
and for some models a draft head. A GGUF file is a checkpoint too.

Files in reading order:
names.py             file names, and our tensor names -> the published ones of each architecture
published_values.py  values of published JSON files
published_llama.py   config.json of Llama and its relatives <-> LlamaConfig
published_config.py  the JSON files <-> ModelConfig and SamplerConfig
gguf/                GGUF files: settings, tensors and tokenizer in one file
pulled_models.py     the models that redraft pull keeps in the cache folder
pull_model.py        downloads such a model
find.py              a folder, a GGUF file, a packaged or pulled model or a hub id -> the folder or file of the checkpoint
tensors.py           the tensors of a folder, memory-mapped
quantization.py      how the weights of config.json are quantized
compressed.py        quantized weights of compressed-tensors and ModelOpt, under the names of the bf16 layout
manifest.py          checks that the files of a folder were saved together
placement.py         on which device each weight is put
load.py              tensors -> model
adapter_files.py     adapters in peft's format
drafter_files.py     drafters and page adapters of left-to-right models
adapter_summary.py   what the files of an adapter say about it
atomic_folder.py     replaces a folder as a whole
publish_packed.py    packed weights in the layout of compressed-tensors
save.py              model -> folder
tensor_file.py       writes safetensors files, at once or tensor by tensor
quantize.py          folder or GGUF file -> quantized folder, weight by weight
merge.py             folder or GGUF file, and an adapter -> folder
part_sizes.py        bits and bytes of the parts of a checkpoint
parts.py             folder or GGUF file -> model, tokenizer and sampler settings on a device
published_vision.py  what config.json and processor_config.json say about images -> VisionConfig and ImageConfig
vision_files.py      folder -> vision tower, when the first image comes
vision_check.py      whether a checkpoint takes images, without loading the tower
model_list.py        the models on this machine
"""

from redraft.checkpoint.adapter_files import (
    find_adapter,
    fingerprint,
    is_adapter,
    load_adapter,
    read_adapter_config,
    read_adapter_metadata,
    save_adapter,
)
from redraft.checkpoint.adapter_summary import AdapterSummary, summarize_adapter
from redraft.checkpoint.atomic_folder import check_target, put_in_place, replace_folder, sync_files
from redraft.checkpoint.drafter_files import is_drafter, load_drafter, read_drafter_config, save_drafter
from redraft.checkpoint.find import PACKAGED, PACKAGED_NAMES, find, find_on_hub, is_hub_name
from redraft.checkpoint.gguf import is_gguf, open_gguf
from redraft.checkpoint.load import PRECISIONS, check_quant, from_state_dict, lay_out_for_cpu, load_model, open_weights
from redraft.checkpoint.manifest import verify_files
from redraft.checkpoint.merge import Merged, merge_checkpoint
from redraft.checkpoint.model_list import ListedModel, list_models, remove_model
from redraft.checkpoint.names import CheckpointError, published_name
from redraft.checkpoint.part_sizes import PartSize, measure_parts
from redraft.checkpoint.parts import (
    drafting_sampler,
    find_base,
    find_drafters,
    load_checkpoint,
    load_verifier,
    open_checkpoint,
    read_configs,
)
from redraft.checkpoint.published_config import (
    parse_model_config,
    parse_sampler_config,
    publish_model_config,
    publish_sampler_config,
    read_model_config,
    read_sampler_config,
)
from redraft.checkpoint.pull_model import Pulled, Pulling, pull
from redraft.checkpoint.pulled_models import ASSISTANT, KNOWN_MODELS, KnownModel, Removed, cache_folder, is_pulled
from redraft.checkpoint.quantize import QuantizeOptions, quantize_checkpoint
from redraft.checkpoint.save import save
from redraft.checkpoint.tensors import folder_with_vision

__all__ = [
    "ASSISTANT",
    "KNOWN_MODELS",
    "PACKAGED",
    "PACKAGED_NAMES",
    "PRECISIONS",
    "AdapterSummary",
    "CheckpointError",
    "KnownModel",
    "ListedModel",
    "Merged",
    "PartSize",
    "Pulled",
    "Pulling",
    "QuantizeOptions",
    "Removed",
    "cache_folder",
    "check_quant",
    "check_target",
    "drafting_sampler",
    "find",
    "find_adapter",
    "find_base",
    "find_drafters",
    "find_on_hub",
    "fingerprint",
    "folder_with_vision",
    "from_state_dict",
    "is_adapter",
    "is_drafter",
    "is_gguf",
    "is_hub_name",
    "is_pulled",
    "lay_out_for_cpu",
    "list_models",
    "load_adapter",
    "load_checkpoint",
    "load_drafter",
    "load_model",
    "load_verifier",
    "measure_parts",
    "merge_checkpoint",
    "open_checkpoint",
    "open_gguf",
    "open_weights",
    "parse_model_config",
    "parse_sampler_config",
    "publish_model_config",
    "publish_sampler_config",
    "published_name",
    "pull",
    "put_in_place",
    "quantize_checkpoint",
    "read_adapter_config",
    "read_adapter_metadata",
    "read_configs",
    "read_drafter_config",
    "read_model_config",
    "read_sampler_config",
    "remove_model",
    "replace_folder",
    "save",
    "save_adapter",
    "save_drafter",
    "summarize_adapter",
    "sync_files",
    "verify_files",
]
