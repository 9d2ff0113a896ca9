"""What clients may send, field by field. Fields nobody knows are passed over; those that cannot be honoured are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Temperature = Annotated[float, Field(ge=0, le=2)]
Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Likely = Annotated[int, Field(ge=0, le=20)]  # tokens told beside one of the answer
Ending = Annotated[str, Field(max_length=2000)]
Stop = Ending | Annotated[list[Ending], Field(max_length=64)] | None


class Body(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(extra="allow", strict=False)
    model: str | None = None


class StreamOptions(Body):
    """How a stream is told."""

    include_usage: bool = False
    include_frames: bool = False


class Canvas(Body):
    """A canvas's own settings, under vLLM's names."""

    diffusion_canvas_length: Annotated[int, Field(ge=1, le=4096)] | None = None
    diffusion_max_steps: Annotated[int, Field(ge=1, le=4096)] | None = None
    diffusion_seed_canvas: Annotated[list[int], Field(max_length=4096)] | None = None  # tokens to start from
    diffusion_pinned: Annotated[list[int], Field(max_length=4096)] | None = None  # places of it that stay
    diffusion_read_only: bool = False  # one canvas is the whole answer, and nothing ends it
    diffusion_constrained: bool = False


class Sampling(Canvas):
    """How an answer is drawn."""

    temperature: Temperature | None = None
    top_p: float | None = None
    top_k: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Seed | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    diffusing: bool = False  # frames of the denoising itself
    vllm_xargs: dict[str, Any] | None = None  # where vLLM's own clients put these
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_json: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None


class FunctionCall(Body):
    """A call in a message."""

    name: str
    arguments: str | dict[str, Any] = ""


class Call(Body):
    """A tool call in a message."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class PredictedOutput(Body):
    """A text that the answer is expected to be like."""

    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2048)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=256)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Likely | None = None
    prediction: PredictedOutput | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions and /v1/fim/completions."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=64)]
    suffix: str | None = None
    max_tokens: Tokens | None = None
    logprobs: bool | Likely | None = None
    echo: bool = False
    best_of: int | None = None


class EditRequest(Body):
    """POST /v1/edit/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=64)]
    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    seed: Seed | None = None
    stream: bool = False


class Extra(Body):
    """Another file, read before."""

    text: str = ""
    filename: str | None = None


class InfillRequest(Body):
    """POST /infill, as llama.cpp's editors send it. Samplers that a canvas does not have (top_k ...) are not read."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[Extra], Field(max_length=256)] = []
    prompt: str = ""
    n_predict: Annotated[int, Field(ge=-1, le=100_000)] = 128
    n_indent: Annotated[int, Field(ge=0, le=1000)] = 0
    n_cmpl: Annotated[int, Field(ge=1, le=16)] = 1
    stop: Stop = None
    seed: Seed | None = None
    temperature: Temperature | None = None
    t_max_predict_ms: Annotated[float, Field(ge=0)] | None = None
    response_fields: list[str] | None = None
    id_slot: int = 0
    stream: bool = False


Count = Annotated[int, Field(ge=0, le=1_000_000)]
Some = Annotated[int, Field(ge=1, le=4096)]


class Place(Body):
    """A token at a position of the answer, by its id or its text; a text of several tokens takes the places behind too."""

    at: Count
    id: Count | None = None
    text: Annotated[str, Field(max_length=200)] | None = None


class Fixed(Body):
    """What is fixed on a canvas."""

    pins: Annotated[list[Place], Field(max_length=512)] = []
    bans: Annotated[list[Place], Field(max_length=512)] = []  # what shall not stand at a position


class TurnRequest(Fixed):
    """What else is fixed from behind a step of a page on."""

    block: Count
    step: Count
    free: Annotated[list[Count], Field(max_length=4096)] = []  # positions that are pinned or banned no longer


class Since(Body):
    """A step of a page."""

    block: Count
    step: Count


class Watched(Body):
    """What is redrafted before somebody's eyes."""

    seed: Seed | None = None
    temperature: Temperature | None = None
    max_steps: Some | None = None
    candidates: Annotated[int, Field(ge=1, le=20)] = 5  # likeliest tokens shown everywhere
    stream: bool = True


class Resumed(Watched):
    """A run that may have been under way: pages it had committed, turns it took, and the last frame that was seen."""

    pages: Annotated[list[Annotated[list[Count], Field(max_length=4096)]], Field(max_length=4096)] = []
    turns: Annotated[list[TurnRequest], Field(max_length=64)] = []
    since: Since | None = None  # frames up to this one are not wanted


class CanvasRequest(Resumed, Fixed):
    """POST /v1/canvas: one of prompt, messages and text, which has holes."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2048)] | None = None
    text: str | None = None
    max_tokens: Tokens | None = None
    canvas_length: Some | None = None
    think: bool = False
    forbidden: Annotated[list[Count], Field(max_length=4096)] = []
    regex: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    choices: Annotated[list[str], Field(max_length=4096)] | None = None
    draft: str | Annotated[list[Count], Field(max_length=4096)] | None = None  # what the first page starts from


class CanvasEditRequest(Resumed):
    """POST /v1/canvas/edit."""

    text: str
    instruction: str | None = None
    strength: Annotated[float, Field(ge=0, le=1)] = 0.3
    keep: Annotated[list[tuple[Count, Count]], Field(max_length=4096)] = []


class SudokuRequest(Body):
    """POST /v1/canvas/sudoku."""

    puzzle: Annotated[str, Field(max_length=4000)]
    seed: Seed | None = None
    canvases: Annotated[int, Field(ge=1, le=256)] = 64
    check: bool = True
    left_to_right: bool = False  # cell after cell instead, for comparison
    stream: bool = True


class SpokenRequest(Body):
    """POST /v1/canvas/left-to-right."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2048)] | None = None
    max_tokens: Tokens = 256
    temperature: Temperature | None = None
    seed: Seed | None = None
    stream: bool = True


class DecideRequest(Body):
    """POST /v1/canvas/decide."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=2048)] | None = None
    choices: Annotated[list[Annotated[str, Field(max_length=100)]], Field(max_length=32)]
    seed: Seed | None = None
    stream: bool = True
