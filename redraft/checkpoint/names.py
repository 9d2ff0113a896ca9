"""Names: the files of a checkpoint, and one table between our tensor names and the published ones.

Our names are the published ones without their prefix; a Layout holds the prefixes of one kind of checkpoint. DiffusionGemma
has the layer scalars twice, once for `denoise` (the published decoder) and once for `encode` (the published encoder); all
other text weights of the encoder are tied to the decoder's. Standard Gemma 4 has the scalars of `encode` alone, and Llama
has none.
The draft head is not published: it has a file of its own, so that transformers finds no tensor that it does not know.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from redraft.config import BackboneConfig, LlamaConfig

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
GENERATION_CONFIG = "generation_config.json"
REDRAFT_CONFIG = "redraft.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DRAFT_HEAD = "draft_head.safetensors"
DRAFT_HEAD_PREFIX = "draft_head."  # of the tensors in that file
DRAFTER_PREFIXES = ("drafter.", "page.")  # of the tensors of a drafter or a page adapter: they have a folder of their own
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PROCESSOR_CONFIG = "processor_config.json"  # how pictures become patches
PREPROCESSOR_CONFIG = "preprocessor_config.json"  # the same, in older files
PROCESSOR_FILES = (PROCESSOR_CONFIG, PREPROCESSOR_CONFIG)
DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
VISION_PARENT = "model.encoder."
VISION = (VISION_PARENT + "vision_tower.", VISION_PARENT + "embed_vision.")


class CheckpointError(ValueError):
    """A checkpoint cannot be found or read. The message names the file or the tensor."""


@dataclass(frozen=True)
class Layout:
    """The prefixes of the tensors of one kind of checkpoint."""

    text: str  # of all text weights
    encoder: str  # of the layer scalars of `encode`
    skipped: tuple[str, ...]  # of weights that redraft does not run


DIFFUSION = Layout(DECODER, ENCODER, VISION)
GEMMA4 = Layout(  # Gemma4ForConditionalGeneration
    "model.language_model.",
    "model.language_model.",
    ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)
GEMMA4_TEXT = Layout("model.", "model.", ())  # Gemma4ForCausalLM
LLAMA = Layout("model.", "model.", ())
HEAD = "lm_head.weight"
ROPE_BUFFER = ".rotary_emb.inv_freq"  # old files of Llama store the frequencies of RoPE, which the configuration gives


def find_layout(published_names: Iterable[str], config: BackboneConfig) -> Layout:
    """The layout of a checkpoint. The names of the tensors tell the two causal-only layouts of Gemma 4 apart."""
    if isinstance(config, LlamaConfig):
        return LLAMA
    if not config.is_causal_only:
        return DIFFUSION
    return GEMMA4 if any(name.startswith(GEMMA4.text) for name in published_names) else GEMMA4_TEXT


def published_name(ours: str, layout: Layout = DIFFUSION) -> str:
    """Our name of a tensor -> its published name. The draft head and a head of its own keep ours."""
    if ours.startswith(DRAFT_HEAD_PREFIX) or ours == HEAD:
        return ours
    if ours.endswith("encoder_layer_scalar"):
        return layout.encoder + ours.replace("encoder_layer_scalar", "layer_scalar")
    return layout.text + ours


def is_ignored(published: str, layout: Layout) -> bool:
    """Whether a published tensor is one that redraft does not need."""
    return published.startswith(layout.skipped) or (layout is LLAMA and published.endswith(ROPE_BUFFER))


def tied_name(published: str, layout: Layout = DIFFUSION) -> str | None:
    """The tensor that a published tensor duplicates, if it may be a duplicate.

    `lm_head` duplicates the embedding; DiffusionGemma's text weights of the encoder, except its layer scalars, duplicate
    the decoder's.
    """
    if published == HEAD:
        return layout.text + "embed_tokens.weight"
    if layout is DIFFUSION and published.startswith(ENCODER) and not published.endswith("layer_scalar"):
        return DECODER + published.removeprefix(ENCODER)
    return None
