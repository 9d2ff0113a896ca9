"""POST /v1/canvas/decide: the probability of each of several answers, from one forward over a canvas of noise."""

import threading
import time

from redraft.diffusion.generate import Stats
from redraft.server.api.canvas.events import Events, begin_event, check_one_input, end_event, prompt_of
from redraft.server.errors import checking_request
from redraft.server.schema import DecideRequest
from redraft.writer import Writer


def stream_decision(writer: Writer, body: DecideRequest, stop: threading.Event) -> Events:
    """Yields begin and end; the end has the choices, the likeliest first."""
    check_one_input(body.prompt, body.messages)
    began = time.perf_counter()
    seed = body.seed or 0
    with checking_request():
        prompt = prompt_of(writer, body)
        ids = writer.encode_prompt(prompt, stop=stop)
    with checking_request():  # `decide` checks its prompt and makes its one forward in the same call
        probabilities = writer.decide(ids, body.choices, seed=seed, stop=stop)
    yield begin_event(writer, seed, prompt if isinstance(prompt, str) else "")
    ranked = sorted(probabilities.items(), key=lambda pair: -pair[1])
    choices = [{"text": text, "probability": probability} for text, probability in ranked]
    stats = Stats(
        seed=seed,
        prompt_tokens=len(ids),
        new_tokens=0,
        canvases=1,
        settled=1,
        steps=1,
        commits=0,
        seconds=time.perf_counter() - began,
        prefill_seconds=0.0,
    )
    yield end_event("stop", ranked[0][0], stats, choices=choices)
