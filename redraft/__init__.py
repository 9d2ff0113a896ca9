"""redraft runs text-diffusion language models: a page of random tokens is redrafted, all at once, until it settles.

    import redraft
    writer = redraft.load()  # the small model that comes along; or load("FOLDER"), load("OWNER/NAME")
    print(writer.write("Once upon a time"))

This page lists what is public. `redraft.generate` is where to start reading.
"""

import warnings

from redraft.checkpoint import CheckpointError, save
from redraft.config import ConfigError, ModelConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Finished, Stats
from redraft.tasks.edit import Change, Edited, Suggestion
from redraft.tasks.infill import Filled
from redraft.tokenizer.chat_parser import Parsed, ToolCall
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError
from redraft.writer import Answer, Writer, load
from redraft.writer import TextCommitted as Committed
from redraft.writer import TextDraft as Draft

__all__ = [
    "Answer",
    "Change",
    "CheckpointError",
    "Committed",
    "ConfigError",
    "Constraints",
    "Draft",
    "Edited",
    "Filled",
    "Finished",
    "ModelConfig",
    "Parsed",
    "SamplerConfig",
    "Stats",
    "Suggestion",
    "Tokenizer",
    "TokenizerError",
    "ToolCall",
    "Writer",
    "load",
    "save",
]
__version__ = "0.1.0"

# On processors without bf16 torch multiplies in another way and shows a trace of its insides; `load` says it in a sentence.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
