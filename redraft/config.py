"""Configuration records: ModelConfig, EngineConfig and SamplerConfig. They are frozen and refuse values that cannot run.

`ModelConfig()` and `SamplerConfig()` without arguments describe the released 26B-A4B checkpoint. The package `checkpoint`
reads them from published files and writes them. The last section reads and writes single files: an untrusted file can
neither stall its reader nor fill the memory, and a killed writer leaves the old content or the new.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TextIO

COLDEST_TEMPERATURE_SCALE = 0.02  # of the checkpoint's schedule; a temperature of 0 means this
SLIDING = "sliding_attention"
FULL = "full_attention"
RELEASED_LAYERS = ((SLIDING,) * 5 + (FULL,)) * 5

# transformers always builds a vision tower, at full size when `vision_config` is missing. This is the smallest it accepts.
SMALLEST_VISION: dict[str, Any] = {
    "model_type": "gemma4_vision",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "position_embedding_size": 1,
}


# The largest values that ModelConfig takes, far above those of any model that exists. A file with larger ones is refused
# before anything is built from it.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "num_experts": 2**14,
    "top_k_experts": 2**14,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "num_global_key_value_heads": 2**12,
    "head_dim": 2**14,
    "global_head_dim": 2**14,
    "canvas_length": 2**20,
}
LARGEST_DRAFT_HEAD = 2**16
MOST_LAYERS = 10_000
MOST_LENGTHS = 64
MAX_FILE_BYTES = 64 * 2**20  # of a file that is read whole; Gemma's tokenizer.json has half of it


class ConfigError(ValueError):
    """A configuration cannot be run. The message names the value and, where there is one, the way out."""


def show_value(value: Any) -> str:
    """A value as an error message shows it: a long one is cut, since it may come from an untrusted file."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def require_int(name: str, value: Any, low: int = 1, high: int = 2**31 - 1) -> int:
    """Returns the value if it is a whole number from `low` to `high`, else raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {show_value(value)}")
    return value


def require_number(name: str, value: Any, low: float = 0.0) -> float:
    """Returns the value if it is a finite number above `low`, else raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= 1e30:
        raise ConfigError(f"{name} must be a number above {low:g}, got {show_value(value)}")
    return float(value)


def require_range(name: str, value: Any, low: float, high: float) -> float:
    """Returns the value if it is a number from `low` to `high`, else raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {show_value(value)}")
    return float(value)


def require_object(name: str, value: Any) -> Mapping[str, Any]:
    """Returns the value if it is a JSON object, an empty one for None, else raises ConfigError."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be an object, got {show_value(value)}")
    return value or {}


def require_ids(name: str, value: Any, vocab_size: int = 2**31) -> tuple[int, ...]:
    """Returns the token ids, given as one id or as a list of them, else raises ConfigError."""
    ids = value if isinstance(value, list | tuple) else (value,)
    return tuple(require_int(name, token, 0, vocab_size - 1) for token in ids)


