"""Run text-diffusion language models: a canvas of random tokens is denoised, all positions at once, until it settles.

    import redraft
    writer = redraft.load()  # the small packaged model; or load("FOLDER"), load("OWNER/NAME")
    print(writer.write("Once upon a time"))

This file lists the public names. A name is imported when it is first used, because PyTorch takes seconds to import and
some parts of redraft (the helper processes of the server) need none of it.
To read the code, start with `redraft/diffusion/generate.py`.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redraft.checkpoint import CheckpointError, save
    from redraft.config import ConfigError, ModelConfig, SamplerConfig
    from redraft.constraints.constraints import Constraints
    from redraft.diffusion.generate import Finished, Stats
    from redraft.tasks.answer import Answer
    from redraft.tasks.edit import Change, Edited, Suggestion
    from redraft.tasks.generation import GenerationOptions
    from redraft.tasks.infill import Filled
    from redraft.tasks.text_events import TextCommitted as Committed
    from redraft.tasks.text_events import TextDraft as Draft
    from redraft.tokenizer.chat_parser import Parsed, ToolCall
    from redraft.tokenizer.tokenizer import Tokenizer, TokenizerError
    from redraft.writer import Writer, load

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

MODULES = {  # where each public name is defined
    "redraft.checkpoint": ("CheckpointError", "save"),
    "redraft.config": ("ConfigError", "ModelConfig", "SamplerConfig"),
    "redraft.constraints.constraints": ("Constraints",),
    "redraft.diffusion.generate": ("Finished", "Stats"),
    "redraft.tasks.answer": ("Answer",),
    "redraft.tasks.edit": ("Change", "Edited", "Suggestion"),
    "redraft.tasks.generation": ("GenerationOptions",),
    "redraft.tasks.infill": ("Filled",),
    "redraft.tasks.text_events": ("TextCommitted", "TextDraft"),
    "redraft.tokenizer.chat_parser": ("Parsed", "ToolCall"),
    "redraft.tokenizer.tokenizer": ("Tokenizer", "TokenizerError"),
    "redraft.writer": ("Writer", "load"),
}
RENAMED = {"Committed": "TextCommitted", "Draft": "TextDraft"}  # public name -> name where it is defined

# On a CPU without bf16, torch falls back to another matmul and warns with an internal trace. `load` logs one sentence.
warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'redraft' has no attribute {name!r}")
    own_name = RENAMED.get(name, name)
    module = next(module for module, names in MODULES.items() if own_name in names)
    globals()[name] = getattr(import_module(module), own_name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
