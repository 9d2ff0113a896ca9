"""Names: files of a checkpoint, and one table between our tensor names and the published ones.

Our names are the published ones without their prefix. The encoder's layer scalars are the only text weights that exist twice.
"""

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
REDRAFT_CONFIG = "redraft.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DECODER = "model.decoder."
ENCODER = "model.encoder.language_model."
VISION = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be found or read; the message names the file or tensor."""


def published_name(ours: str) -> str:
    """The table: our name of a tensor -> the published one."""
    if ours.endswith("encoder_layer_scalar"):
        return ENCODER + ours.replace("encoder_layer_scalar", "layer_scalar")
    return DECODER + ours


def tied_name(published: str) -> str | None:
    """The tensor that a duplicate repeats: lm_head is the embedding, the encoder's text weights are the decoder's."""
    if published == "lm_head.weight":
        return DECODER + "embed_tokens.weight"
    if published.startswith(ENCODER) and not published.endswith("layer_scalar"):
        return DECODER + published.removeprefix(ENCODER)
    return None