def require_lengths(name: str, value: Any) -> tuple[int, ...]:
    """Returns the lengths, shortest first, if the value is a list of whole numbers above 0, else raises ConfigError."""
    if not isinstance(value, list | tuple) or len(value) > MOST_LENGTHS:
        raise ConfigError(f"{name} must be a list of at most {MOST_LENGTHS} lengths, got {show_value(value)}")
    return tuple(sorted({require_int(name, length) for length in value}))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a DiffusionGemma model. Full layers always share keys and values; every layer has experts.

    A causal-only model (a standard Gemma 4 checkpoint) is the same stack without self-conditioning and without the
    denoiser's layer scalars; it has no canvas, so `canvas_length` means nothing there.
    """

    vocab_size: int = 262_144
    hidden_size: int = 2816
    intermediate_size: int = 2112  # of the dense MLP beside the experts and of the self-conditioning MLP
    moe_intermediate_size: int = 704
    num_experts: int = 128
    top_k_experts: int = 8
    layer_types: tuple[str, ...] = RELEASED_LAYERS
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    num_global_key_value_heads: int = 2
    head_dim: int = 256
    global_head_dim: int = 512
    sliding_window: int = 1024
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    global_rotary_fraction: float = 0.25
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float = 30.0
    max_position_embeddings: int = 262_144
    canvas_length: int = 256
    pad_token_id: int = 0
    bos_token_id: int = 2
    eos_token_ids: tuple[int, ...] = (1, 106)
    image_token_ids: tuple[int, int, int] = (255_999, 258_880, 258_882)  # begin of image, image, end of image
    is_causal_only: bool = False  # it has no denoiser: it only writes left to right
    draft_head_size: int = 0  # inner size of the draft head; 0: the model has none
    quant: str | None = None  # "fp8": compressed-tensors' layout, weights scaled by channel, activations by token
    vision: Mapping[str, Any] = field(default_factory=lambda: dict(SMALLEST_VISION), repr=False)  # stored, never run

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name == "draft_head_size":
                require_int(f.name, self.draft_head_size, 0, LARGEST_DRAFT_HEAD)
            elif f.type is int and not f.name.endswith("token_id"):
                require_int(f.name, getattr(self, f.name), 1, LARGEST.get(f.name, 2**31 - 1))
            elif f.type is float:
                require_number(f.name, getattr(self, f.name))
        if self.is_causal_only and self.draft_head_size:
            raise ConfigError(f"a causal-only model drafts nothing, but draft_head_size is {self.draft_head_size}")
        require_int("sliding_window", self.sliding_window, 2)  # a window of 1 would leave the cache of a layer empty
        if not self.layer_types or any(kind not in (SLIDING, FULL) for kind in self.layer_types):
            raise ConfigError(f"layer_types may hold {SLIDING!r} and {FULL!r}, got {show_value(self.layer_types)}")
        require_int("num_hidden_layers", len(self.layer_types), 1, MOST_LAYERS)
        if self.layer_types[-1] != FULL:
            raise ConfigError(f"the last layer must be {FULL!r}, got {self.layer_types[-1]!r}")
        for heads in (self.num_key_value_heads, self.num_global_key_value_heads):
            if self.num_attention_heads % heads:
                raise ConfigError(f"{self.num_attention_heads} attention heads cannot share {heads} key-value heads evenly")
        if self.head_dim % 2 or self.global_head_dim % 2:
            raise ConfigError(f"head sizes must be even for RoPE, got {self.head_dim} and {self.global_head_dim}")
        if self.top_k_experts > self.num_experts:
            raise ConfigError(f"top_k_experts is {self.top_k_experts}, but there are only {self.num_experts} experts")
        if self.global_rotary_fraction > 1:
            raise ConfigError(f"partial_rotary_factor must be at most 1, got {self.global_rotary_fraction!r}")
        require_ids("pad_token_id", self.pad_token_id, self.vocab_size)
        require_ids("bos_token_id", self.bos_token_id, self.vocab_size)
        require_ids("eos_token_id", self.eos_token_ids, self.vocab_size)
        require_ids("image token ids", self.image_token_ids)
        if not self.eos_token_ids:
            raise ConfigError("eos_token_id is empty; a model needs at least one stop token")

    @property
    def num_hidden_layers(self) -> int:
        """The number of layers."""
        return len(self.layer_types)

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of a layer; None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def layer_heads(self, layer: int) -> tuple[int, int]:
        """Key-value heads and head size of a layer."""
        if self.layer_types[layer] == SLIDING:
            return self.num_key_value_heads, self.head_dim
        return self.num_global_key_value_heads, self.global_head_dim

    def parameter_counts(self) -> dict[str, int]:
        """The number of weights by part. `active` counts the weights that one token uses in one forward."""
        d = self.hidden_size
        attention = 0
        # Seven norms and two scalars per layer, q and k norms (added below), and two norms outside the layers. A
        # causal-only model has no scalar for the denoiser and no norm for self-conditioning.
        halves = 1 if self.is_causal_only else 2
        norms = self.num_hidden_layers * (7 * d + halves) + halves * d
        for layer in range(self.num_hidden_layers):
            heads, size = self.layer_heads(layer)
            kv = 2 if self.layer_types[layer] == SLIDING else 1
            norms += 2 * size
            attention += 2 * d * self.num_attention_heads * size + kv * d * heads * size
        expert = 3 * d * self.moe_intermediate_size * self.num_hidden_layers
        parts = {
            "embedding": self.vocab_size * d,
            "attention": attention,
            "dense MLP": 3 * d * self.intermediate_size * self.num_hidden_layers,
            "experts": expert * self.num_experts,
            "router": (d * self.num_experts + d + self.num_experts) * self.num_hidden_layers,
            "self-conditioning": 0 if self.is_causal_only else 3 * d * self.intermediate_size,
            "draft head": 3 * d * self.draft_head_size,
            "norms and scalars": norms,
        }
        total = sum(parts.values())
        return parts | {"total": total, "active": total - expert * (self.num_experts - self.top_k_experts)}

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> tuple[int, int]:
        """Cache bytes of one token: in all full layers, and in all sliding layers, which store no more than their window."""
        cost = {SLIDING: 0, FULL: 0}
        for layer, kind in enumerate(self.layer_types):
            heads, size = self.layer_heads(layer)
            cost[kind] += 2 * heads * size * bytes_per_value
        return cost[FULL], cost[SLIDING]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests the engine runs at once, and how much memory their KV caches may use."""

    max_running: int = 8  # requests in one batch
    cache_bytes: int | None = None  # budget for KV caches; None: measured, see Engine
    prefill_chunk: int = 2048  # prompt tokens that one step prefills
    # The prefill chunk of a request that runs alone on a GPU: large products are faster, and no other request has to wait.
    # None: chosen by the GPU's memory, see CudaGraphRunner. Never below prefill_chunk.
    prefill_chunk_alone: int | None = None
    prefix_cache_entries: int = 8  # KV caches of finished requests, kept for prompts that begin alike
    rewind: int = 512  # how many tokens a prefix cache entry can be cut back
    kv: str | None = None  # "fp8": KV caches in 8 bits, half of the memory of bf16; None: as the model says

    def __post_init__(self) -> None:
        for name in ("max_running", "prefill_chunk"):
            require_int(name, getattr(self, name))
        for name in ("prefix_cache_entries", "rewind"):
            require_int(name, getattr(self, name), 0)
        if self.cache_bytes is not None:
            require_int("cache_bytes", self.cache_bytes, 1, 2**63 - 1)
        if self.prefill_chunk_alone is not None:
            require_int("prefill_chunk_alone", self.prefill_chunk_alone, self.prefill_chunk)
        if self.kv not in (None, "fp8"):
            raise ConfigError(f"a KV cache can be stored in fp8 or as the weights are, got {show_value(self.kv)}")


def parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """Token ids with the numbers added to their logits, from pairs or from a JSON object, whose keys are strings."""
    pairs = value.items() if isinstance(value, Mapping) else value
    message = f"logit_bias maps token ids to numbers from -100 to 100, got {show_value(value)}"
    try:
        bias = tuple((int(token), float(number)) for token, number in pairs)
        is_whole = all(float(token) == int(token) for token, _ in pairs)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(message) from None
    if not is_whole or any(token < 0 or not -100 <= number <= 100 for token, number in bias):
        raise ConfigError(message)
    return bias


CHECKS = ("off", "checked", "exact")
DEFAULT_EDIT_STRENGTH = 0.3  # share of the tokens that an edit may replace: the default in Python, CLI and server
AUTO = "auto"  # in place of a canvas length: chosen for the answer
AUTO_LENGTHS = (32, 64, 128)  # that a checkpoint is given on request if it was trained at one length only
MAX_DRAFT_LENGTH = 64


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How tokens are generated. The defaults are those of the released checkpoint.

    The first part says how a canvas is denoised and when it has settled. The second part is for checked and exact mode, in
    which the causal half verifies what the denoiser drafts (docs/verified.md).
    """

    canvas_length: int = 256
    canvas_lengths: tuple[int, ...] = ()  # at which the denoiser was trained: a short answer takes a short canvas
    max_new_tokens: int = 256
    max_steps: int = 48
    entropy_bound: float = 0.1  # nats: summed entropy of the tokens one step accepts, without the last one's own
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1  # steps for which the argmax of the canvas must not change
    confidence_threshold: float = 0.005  # nats: the mean entropy must be strictly below this
    settle_prefix: bool = False  # positions that settle from the left are final at once, before the whole canvas settles
    eos_token_ids: tuple[int, ...] = (1, 106, 50)
    pad_token_id: int = 0
    # For small models, whose entropies exceed the bound (see docs/tour.md). Off for published checkpoints.
    quota: bool = False  # a step accepts at least its share of the open positions, whatever their entropy
    accept_at_end: bool = False  # the last step accepts every position
    spread: int = 0  # of the unsure positions within this distance, a step accepts only the surest; 0 turns it off
    stops_last: bool = False  # stop tokens are accepted after all others
    # Checked and exact mode.
    check: str = "off"  # "checked": drafts that the causal half finds likely are accepted; "exact": only its own choices
    tolerance: float = 2.0  # nats: checked mode accepts a token at most this much less likely than the likeliest one
    draft_length: int = 7  # tokens that one forward drafts; 0: none, so tokens are generated autoregressively
    draft_steps: int = 4  # checked mode: denoising steps that draft a whole canvas before it is verified
    draft_token: int | None = None  # fills the canvases of drafts, if the model was trained so; None: noise
    temperature: float = 1.0  # of the causal half; 0 takes the likeliest token
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit)

    def __post_init__(self) -> None:
        for name in ("canvas_length", "max_new_tokens", "max_steps"):
            require_int(name, getattr(self, name))
        object.__setattr__(self, "canvas_lengths", require_lengths("canvas_lengths", self.canvas_lengths))
        require_int("stability_threshold", self.stability_threshold, 0)
        require_ids("pad_token_id", self.pad_token_id)
        object.__setattr__(self, "eos_token_ids", require_ids("eos_token_ids", self.eos_token_ids))  # JSON gives a list
        require_number("entropy_bound", self.entropy_bound)
        require_number("confidence_threshold", self.confidence_threshold)
        if self.t_min != 0 or isinstance(self.t_min, bool):
            require_number("t_min", self.t_min)
        require_number("temperature (t_max)", self.t_max, 1e-4)  # below this, soft-capped logits overflow
        if self.t_max < self.t_min:
            raise ConfigError(f"t_max must not be below t_min, got {self.t_max} and {self.t_min}")
        require_int("spread", self.spread, 0)
        for name in ("settle_prefix", "quota", "accept_at_end", "stops_last"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._check_verification()

    def _check_verification(self) -> None:
        """Refuses nonsense among the settings of checked and exact mode."""
        if self.check not in CHECKS:
            raise ConfigError(f"check must be off, checked or exact, got {show_value(self.check)}")
        for name in ("tolerance", "temperature"):
            require_range(name, getattr(self, name), 0, 1e4)
        for name in ("top_p", "min_p"):
            require_range(name, getattr(self, name), 0, 1)
        if self.top_p == 0:
            raise ConfigError(f"top_p must be above 0, or no token is left, got {self.top_p!r}")
        require_range("repetition_penalty", self.repetition_penalty, 0.01, 100)
        require_int("top_k", self.top_k, 0)
        require_int("draft_length", self.draft_length, 0, MAX_DRAFT_LENGTH)
        require_int("draft_steps", self.draft_steps, 1)
        if self.draft_token is not None:
            require_ids("draft_token", self.draft_token)
        object.__setattr__(self, "logit_bias", parse_logit_bias(self.logit_bias))

    @property
    def max_canvases(self) -> int:
        """The number of canvases that hold max_new_tokens; the last one may be filled only in part."""
        return -(-self.max_new_tokens // self.canvas_length)

    def fit_canvas(self, tokens: int, room: int) -> "SamplerConfig":
        """Chooses the canvas for an answer of at most `tokens`: the shortest trained length that holds it.

        The canvases of an answer must fit the `room` that the prompt leaves. Where no length does both, it is the longest
        that fits, and the settings stay as they are where none fits.
        """
        shorter = [length for length in self.canvas_lengths if length < self.canvas_length]
        choices = [replace(self, canvas_length=length) for length in (*shorter, self.canvas_length)]
        fitting = [cfg for cfg in choices if cfg.max_answer <= room]
        holding = [cfg for cfg in fitting if cfg.canvas_length >= tokens]
        return (holding[:1] or fitting[-1:] or [self])[0]

    @property
    def max_answer(self) -> int:
        """Positions that an answer may take: whole canvases, or just max_new_tokens in exact mode, which has none."""
        return self.max_new_tokens if self.check == "exact" else self.max_canvases * self.canvas_length

    @property
    def for_drafts(self) -> "SamplerConfig":
        """Checked mode: the settings with which a whole canvas is drafted before it is verified. Nothing of it is final."""
        return replace(self, max_steps=self.draft_steps, settle_prefix=False)

    @property
    def without_filters(self) -> "SamplerConfig":
        """The settings with which the causal half's drafts are sampled: top-k, top-p and min-p would cost time only."""
        return replace(self, top_k=0, top_p=1.0, min_p=0.0)

    def changed(self, **changes: Any) -> "SamplerConfig":
        """Returns a copy with some settings replaced. A value of None leaves a setting unchanged."""
        names = {f.name for f in fields(self)}
        if unknown := sorted(set(changes) - names):
            raise ConfigError(f"unknown sampler setting {unknown[0]!r}; known are {', '.join(sorted(names))}")
        return replace(self, **{k: v for k, v in changes.items() if v is not None})

    def with_temperature(self, scale: float | None) -> "SamplerConfig":
        """Scales the temperature schedule: 1.0 (or None) leaves the checkpoint's own schedule unchanged.

        A scale of 0 asks for greedy sampling. It becomes COLDEST_TEMPERATURE_SCALE, as the sampler divides by temperature.
        """
        if scale is None:
            return self
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 <= scale <= 1e30:
            raise ConfigError(f"temperature scales the checkpoint's schedule and must be a number from 0 up, got {scale!r}")
        if scale == 1:
            return self
        scale = max(scale, COLDEST_TEMPERATURE_SCALE)
        return replace(self, t_min=self.t_min * scale, t_max=self.t_max * scale)


