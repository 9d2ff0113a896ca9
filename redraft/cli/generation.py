"""Options of the commands that generate an answer (`redraft "prompt"`, `redraft chat`), and the record made of them.

An option that has no effect in the mode of the answer is refused: the user asked for something and would not get it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from redraft.cli.options import name_flags, option, parse_float, parse_int
from redraft.config import AUTO, SamplerConfig

if TYPE_CHECKING:
    from redraft.tasks.generation import GenerationOptions


def parse_canvas_length(text: str) -> Any:
    """Parses a number of tokens, or the word auto."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number, nor auto") from None


MaxTokens = Annotated[
    int | None,
    option("--max-tokens", "-n", "--max-new-tokens", help="Maximum tokens to generate. [checkpoint's]", parser=parse_int),
]
Check = Annotated[
    str | None,
    typer.Option(
        "--check",
        help="off, checked or exact: whether the model's causal half checks what its denoiser drafts, token by token. "
        "checked corrects unlikely tokens; exact gives the text of autoregressive sampling. [checkpoint's]",
        metavar="MODE",
    ),
]
LeftToRight = Annotated[
    bool,
    typer.Option("--left-to-right", help="The causal half alone writes, one token after another, without a canvas."),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help="checked: a draft is kept if it is at most this much less likely than the likeliest token. [checkpoint's]",
        parser=parse_float,
        metavar="NATS",
    ),
]
BestOf = Annotated[
    int,
    option(
        "--best-of", help="Generate this many answers and print the one the causal half finds likeliest.", parser=parse_int
    ),
]
Steps = Annotated[
    int | None,
    option(
        "--max-denoising-steps",
        "--steps",
        "--diffusion-steps",
        help="Maximum denoising steps per canvas; with --check checked, steps of its draft. [checkpoint's]",
        parser=parse_int,
    ),
]
Bound = Annotated[
    float | None,
    option("--entropy-bound", help="Total entropy (nats) that one step accepts. [checkpoint's]", parser=parse_float),
]
Temperature = Annotated[
    float | None,
    option(
        "--temperature",
        "--temp",
        help="Temperature of the causal half; 0 takes the likeliest token. With --check off, a scale on the checkpoint's "
        "schedule: 1 leaves it, 0 is nearly greedy. [checkpoint's]",
        parser=parse_float,
    ),
]
TopK = Annotated[
    int | None, option("--top-k", help="Checked, exact: only this many likeliest tokens; 0 is all.", parser=parse_int)
]
TopP = Annotated[
    float | None, option("--top-p", help="Checked, exact: only the likeliest tokens of this total.", parser=parse_float)
]
MinP = Annotated[
    float | None,
    option("--min-p", help="Checked, exact: no token below this share of the likeliest one's.", parser=parse_float),
]
RepetitionPenalty = Annotated[
    float | None,
    option("--repetition-penalty", help="Checked, exact: above 1, tokens seen before are less likely.", parser=parse_float),
]
CanvasLength = Annotated[
    str | None,
    typer.Option(
        "--canvas-length",
        help="Tokens per canvas, or auto: the shortest of several that holds the answer. [auto where the checkpoint was "
        "trained at several, else the checkpoint's]",
        parser=parse_canvas_length,
        metavar="INT|auto",
    ),
]
Think = Annotated[bool, typer.Option("--think/--no-think", help="Let the model reason before it answers.")]

FLAGS = {  # by the settings that they set
    "max_tokens": "--max-tokens",
    "max_new_tokens": "--max-tokens",
    "max_steps": "--steps",
    "draft_steps": "--steps",
    "entropy_bound": "--entropy-bound",
    "canvas_length": "--canvas-length",
    "t_min": "--temperature",
    "t_max": "--temperature",
    "temperature": "--temperature",
    "check": "--check",
    "tolerance": "--tolerance",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "best_of": "--best-of",
    "seed": "--seed",
}
CAUSAL_SETTINGS = ("top_k", "top_p", "min_p", "repetition_penalty")  # how the causal half picks a token
CANVAS_SETTINGS = {"max_steps": "steps", "entropy_bound": "entropy-bound", "canvas_length": "canvas-length"}


def build_options(base: SamplerConfig, *, left_to_right: bool = False, **given: Any) -> GenerationOptions:
    """The options of an answer, on the settings of a checkpoint: fields of GenerationOptions and SamplerConfig, None unless
    the user gave them.

    Raises ValueError for a value that no mode takes, and for a setting that the mode of the answer does not use.
    """
    from redraft.tasks.generation import GenerationOptions

    given = {name: value for name, value in given.items() if value is not None}
    if left_to_right:
        if "check" in given:
            raise ValueError(
                f"--left-to-right drafts nothing, so there is nothing to check: leave out --check {given['check']}"
            )
        given |= {"check": "exact", "draft_length": 0}
    if "max_steps" in given:
        given["draft_steps"] = given["max_steps"]  # checked mode denoises a canvas with as many steps
    with name_flags(FLAGS):
        options = GenerationOptions.from_keywords(**given)
        check = options.sampler_config(base).check
    mode = "--left-to-right" if left_to_right else f"--check {check}"
    for name in CAUSAL_SETTINGS:
        if name in given and check == "off":
            flag = name.replace("_", "-")
            raise ValueError(
                f"--{flag} is for the causal half, which --check off does not use: try --check exact or checked"
            )
    if "tolerance" in given and check != "checked":
        raise ValueError(f"--tolerance is for --check checked, but this answer has {mode}")
    for name, flag in CANVAS_SETTINGS.items():
        if name in given and check == "exact":
            raise ValueError(f"--{flag} is for a canvas, and {mode} has none: leave it out, or try --check checked")
    return options
