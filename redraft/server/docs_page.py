"""GET /docs: every route with the fields of its body, as one HTML page. It needs no scripts and loads nothing.

FastAPI's own page loads Swagger UI from another machine, which our pages do not do and which fails offline.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fastapi.responses import HTMLResponse, Response

from redraft.server.page import HEADERS

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
h2 { font-size: 1.1rem; margin-top: 2rem; border-top: 1px solid color-mix(in srgb, currentColor 25%, transparent);
     padding-top: 1rem; overflow-wrap: anywhere; }
nav ul { columns: 18rem; padding-left: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; }
"""

# What the fields mean that several routes share. A field that is not here says its meaning by its name.
MEANINGS = {
    "model": "a model, an adapter or an alias that the server has; without one, its first model",
    "messages": "the conversation, oldest message first",
    "prompt": "the text to continue, or its token ids; several where a list is allowed",
    "suffix": "the text after the gap: infill instead of continuing",
    "max_tokens": "the most tokens of the completion",
    "max_completion_tokens": "the same as max_tokens",
    "max_output_tokens": "the most tokens of the response",
    "n_predict": "the most tokens of the completion; -1: as the model has it",
    "temperature": "in checked and exact mode that of the causal half; with check off a scale on the model's schedule",
    "top_p": "keeps the likeliest tokens up to this share of probability; checked and exact mode",
    "top_k": "keeps so many of the likeliest tokens; checked and exact mode",
    "min_p": "keeps tokens with at least this share of the likeliest one's probability; checked and exact mode",
    "repetition_penalty": "divides the odds of tokens that were used; checked and exact mode",
    "repeat_penalty": "the same as repetition_penalty",
    "check": "off, checked or exact: whether the causal half verifies what the denoiser drafts",
    "tolerance": "nats by which a draft may be less likely than the likeliest token; checked mode",
    "seed": "the same seed gives the same text",
    "stop": "texts at which the completion is cut",
    "stop_sequences": "texts at which the completion is cut",
    "stream": "sends the completion in pieces",
    "n": "how many completions of each prompt",
    "best_of": "how many completions to compare; the n likeliest are returned",
    "logit_bias": "added to the logits of tokens, by id; -100 forbids one",
    "logprobs": "adds the probabilities of the tokens",
    "top_logprobs": "how many likely tokens come with each token",
    "tools": "functions that the model may call",
    "tool_choice": "none, auto, required, or one tool by its name; a forced call always matches the tool's schema",
    "response_format": "text, json_object, json_schema, regex or choice: the completion always matches",
    "output_config": "output_config.format is a JSON schema: the answer always matches",
    "text": "for /v1/responses, text.format is the response format; for the canvas, a text with gaps [[ ]]",
    "prediction": "a text that the first canvas starts from",
    "diffusing": "sends every denoising step",
    "diffusion_canvas_length": "tokens that are denoised together",
    "diffusion_max_steps": "the most denoising steps of a canvas",
    "diffusion_seed_canvas": "token ids that the first canvas starts from",
    "diffusion_pinned": "positions of diffusion_seed_canvas that do not change",
    "diffusion_read_only": "one canvas is the whole completion",
    "thinking": "lets the model reason before it answers, if its chat template can",
    "think": "lets the model reason before it answers, if its chat template can",
    "reasoning_effort": "anything but none lets the model reason before it answers",
    "echo": "sends the prompt before the completion",
    "input": "a text, or the items of a conversation",
    "instructions": "the system message",
    "content": "the text",
    "tokens": "the token ids",
}


def docs_handler(openapi: Callable[[], dict[str, Any]]) -> Callable[[], Any]:
    """Returns the handler of GET /docs. The page is written when it is first asked for."""
    pages: list[str] = []

    async def docs() -> Response:
        if not pages:
            pages.append(write_page(openapi()["paths"]))
        return HTMLResponse(pages[0], headers=HEADERS)

    return docs


def write_page(paths: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes the page from the paths of an OpenAPI description."""
    routes = [(method.upper(), path, entry) for path, methods in paths.items() for method, entry in methods.items()]
    contents = "".join(f'<li><a href="#{anchor_of(m, p)}"><code>{m} {escape(p)}</code></a></li>' for m, p, _ in routes)
    sections = "".join(write_route(method, path, entry) for method, path, entry in routes)
    intro = (
        "Bodies are JSON. Unknown fields are ignored, and the response header <code>x-redraft-unknown-fields</code> names "
        "them. An error is JSON with one sentence. <a href='/openapi.json'><code>/openapi.json</code></a> has the same for "
        "programs, and <a href='/'>the web page</a> shows the canvas."
    )
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>redraft: API</title><style>{STYLE}</style></head><body><main>'
        f"<h1>redraft: API</h1><p>{intro}</p><nav><ul>{contents}</ul></nav>{sections}</main></body></html>"
    )


def anchor_of(method: str, path: str) -> str:
    """Returns the name of a route's section."""
    return escape((method + path.replace("/", "-")).replace("{", "").replace("}", ""))


def write_route(method: str, path: str, entry: Mapping[str, Any]) -> str:
    """Writes the section of one route."""
    heading = f'<h2 id="{anchor_of(method, path)}"><code>{method} {escape(path)}</code></h2>'
    content = entry.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    if schema is None:
        return heading
    required = schema.get("required", ())
    rows = "".join(write_field(name, field, name in required) for name, field in schema.get("properties", {}).items())
    table = f"<table><thead><tr><th>field</th><th>type</th><th>meaning</th></tr></thead><tbody>{rows}</tbody></table>"
    return f'{heading}<p>{escape(schema.get("description", ""))}</p><div class="wide" tabindex="0">{table}</div>'


def write_field(name: str, schema: Mapping[str, Any], is_required: bool) -> str:
    """Writes the row of one field."""
    notes = [MEANINGS[name]] if name in MEANINGS else []
    if is_required:
        notes.append("required")
    elif schema.get("default") not in (None, False, [], {}):
        notes.append(f"default {schema['default']}")
    kind = escape(describe_type(schema))
    return f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{escape('; '.join(notes))}</td></tr>"


def describe_type(schema: Mapping[str, Any]) -> str:
    """Says in words what a JSON schema allows."""
    if "anyOf" in schema:
        kinds = [describe_type(branch) for branch in schema["anyOf"] if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {describe_type(schema.get('items', {}))}{describe_bounds(schema, 'minItems', 'maxItems')}"
    names = ("minLength", "maxLength") if kind == "string" else ("minimum", "maximum")
    return f"{kind}{describe_bounds(schema, *names)}"


def describe_bounds(schema: Mapping[str, Any], low: str, high: str) -> str:
    """Says in words between which bounds a number or a length lies."""
    unit = {"maxItems": " entries", "maxLength": " characters"}.get(high, "")
    # FastAPI has made a float of every bound.
    bounds: Sequence[str] = [f"{schema[name]:,}".removesuffix(".0") if name in schema else "" for name in (low, high)]
    if abs(schema.get(high, 0)) >= 2**62:
        return ""
    match bounds:
        case ["", ""]:
            return ""
        case [_, ""]:
            return f", from {bounds[0]}{unit}"
        case ["", _]:
            return f", at most {bounds[1]}{unit}"
    return f", {bounds[0]} to {bounds[1]}{unit}"
