"""GGUF files: a whole checkpoint in one file, as llama.cpp and Ollama use it. Only reading. DiffusionGemma, and
Llama, Mistral, Qwen2 and Qwen3.

blocks.py            the number formats: bytes of blocks -> numbers or packed codes
header.py            metadata and list of tensors of a mapped file
values.py            single settings of the metadata
llama_settings.py    metadata -> LlamaConfig and SamplerConfig
settings.py          metadata -> ModelConfig and SamplerConfig
vocabulary_kinds.py  the kinds of vocabulary
vocabulary.py        metadata -> Tokenizer
weights.py           quantized weights, converted a few rows at a time
tensors.py           names of the file -> published names, for DiffusionGemma
llama_tensors.py     the same for Llama, Mistral, Qwen2 and Qwen3
checkpoint.py        all of it: open_gguf
"""

from redraft.checkpoint.gguf.checkpoint import GgufCheckpoint, is_gguf, open_gguf
from redraft.checkpoint.gguf.tensors import GgufTensors, StoredTensor

__all__ = ["GgufCheckpoint", "GgufTensors", "StoredTensor", "is_gguf", "open_gguf"]
