"""POST /v1/canvas/autoregressive: the same weights one token after another, for comparison."""

import threading
import time

from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.generate import Stats
from redraft.engine import Stopped
from redraft.server.api.canvas.events import Events, begin_event, check_one_input, end_event, prompt_of, seed_of
from redraft.server.api.canvas.exclusive import check_cache_fits, exclusive
from redraft.server.errors import BadRequestError, checking_request
from redraft.server.schema import AutoregressiveRequest
from redraft.writer import Writer, cut_at_stop


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
        check_cache_fits(writer, len(ids) + body.max_tokens, "max_tokens")
    scale = 1.0 if body.temperature is None else body.temperature
    temperature = scale * writer.sampler.t_min  # 0 is greedy
    yield begin_event(writer, seed, prompt if isinstance(prompt, str) else "")
    generated: list[int] = []
    with exclusive(stop):
        began = time.perf_counter()
        for token in generate_autoregressive(writer.model, ids, body.max_tokens, temperature=temperature, seed=seed):
            if stop.is_set():
                raise Stopped
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
