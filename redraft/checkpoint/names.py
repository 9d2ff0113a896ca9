"""Names: the files of a checkpoint, and one table between our tensor names and the published ones.

Our names are the published ones without their prefix. Only the layer scalars exist twice, once for `denoise` (the published
decoder) and once for `encode` (the published encoder); all other text weights of the encoder are tied to the decoder's. The
draft head is not published: it has a file of its own, so that transformers finds no tensor that it does not know.
"""

import re

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
REDRAFT_CONFIG = "redraft.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DRAFT_HEAD = "draft_head.safetensors"
DRAFT_HEAD_PREFIX = "draft_head."  # of the tensors in that file
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


class CheckpointError(ValueError):
    """A checkpoint cannot be found or read. The message names the file or the tensor."""


def published_name(ours: str) -> str:
    """Our name of a tensor -> its published name. The draft head keeps ours."""
    if ours.startswith(DRAFT_HEAD_PREFIX):
        return ours
    if ours.endswith("encoder_layer_scalar"):
        return ENCODER + ours.replace("encoder_layer_scalar", "layer_scalar")
    return DECODER + ours


def tied_name(published: str) -> str | None:
    """The tensor that a published tensor duplicates, if it may be a duplicate.

    `lm_head` duplicates the embedding; the encoder's text weights, except its layer scalars, duplicate the decoder's.
    """
    if published == "lm_head.weight":
        return DECODER + "embed_tokens.weight"
    if published.startswith(ENCODER) and not published.endswith("layer_scalar"):
        return DECODER + published.removeprefix(ENCODER)
    return None
