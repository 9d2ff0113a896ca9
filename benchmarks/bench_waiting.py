"""A step of a busy server, with 0, 16, 64 and 256 requests that wait: milliseconds from one step to the next, and of CPU.

The server's application is called as a web server calls it. Four clients, named by their addresses, each have a request that
runs; the requests that wait are theirs too. The model has the layers of the released one and is otherwise small: what is
timed is what the engine does around a forward. CPU time is that of all threads of the process. Figures are medians, those
of the quickest of some rounds. The last line is JSON.

    python benchmarks/bench_waiting.py [--steps 40] [--rounds 3] [--waiting 0 16 64 256]
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import MutableMapping
from itertools import pairwise
from typing import Any

import torch
from random_weights import random_model

from redraft.config import FULL, SLIDING, EngineConfig, ModelConfig, SamplerConfig
from redraft.server.app import make_app
from redraft.server.server_config import ServerConfig
from redraft.tokenizer.tokenizer import Tokenizer
from redraft.writer import Writer

CLIENTS = 4
CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=32,
    moe_intermediate_size=32,
    num_experts=2,
    top_k_experts=1,
    layer_types=((SLIDING,) * 5 + (FULL,)) * 5,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_global_key_value_heads=1,
    head_dim=16,
    global_head_dim=16,
    sliding_window=64,
    max_position_embeddings=65536,
    eos_token_ids=(1,),
    image_token_ids=(509, 510, 511),
)


def make_writer() -> Writer:
    """A writer whose requests run for longer than they are timed."""
    sampler = SamplerConfig(canvas_length=16, max_steps=16, confidence_threshold=1e-9, eos_token_ids=(1,))
    model = random_model(CONFIG, torch.device("cpu"))
    config = EngineConfig(max_running=CLIENTS, cache_bytes=2**33)
    return Writer(model, Tokenizer.byte_level(["<pad>", "<eos>", "<bos>", "<unk>"]), sampler, config=config)


async def complete(app: Any, client: int) -> None:
    """A completion as a stream, for a client with this address."""
    body = {"prompt": "a", "max_tokens": 60_000, "stream": True, "logit_bias": {"1": -100}}
    sent = False
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": (f"10.0.0.{client}", 1000),
        "server": ("localhost", 80),
    }

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client stays
        sent = True
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("status", 200) != 200:
            raise RuntimeError(f"the server answered {message['status']}")

    await app(scope, receive, send)


async def measure(waiting: int, steps: int) -> tuple[float, float]:
    """Median milliseconds between the beginnings of two steps, and of CPU time."""
    writer = make_writer()
    engine = writer.engine
    app = make_app(writer, ServerConfig(requests=2 * (waiting + CLIENTS), drain_seconds=0.0))
    begins: list[tuple[float, float]] = []
    step = engine.step

    def timed_step() -> Any:
        begins.append((time.perf_counter(), time.process_time()))
        return step()

    async with app.router.lifespan_context(app):
        tasks = [asyncio.create_task(complete(app, number % CLIENTS)) for number in range(CLIENTS + waiting)]
        while len(engine.scheduler.waiting) < waiting or len(engine.scheduler.running) < CLIENTS:
            for task in tasks:
                if task.done():
                    await task  # raises what the server answered
            await asyncio.sleep(0.01)
        engine.step = timed_step  # type: ignore[method-assign]
        while len(begins) <= steps:
            await asyncio.sleep(0.01)
        if len(engine.scheduler.waiting) != waiting:
            raise RuntimeError("a request has ended while steps were timed")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    seconds = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairwise(begins)]
    wall, cpu = (round(1e3 * statistics.median(column), 2) for column in zip(*seconds, strict=True))
    return wall, cpu


def main() -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 16, 64, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(0, 5))  # the first step of a process is slow
    rounds = [{n: asyncio.run(measure(n, options.steps)) for n in options.waiting} for _ in range(options.rounds)]
    result: dict[int, dict[str, float]] = {}
    print(f"{'waiting':>8}{'step, ms':>12}{'CPU, ms':>12}{'times':>8}")
    for waiting in options.waiting:
        wall, cpu = (min(column) for column in zip(*(each[waiting] for each in rounds), strict=True))
        result[waiting] = {"step": wall, "cpu": cpu}
        print(f"{waiting:>8}{wall:>12.2f}{cpu:>12.2f}{cpu / result[options.waiting[0]]['cpu']:>8.2f}")
    print(json.dumps({"bench": "waiting", "clients": CLIENTS, "layers": len(CONFIG.layer_types), "ms": result}))


if __name__ == "__main__":
    main()
