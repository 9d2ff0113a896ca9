"""Builds the model of a configuration: DiffusionGemma or Llama."""

from redraft.config import BackboneConfig, LlamaConfig, ModelConfig
from redraft.model.backbone import Backbone
from redraft.model.diffusion_gemma import DiffusionGemma
from redraft.model.llama import Llama


def build_model(config: BackboneConfig) -> Backbone:
    """A model of this shape. Its weights are not set."""
    if isinstance(config, LlamaConfig):
        return Llama(config)
    assert isinstance(config, ModelConfig)
    return DiffusionGemma(config)
