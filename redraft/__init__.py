"""Run text-diffusion language models: a canvas of random tokens is denoised, all positions at once, until it settles.

    import redraft
    writer = redraft.load()  # the small packaged model; or load("FOLDER"), load("OWNER/NAME")
    print(writer.write("Once upon a time"))

This file lists the public names. To read the code, start with `redraft/diffusion/generate.py`.
"""

import warnings

from redraft.checkpoint import CheckpointError, save
from redraft.config import ConfigError, ModelConfig, SamplerConfig
from redraft.constraints.constraints import Constraints
from redraft.diffusion.generate import Finished, Stats
from redraft.tasks.edit import Change, Edited, Suggestion
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.infill import Filled
from redraft.tasks.text_events import TextCommitted as Committed
from redraft.tasks.text_events import TextDraft as Draft
from redraft.tokenizer.chat_parser import Parsed, ToolCall
from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError
from redraft.writer import Answer, Writer, load

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
    "GenerationOptions",
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

# On a CPU without bf16, torch falls back to another matmul and warns with an internal trace. `load` logs one sentence.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
