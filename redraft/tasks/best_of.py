"""Best of N: several answers to one prompt, of which the causal half's likeliest is returned.

The measure is the mean log probability of a token, as for OpenAI's `best_of`: the sum would prefer short answers.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence

from redraft.config import SamplerConfig
from redraft.diffusion.generate import Committed, Draft, Event, Finished
from redraft.engine import Engine, Request, RequestError
from redraft.engine.engine import Stream
from redraft.model.kv_cache import KVCache
from redraft.tasks.generation import GenerationOptions
from redraft.tasks.infill import sequence_logprobs
from redraft.tasks.text_events import EncodedPrompt

SEED_STRIDE = 1_000_003  # between the seeds of two answers to a prompt: prompts of a batch have seeds one apart


def seeds_of(seed: int, best_of: int) -> list[int]:
    """The seeds of the answers; the first is the seed of the answer that would be given without `best_of`."""
    return [seed + number * SEED_STRIDE for number in range(best_of)]


def count_fitting(engine: Engine, tokens: int) -> int:
    """How many KV caches of so many tokens fit the memory budget."""
    nbytes = KVCache.count_bytes(engine.model.config, tokens, engine.model.cache_dtype, engine.config.rewind)
    return engine.scheduler.budget // max(1, nbytes)


def check_memory(engine: Engine, tokens: int, best_of: int) -> None:
    """Refuses more answers than the memory budget holds at once."""
    fitting = count_fitting(engine, tokens)
    if best_of > max(1, fitting):
        raise RequestError(
            f"best_of is {best_of}, but only {fitting} answers of this length fit the memory for KV caches at once: "
            "lower best_of or max_tokens"
        )


def choose_likeliest(
    engine: Engine, prompt: EncodedPrompt, ends: Sequence[Finished], stop: threading.Event | None = None
) -> int:
    """The number of the answer to the prompt whose tokens the causal half finds likeliest on average."""
    if len(ends) == 1:
        return 0
    answers = [end.ids_BT[0, : end.stats[0].new_tokens].tolist() for end in ends]
    totals = [end.stats[0].logprob for end in ends]
    if None in totals:  # not verified, so the causal half has not seen them yet
        totals = list(sequence_logprobs(engine, prompt.ids, answers, stop, prompt.images))
    means = [  # an answer that a deadline has left empty is the last choice
        float(total or 0.0) / len(answer) if answer else -math.inf for total, answer in zip(totals, answers, strict=True)
    ]
    return means.index(max(means))


def choose_answers(
    engine: Engine,
    prompts: Sequence[EncodedPrompt],
    requests: Sequence[Request],
    ends: Mapping[Request, Finished],
    options: GenerationOptions,
) -> Iterator[tuple[Finished, SamplerConfig]]:
    """The end of the likeliest answer to each prompt, and its settings. A prompt has `options.best_of` requests."""
    for number, prompt in enumerate(prompts):
        candidates = requests[number * options.best_of : (number + 1) * options.best_of]
        candidate_ends = [ends[request] for request in candidates]
        best = choose_likeliest(engine, prompt, candidate_ends, options.stop)
        yield candidate_ends[best], candidates[best].cfg


def stream_likeliest(
    engine: Engine, prompt: EncodedPrompt, streams: Sequence[Stream], stop: threading.Event | None = None
) -> Iterator[Event]:
    """Yields the drafts of the first answer as they happen, then the committed canvases and the end of the likeliest one.

    All answers are generated together. The best one is known when the last one is finished.
    """
    committed: list[list[Committed]] = [[] for _ in streams]
    ends: list[Finished] = []
    for number, stream in enumerate(streams):
        for event in stream:
            if isinstance(event, Committed):
                committed[number].append(event)
            elif isinstance(event, Finished):
                ends.append(event)
            elif isinstance(event, Draft) and number == 0:
                yield event
    if len(ends) == len(streams):  # else the request was cancelled
        best = choose_likeliest(engine, prompt, ends, stop)
        yield from committed[best]
        yield ends[best]
