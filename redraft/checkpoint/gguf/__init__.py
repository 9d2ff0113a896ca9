"""GGUF files: a whole checkpoint in one file, as llama.cpp and Ollama use it. Only reading; of DiffusionGemma only.

blocks.py      the number formats: bytes of blocks -> numbers or packed codes
header.py      metadata and list of tensors of a mapped file
settings.py    metadata -> ModelConfig and SamplerConfig
vocabulary.py  metadata -> Tokenizer
weights.py     quantized weights, converted a few rows at a time
tensors.py     names of the file -> published names
checkpoint.py  all of it: open_gguf
"""

from redraft.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf, open_gguf
from redraft.checkpoint.gguf.tensors import GgufTensors, StoredTensor

__all__ = ["GgufCheckpoint", "GgufTensors", "StoredTensor", "is_gguf", "open_gguf"]
