"""POST /v1/canvas/autoregressive: the same weights one token after another, for comparison."""

import threading
import time
from collections.abc import Iterator
from itertools import islice

from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.generate import Stats
from redraft.engine import Engine
from redraft.server.api.canvas.events import Events, begin_event, check_one_input, end_event, prompt_of, seed_of
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.schema import AutoregressiveRequest
from redraft.writer import Writer, cut_at_stop

TOKENS_PER_TURN = 8  # between two steps of the engine
COST_PER_TOKEN = 32  # a forward of one token reads all weights and costs about as much as one of 32 tokens


def stream_autoregressive(writer: Writer, body: AutoregressiveRequest, stop: threading.Event) -> Events:
    """Yields an event for every token."""
    check_one_input(body.prompt, body.messages)
    seed = seed_of(body.seed)
    with checking_request():
        prompt = prompt_of(writer, body)
        ids = writer.encode_prompt(prompt)
        limit = writer.model.config.max_position_embeddings
        if len(ids) + body.max_tokens > limit:
            message = f"{len(ids)} prompt tokens and max_tokens {body.max_tokens} do not fit the context of {limit}"
            raise BadRequestError(message, "max_tokens")
    scale = 1.0 if body.temperature is None else body.temperature
    temperature = scale * writer.sampler.t_min  # 0 is greedy
    yield begin_event(writer, seed, prompt if isinstance(prompt, str) else "")
    generated: list[int] = []
    if not ids:
        raise BadRequestError("a prompt needs at least one token", "prompt")
    with writer.engine.reserve(len(ids) + body.max_tokens, stop=stop) as cache:
        began = time.perf_counter()
        writer.engine.prefill_beside(ids[:-1], cache, stop)
        tokens = generate_autoregressive(
            writer.model, ids, body.max_tokens, temperature=temperature, seed=seed, cache=cache, cached=len(ids) - 1
        )
        for token in take_turns(writer.engine, tokens, stop):
            generated.append(token)
            yield {"type": "token", "id": token, "t": writer.tokenizer.token_text(token)}
    shown, stopped = cut_at_stop(generated, writer.sampler, len(generated))
    stats = Stats(
        seed=seed,
        prompt_tokens=len(ids),
        new_tokens=len(generated),
        canvases=0,
        settled=0,
        steps=0,
        commits=len(generated),  # causal forwards
        seconds=time.perf_counter() - began,
        prefill_seconds=0.0,
    )
    yield end_event("stop" if stopped else "length", writer.tokenizer.decode(shown), stats)


def take_turns(engine: Engine, tokens: Iterator[int], stop: threading.Event) -> Iterator[int]:
    """Generates tokens between the engine's steps, a few at a time."""
    while True:
        with engine.take_turn(TOKENS_PER_TURN * COST_PER_TOKEN, stop):
            some = list(islice(tokens, TOKENS_PER_TURN))
        if not some:
            return
        yield from some
