"""POST /v1/canvas/autoregressive: the same weights one token after another, for comparison.

It is exact mode without drafts, so the engine runs it in a batch with the other requests.
"""

import threading

from redraft.diffusion.generate import Finished
from redraft.engine import Stopped
from redraft.server.api.canvas.events import Events, begin_event, check_one_input, end_event, prompt_of, seed_of
from redraft.server.checks import causal_settings, choose_check
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.schema import AutoregressiveRequest
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.text_events import TextCommitted
from redraft.writer import Writer


def stream_autoregressive(writer: Writer, body: AutoregressiveRequest, stop: threading.Event) -> Events:
    """Yields an event for every token."""
    check_one_input(body.prompt, body.messages)
    seed = seed_of(body.seed)
    with checking_request():
        prompt = prompt_of(writer, body)
        prompt_tokens = len(writer.encode_prompt(prompt, stop=stop))
        limit = writer.model.config.max_position_embeddings
        if prompt_tokens + body.max_tokens > limit:
            message = f"{prompt_tokens} prompt tokens and max_tokens {body.max_tokens} do not fit the context of {limit}"
            raise BadRequestError(message, "max_tokens")
        options = GenerationOptions(
            seed=seed,
            check="exact",
            temperature=temperature_of(writer, body),
            max_tokens=body.max_tokens,
            drafts=False,
            stop=stop,
            # There is no canvas: the KV cache holds the prompt and the answer, and nothing beyond.
            sampler={"draft_length": 0, "canvas_length": body.max_tokens, **causal_settings(body)},
        )
        events = writer.stream(prompt, options)
    yield begin_event(writer, seed, prompt if isinstance(prompt, str) else "")
    text = ""
    finished: Finished | None = None
    for event in events:
        if isinstance(event, TextCommitted):
            text += event.text
            for token in event.ids_BC[0].tolist():
                yield {"type": "token", "id": token, "t": writer.tokenizer.token_text(token)}
        elif isinstance(event, Finished):
            finished = event
    if finished is None:
        raise Stopped
    yield end_event(finished.reasons[0], text, finished.stats[0])


def temperature_of(writer: Writer, body: AutoregressiveRequest) -> float | None:
    """The causal half's temperature. Beside a model that is not checked, the field is a factor of the schedule's t_min."""
    if choose_check(writer.sampler, body.check) != "off":
        return body.temperature
    scale = 1.0 if body.temperature is None else body.temperature
    return scale * writer.sampler.t_min  # 0 is greedy
