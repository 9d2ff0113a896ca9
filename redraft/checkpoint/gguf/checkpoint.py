"""A GGUF file as a checkpoint: the parts that a folder has in several files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from redraft.checkpoint.gguf.header import GgufFile, read_gguf
from redraft.checkpoint.gguf.llama_tensors import LlamaTensors
from redraft.checkpoint.gguf.settings import check_architecture, parse_model_settings, parse_sampler_settings
from redraft.checkpoint.gguf.tensors import GgufTensors, StoredTensor
from redraft.checkpoint.gguf.vocabulary import read_tokenizer
from redraft.checkpoint.names import CheckpointError
from redraft.config import BackboneConfig, LlamaConfig, ModelConfig, SamplerConfig
from redraft.tokenizer.tokenizer import Tokenizer

SUFFIX = ".gguf"


def is_gguf(path: str | Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == SUFFIX


@dataclass(frozen=True)
class GgufCheckpoint:
    """An open file: its settings are read, its tensors and its tokenizer are read when they are asked for."""

    file: GgufFile
    config: BackboneConfig
    sampler: SamplerConfig

    def tensors(self, device: torch.device | str = "cpu") -> Mapping[str, StoredTensor]:
        """The tensors by published name, checked against the settings; numbers are converted on the device."""
        if isinstance(self.config, LlamaConfig):
            return LlamaTensors(self.file, self.config, device)
        assert isinstance(self.config, ModelConfig)
        return GgufTensors(self.file, self.config, device)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer with its chat template."""
        tokenizer = read_tokenizer(self.file.path, self.file.metadata)
        if tokenizer.size > self.config.vocab_size:
            raise CheckpointError(
                f"{self.file.path} has {tokenizer.size} tokens, but the model has a vocabulary of {self.config.vocab_size}"
            )
        return tokenizer


def open_gguf(path: str | Path) -> GgufCheckpoint:
    """Reads the header of a file and its settings."""
    file = read_gguf(path, lambda metadata: check_architecture(Path(path), metadata))
    config = parse_model_settings(file)
    return GgufCheckpoint(file, config, parse_sampler_settings(file, config))