# Files


def require_regular_file(path: str | Path) -> None:
    """Refuses a pipe, a socket, a device or a folder before it is opened: opening a pipe waits for its other end."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, but redraft needs a regular file there")


def read_file(path: str | Path) -> bytes:
    """Reads a regular file of at most MAX_FILE_BYTES."""
    require_regular_file(path)
    with open(path, "rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB, too much for a file of its kind")
    return content


def read_json(path: str | Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    try:
        raw = json.loads(read_file(path).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint folder needs it") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not readable JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not readable JSON: it is nested too deeply") from None
    except ConfigError:
        raise
    except ValueError:  # Python limits the digits of a whole number, and its message is for programmers
        raise ConfigError(f"{path} is not readable JSON: it holds a number with thousands of digits") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a JSON {type(raw).__name__}, not an object")
    return raw


@contextmanager
def replace_file(path: str | Path, *, keep_unfinished: bool = False) -> Iterator[TextIO]:
    """Yields a new text file beside `path`, and renames it to `path` at the end: a reader sees the old or the new file.

    After an exception the old file is as it was. The new one is removed, unless `keep_unfinished` and it has some content.
    A symbolic link stays a link, and permissions stay. A pipe or a device is written directly.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w", encoding="utf-8", newline="") as file:
            yield file
        return
    path = Path(path).resolve()
    part = path.with_name(f".{path.name}.part-{secrets.token_hex(4)}")
    try:
        with open(part, "x", encoding="utf-8", newline="") as file:
            if path.exists():
                shutil.copymode(path, part)  # before anything is written: the old file may be private
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the content, and then the power may fail
        os.replace(part, path)
    except BaseException:
        if not keep_unfinished or not part.stat().st_size:
            part.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Replaces a file as a whole: it has the old or the new content, never a part."""
    with replace_file(path) as file:
        file.write(text)
