"""Chat templates: rendered in jinja2's sandbox, with the extensions and functions that transformers gives to templates.

A template that comes with a checkpoint is a stranger's program. The sandbox keeps it from files and from Python; a helper
process limits its time and memory, and its output has a limit too. Helper processes also render long conversations of our
own template, chat.jinja; short ones are rendered here. There are two, of which a client has one at most.
A module of its own because jinja2 takes long to import and many uses of a tokenizer render no conversation.
"""

import json
import threading
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from redraft.tokenizer.helper_pool import HelperPool
from redraft.tokenizer.helper_process import HelperMemoryError, HelperProcess, HelperTimeoutError, answer_calls

MODULE = "redraft.tokenizer.chat_template"  # what the helper process runs
RENDER_SECONDS = 5.0
RENDERERS = 2
MAX_OUTPUT = 16_000_000  # characters; more than a request's body can hold


class TemplateError(ValueError):
    """A template that cannot be rendered; the message says why."""


def render_own(source: str, variables: Mapping[str, Any]) -> str:
    """Renders a template that ships with redraft, in this process."""
    try:
        return compile_template(source).render(variables)
    except Exception as error:  # a template is a program and can fail in any way
        raise TemplateError(str(error)) from None


def count_values(value: Any, most: int) -> int:
    """The values that a value holds, at all levels, a long text counted by its thousands; stops counting at `most`."""
    total = 0
    waiting = [value]
    while waiting and total <= most:
        value = waiting.pop()
        total += 1 + (len(value) // 1000 if isinstance(value, str) else 0)
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return total


def render_foreign(source: str, variables: Mapping[str, Any], stop: threading.Event | None = None) -> str:
    """Renders a checkpoint's template, or a long conversation, in a helper process, within its limits."""
    message = json.dumps({"source": source, "variables": variables}, default=_to_json).encode()
    try:
        with _renderers().lend(stop) as renderer:
            answer = json.loads(renderer.call(message, stop))
    except HelperTimeoutError:
        raise TemplateError(f"it takes longer than {RENDER_SECONDS:g} s") from None
    except HelperMemoryError:
        raise TemplateError("it needs more memory than a template may use") from None
    if "error" in answer:
        raise TemplateError(answer["error"])
    return answer["text"]


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which encloses the assistant's tokens for training. Here its content is plain text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an instance variable)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    """Compiles a chat template. Cached: compiling takes longer than rendering."""
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=1)
def _renderers() -> HelperPool[HelperProcess]:
    return HelperPool(lambda: HelperProcess(MODULE, seconds=RENDER_SECONDS), RENDERERS)


def _to_json(value: Any) -> Any:
    """What json does not know: other mappings and sequences, and values that only have a text."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if hasattr(value, "__iter__") else str(value)


def answer_render_call(message: bytes) -> bytes:
    """In the helper process: renders one template."""
    call = json.loads(message)
    try:
        pieces = []
        room = MAX_OUTPUT
        for piece in compile_template(call["source"]).generate(call["variables"]):
            room -= len(piece)
            if room < 0:
                raise TemplateError(f"it writes more than {MAX_OUTPUT:,} characters")
            pieces.append(piece)
        return json.dumps({"text": "".join(pieces)}).encode()
    except MemoryError:
        raise
    except Exception as error:  # a template is a program and can fail in any way
        return json.dumps({"error": str(error)[:2000]}).encode()


if __name__ == "__main__":
    answer_calls(answer_render_call)
