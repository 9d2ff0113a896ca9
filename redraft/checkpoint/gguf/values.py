"""Single settings of a GGUF file's metadata."""

from typing import Any

import numpy as np

from redraft.checkpoint.gguf.header import GgufFile
from redraft.config import ConfigError

EMBEDDING = "token_embd.weight"
ROPE_FREQUENCIES = "rope_freqs.weight"


def require_setting(file: GgufFile, name: str) -> Any:
    """The setting of this name of the file's architecture."""
    key = f"{file.metadata['general.architecture']}.{name}"
    if key not in file.metadata:
        raise ConfigError(f"the metadata has no {key}, and redraft assumes no value")
    return as_written(file.metadata[key])


def as_written(value: Any) -> Any:
    """A float32 of the file as the shortest decimal number that it stands for: 1e-06, and not 9.999999974752427e-07."""
    if not isinstance(value, float) or float(np.float32(value)) != value:
        return value
    return float(str(np.float32(value)))


def read_embedding_rows(file: GgufFile) -> int:
    """The size of the vocabulary."""
    if EMBEDDING not in file.tensors:
        raise ConfigError(f"there is no tensor {EMBEDDING}")
    return file.tensors[EMBEDDING].shape[0]
