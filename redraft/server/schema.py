"""Request bodies, field by field.

Unknown fields are ignored and named in a response header; fields that cannot be honoured are a bad request. Lists have a
limit, and their validation ends at the first mistake (`fail_fast`): a list of millions of mistakes would take seconds.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from redraft.config import DEFAULT_EDIT_STRENGTH
from redraft.tasks.generation import MAX_BEST_OF


def refuse_boolean(value: Any) -> Any:
    """Refuses true and false where a number is meant; pydantic would read them as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, got {value}", {"value": str(value).lower()})
    return value


NOT_BOOLEAN = BeforeValidator(refuse_boolean)
ListedInteger = Annotated[int, Field(strict=True)]  # of a list that may be long: checked without a call for each
Temperature = Annotated[float, Field(ge=0, le=2), NOT_BOOLEAN]
Tokens = Annotated[int, Field(ge=1, le=1_000_000), NOT_BOOLEAN]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), NOT_BOOLEAN]
TopLogprobs = Annotated[int, Field(ge=0, le=20), NOT_BOOLEAN]  # likely tokens that come with each token
Parts = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=4096)]  # of a message's content
Content = Annotated[  # of a message: the mistake that is reported is that of the kind the client has sent
    Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")],
    Discriminator(
        lambda value: {str: "text", list: "parts"}.get(type(value)),
        custom_error_type="content",
        custom_error_message="Input should be a text or a list of parts",
    ),
]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), NOT_BOOLEAN]  # of the probability
Penalty = Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False), NOT_BOOLEAN]
Check = Literal["off", "checked", "exact"]
Tolerance = Annotated[float, Field(ge=0, le=10_000, allow_inf_nan=False), NOT_BOOLEAN]  # nats
Count = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
TokenIds = Annotated[list[Count], Field(fail_fast=True, min_length=1)]


def choose_prompt_kind(value: Any) -> str | None:
    """Which kind of prompt a value is by its first item; None if it is none."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list) or not value:
        return None
    return {str: "texts", int: "ids", list: "lists"}.get(type(value[0]))


TextPrompts = Annotated[  # a text or its token ids, or several
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=64), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=64), Tag("lists")],
    Discriminator(
        choose_prompt_kind,
        custom_error_type="prompt",
        custom_error_message="Input should be a text, a list of texts, token ids, or lists of token ids",
    ),
]
StopString = Annotated[str, Field(max_length=2000)]
Stop = StopString | Annotated[list[StopString], Field(fail_fast=True, max_length=64)] | None


class Body(BaseModel):
    """Fields that all bodies share."""

    model_config = ConfigDict(extra="allow", strict=False)
    model: str | None = None


class CausalOptions(Body):
    """Checked and exact mode: which of them, and how the causal half picks tokens in them."""

    check: Check | None = None  # None: as the checkpoint has it
    tolerance: Tolerance | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000), NOT_BOOLEAN] | None = None  # 0 and -1: all tokens
    min_p: Share | None = None
    repetition_penalty: Penalty | None = None


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_frames: bool = False


class CanvasOptions(Body):
    """Settings of the canvas, under vLLM's names."""

    diffusion_canvas_length: Annotated[int, Field(ge=1, le=4096), NOT_BOOLEAN] | Literal["auto"] | None = None
    diffusion_max_steps: Annotated[int, Field(ge=1, le=4096), NOT_BOOLEAN] | None = None
    diffusion_settle_prefix: bool | None = None  # not vLLM's: text that settles from the left is final at once
    diffusion_seed_canvas: Annotated[list[ListedInteger], Field(fail_fast=True, max_length=4096)] | None = (
        None  # token ids the first canvas starts from
    )
    diffusion_pinned: Annotated[list[ListedInteger], Field(fail_fast=True, max_length=4096)] | None = (
        None  # positions of it that do not change
    )
    diffusion_read_only: bool = False  # one canvas is the whole completion; stop tokens are forbidden
    diffusion_constrained: bool = False


class CanvasFields(CanvasOptions):
    """Settings of the canvas in the body of a request, or under `vllm_xargs`, where vLLM's own clients put them."""

    vllm_xargs: dict[str, Any] | None = None


class SamplingOptions(CanvasFields, CausalOptions):
    """How a completion is sampled."""

    temperature: Temperature | None = None
    repeat_penalty: Penalty | None = None  # llama.cpp's name of the repetition penalty
    frequency_penalty: Annotated[float, Field(allow_inf_nan=False), NOT_BOOLEAN] | None = None
    presence_penalty: Annotated[float, Field(allow_inf_nan=False), NOT_BOOLEAN] | None = None
    seed: Seed | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1, le=16), NOT_BOOLEAN] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_BEST_OF), NOT_BOOLEAN] | None = None  # the n likeliest are returned
    logit_bias: dict[str, Any] | None = None  # token id -> number; checked where it is used
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False  # stream a frame per denoising step
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True, max_length=4096)] | None = None
    guided_json: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class FunctionCall(Body):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCallRequest(Body):
    """A tool call in a message."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallRequest], Field(fail_fast=True, max_length=256)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class PredictedOutput(Body):
    """A text that the completion is expected to resemble."""

    type: Literal["content"] = "content"
    content: Content


class ChatRequest(SamplingOptions):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=2048)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prediction: PredictedOutput | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(SamplingOptions):
    """POST /v1/completions and /v1/fim/completions."""

    prompt: TextPrompts
    suffix: str | None = None
    max_tokens: Tokens | None = None
    logprobs: bool | TopLogprobs | None = None
    echo: bool = False


class EditRequest(Body):
    """POST /v1/edit/completions."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=64)]
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    stream: bool = False


class ExtraFile(Body):
    """Another file, prefilled before the prefix."""

    text: str = ""
    filename: str | None = None


class InfillRequest(Body):
    """POST /infill, as llama.cpp's editors send it. Options of autoregressive samplers (top_k ...) are ignored."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True, max_length=256)] = []
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1, le=100_000), NOT_BOOLEAN] = 128
    n_indent: Annotated[int, Field(ge=0, le=1000), NOT_BOOLEAN] = 0
    n_cmpl: Annotated[int, Field(ge=1, le=16), NOT_BOOLEAN] = 1
    stop: Stop = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    t_max_predict_ms: Annotated[float, Field(ge=0), NOT_BOOLEAN] | None = None
    response_fields: Annotated[list[str], Field(fail_fast=True, max_length=64)] | None = None
    check: Check | None = None  # infill is never checked: anything but "off" is a bad request
    tolerance: Tolerance | None = None
    stream: bool = False


CanvasSize = Annotated[int, Field(ge=1, le=4096), NOT_BOOLEAN]
Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=2048)]


class PositionedToken(Body):
    """A token at a position of the completion, by id or by text. A text of several tokens takes the next positions too."""

    position: Count
    id: Count | None = None
    text: Annotated[str, Field(max_length=200)] | None = None


class ConstraintFields(Body):
    """Pins and bans."""

    pins: Annotated[list[PositionedToken], Field(fail_fast=True, max_length=512)] = []
    bans: Annotated[
        list[PositionedToken], Field(fail_fast=True, max_length=512)
    ] = []  # tokens that must not stand at a position


class InterventionRequest(ConstraintFields):
    """Pins and bans that hold after a step of a canvas."""

    block: Count
    step: Count
    free: Annotated[list[Count], Field(fail_fast=True, max_length=4096)] = []  # positions that lose their pins and bans


class CanvasStep(Body):
    """A step of a canvas."""

    block: Count
    step: Count


class WatchedRequest(Body):
    """Fields of every request that streams frames."""

    seed: Seed | None = None
    temperature: Temperature | None = None
    max_steps: CanvasSize | None = None
    candidates: Annotated[int, Field(ge=1, le=20), NOT_BOOLEAN] = 5  # likeliest tokens shown at every position
    stream: bool = True


class ReplayRequest(WatchedRequest):
    """A run that may be resumed: its committed canvases, its interventions, and the last step the client has seen."""

    canvases: Annotated[
        list[Annotated[list[Count], Field(fail_fast=True, max_length=4096)]], Field(fail_fast=True, max_length=4096)
    ] = []
    interventions: Annotated[list[InterventionRequest], Field(fail_fast=True, max_length=64)] = []
    resume_at: CanvasStep | None = None  # frames up to this step are not sent again


class CanvasRequest(ReplayRequest, ConstraintFields, CausalOptions):
    """POST /v1/canvas: one of prompt, messages, and text with gaps."""

    prompt: str | None = None
    messages: Messages | None = None
    text: str | None = None
    max_tokens: Tokens | None = None
    canvas_length: CanvasSize | None = None
    think: bool = False
    forbidden: Annotated[list[Count], Field(fail_fast=True, max_length=4096)] = []
    regex: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    choices: Annotated[list[str], Field(fail_fast=True, max_length=4096)] | None = None
    draft: str | Annotated[list[Count], Field(fail_fast=True, max_length=4096)] | None = (
        None  # what the first canvas starts from
    )


class CanvasEditRequest(ReplayRequest):
    """POST /v1/canvas/edit."""

    text: str
    instruction: str | None = None
    strength: Annotated[float, Field(ge=0, le=1), NOT_BOOLEAN] = DEFAULT_EDIT_STRENGTH
    keep: Annotated[list[tuple[Count, Count]], Field(fail_fast=True, max_length=4096)] = []


class SudokuRequest(Body):
    """POST /v1/canvas/sudoku."""

    puzzle: Annotated[str, Field(max_length=4000)]
    seed: Seed | None = None
    canvases: Annotated[int, Field(ge=1, le=256), NOT_BOOLEAN] = 64
    check: bool = True
    autoregressive: bool = False  # cell after cell, for comparison
    stream: bool = True


class AutoregressiveRequest(CausalOptions):
    """POST /v1/canvas/autoregressive. `check` says which mode it is compared with: `temperature` has the meaning of that."""

    prompt: str | None = None
    messages: Messages | None = None
    max_tokens: Tokens = 256
    temperature: Temperature | None = None
    seed: Seed | None = None
    stream: bool = True


class DecideRequest(Body):
    """POST /v1/canvas/decide."""

    prompt: str | None = None
    messages: Messages | None = None
    choices: Annotated[list[Annotated[str, Field(max_length=100)]], Field(fail_fast=True, max_length=32)]
    seed: Seed | None = None
    stream: bool = True
