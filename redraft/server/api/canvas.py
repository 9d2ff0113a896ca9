"""Our own wire: a canvas as it is redrafted, token by token, with what the model believes; steered, and taken up again.

    /v1/canvas                a text continued, a conversation answered, holes filled
    /v1/canvas/edit           a text redrafted in place
    /v1/canvas/sudoku         a board
    /v1/canvas/decide         how likely each of some answers is, from one pass
    /v1/canvas/left-to-right  the same weights one token after another, for comparison

All answer with events: begin, then frame, token or board, page, and at last end. What a run was is in what was asked: to
take it up at a step, it is asked for again with a turn there, and the frames up to it are left out.
"""

import mmap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from fastapi import Request
from fastapi.responses import JSONResponse, Response

from redraft import checkpoint
from redraft.constraints.constraints import ConstraintEdit, Constraints
from redraft.diffusion.autoregressive import generate_autoregressive
from redraft.diffusion.generate import Committed, Draft, Finished, Stats
from redraft.engine import Intervention, Replay, Stopped
from redraft.kernels.backend import select_dtype
from redraft.model.kv_cache import KVCache
from redraft.server.completion import Frames, Refused, continued, heated, message_of
from redraft.server.schema import (
    CanvasEditRequest,
    CanvasRequest,
    DecideRequest,
    Fixed,
    Place,
    Resumed,
    SpokenRequest,
    SudokuRequest,
    Watched,
)
from redraft.server.service import Route, Service, read, sse, timings_of, unless_gone
from redraft.tasks import infill
from redraft.tasks.edit import Edited, stream_edit
from redraft.tasks.infill import Filled, Infiller
from redraft.tasks.sudoku import board as boards
from redraft.tasks.sudoku import solve
from redraft.tasks.sudoku.solve import Solution
from redraft.tokenizer.chat_parser import Parsed
from redraft.tokenizer.tokenizer import Message, Tokenizer
from redraft.writer import SUDOKU_MODEL, Prompt, TextCommitted, Writer, cut_at_stop, is_text_prompt, new_seed, to_messages

Told = Iterator[dict[str, Any]]
ONE_OF_THEM = "give a prompt, messages, or a text with holes: one of them"
LONGEST = 32  # tokens of a hole whose length is to be found
ALONE = threading.Lock()  # what does not go through the engine has its memory and its passes one after another


# 1. What was asked


def placed(tokenizer: Tokenizer, places: Sequence[Place], what: str) -> list[tuple[int, int]]:
    """Positions and their tokens."""
    found = []
    for place in places:
        if (place.id is None) == (place.text is None):
            raise Refused(f"a place in {what} has an id or a text, at {place.at}", what)
        ids = [place.id] if place.id is not None else tokenizer.encode(place.text)
        if not ids:
            raise Refused(f"the text at {place.at} is empty", what)
        found += [(place.at + number, token) for number, token in enumerate(ids)]
    return found


def steering_of(tokenizer: Tokenizer, body: Fixed, free: Sequence[int] = ()) -> ConstraintEdit:
    """What is fixed, by its tokens."""
    pins, bans = dict(placed(tokenizer, body.pins, "pins")), tuple(placed(tokenizer, body.bans, "bans"))
    return ConstraintEdit(pins=pins, bans=bans, free=tuple(free))


def prompt_of(writer: Writer, body: CanvasRequest | SpokenRequest | DecideRequest) -> str | Sequence[Message]:
    """A text or messages; messages for a model that only continues are a text."""
    if body.messages is None:
        return str(body.prompt)
    messages = [message_of(message) for message in body.messages]
    return messages if writer.tokenizer.can_chat else continued(messages)


def one_of(*given: Any) -> None:
    """Refuses none or several things to write."""
    if sum(one is not None for one in given) != 1:
        raise Refused(ONE_OF_THEM, "prompt")


def watched(writer: Writer, body: Watched) -> dict[str, Any]:
    """Settings of the sampler."""
    return heated(writer.sampler, body.temperature) | ({"max_steps": body.max_steps} if body.max_steps else {})


def page_of(writer: Writer, body: CanvasRequest) -> tuple[Prompt, str, Constraints, dict[str, Any]]:
    """What is read, what is shown before the page, what is fixed on it, and settings."""
    settings = watched(writer, body) | ({"canvas_length": body.canvas_length} if body.canvas_length else {})
    forbidden = tuple(body.forbidden)
    if body.text is None:
        prompt = prompt_of(writer, body)
        shown = prompt if isinstance(prompt, str) else ""
        return prompt, shown, Constraints(forbidden=forbidden), settings | {"max_tokens": body.max_tokens}
    infiller = Infiller(writer.engine, writer.tokenizer)
    before, ids, cfg, constraints = infiller.build_request(
        infill.parse_template(body.text), writer.sampler.changed(**settings)
    )
    settings |= {"canvas_length": cfg.canvas_length, "max_tokens": cfg.max_new_tokens}
    return ids, before, replace(constraints, forbidden=(*constraints.forbidden, *forbidden)), settings


def course_of(tokenizer: Tokenizer, body: Resumed) -> Replay:
    """Pages that are there, and turns, each on top of what held before it."""
    turns = [Intervention(turn.block, turn.step, steering_of(tokenizer, turn, turn.free)) for turn in body.turns]
    return Replay(tuple(map(tuple, body.pages)), tuple(turns))


def since_of(body: Resumed) -> tuple[int, int]:
    """The last frame that is not wanted again."""
    return (body.since.block, body.since.step) if body.since else (-1, 0)


def seed_of(body: Watched | SudokuRequest | SpokenRequest) -> int:
    """The one asked for, or a fresh one."""
    return body.seed if body.seed is not None else new_seed()


# 2. What is told


def asked_told(writer: Writer, body: CanvasRequest, stop: threading.Event) -> Told:
    """Whatever /v1/canvas is asked for."""
    one_of(body.prompt, body.messages, body.text)
    if body.text is None:
        return canvas_told(writer, body, stop)
    for name in ("max_tokens", "draft"):
        if getattr(body, name) is not None:
            raise Refused(f"a text with holes is as long as it is: leave {name} out", name)
    return (holes_told if None in infill.parse_template(body.text).lengths else canvas_told)(writer, body, stop)


def canvas_told(writer: Writer, body: CanvasRequest, stop: threading.Event) -> Told:
    """A text continued, a conversation answered, or holes on one page."""
    seed, tokenizer = seed_of(body), writer.tokenizer
    prompt, before, constraints, settings = page_of(writer, body)
    if body.think and is_text_prompt(prompt):
        raise Refused("only a conversation with a model that chats can be thought about: leave think out", "think")
    constraints = constraints.apply_edit(steering_of(tokenizer, body))
    patterns = {"regex": body.regex, "schema": body.schema_, "choices": body.choices}
    options = {"seed": seed, "constraints": constraints, "replay": course_of(tokenizer, body), "draft": body.draft or None}
    options |= {"think": body.think, "candidates": body.candidates, "drafts": False, "stop": stop, **patterns}
    events = writer.stream(prompt, **options, **settings)
    cfg = writer.sampler.changed(max_new_tokens=settings.pop("max_tokens"), **settings)
    limits = {"canvas_length": cfg.canvas_length, "max_steps": cfg.max_steps, "max_tokens": cfg.max_new_tokens}
    yield begin(writer, seed, before, **limits)
    yield from told(writer, events, body, before if body.text is not None else "")


def costs(stats: Stats) -> dict[str, Any]:
    """What an end says of them."""
    return {"stats": stats, "timings": timings_of([stats])}


def begin(writer: Writer, seed: int, before: str, **more: Any) -> dict[str, Any]:
    """What is known at once."""
    return {"type": "begin", "seed": seed, "before": before, "stops": list(writer.sampler.eos_token_ids), **more}


def told(writer: Writer, events: Iterator[Any], body: CanvasRequest, before: str) -> Told:
    """Events of one answer."""
    frames, whole, last = Frames(writer.tokenizer, everything=True), before, None
    since = since_of(body)
    for event in events:
        match event:
            case Draft() if (event.block, event.step) > since:
                yield frame(frames, event)
            case TextCommitted():
                whole += event.text
                if event.block >= len(body.pages):
                    yield page(writer, event)
                frames = Frames(writer.tokenizer, everything=True)
            case Finished():
                last = event
    if last is None:
        raise Stopped
    stats = last.stats[0]
    yield {"type": "end", "reason": last.reasons[0], "text": whole, **costs(stats)}


def frame(frames: Frames, event: Draft) -> dict[str, Any]:
    """A step of a page: the tokens that are not as they were."""
    found = vars(frames.of(event))
    return {"type": "frame", **{name: value for name, value in found.items() if name != "text"}}


def page(writer: Writer, event: TextCommitted) -> dict[str, Any]:
    """A page that stays: all its tokens, and the texts of those that are the user's."""
    ids = event.ids_BC[0].tolist()
    texts = [writer.tokenizer.token_text(token) for token in ids[: event.shown]]
    found = {"type": "page", "block": event.block, "ids": ids, "texts": texts, "text": event.text}
    return found | {"reasoning": event.reasoning, "settled": bool(event.settled_B[0]), "steps": int(event.steps_B[0])}


def holes_told(writer: Writer, body: CanvasRequest, stop: threading.Event) -> Told:
    """Holes of which some have no length: they are filled one after another, and a block is a hole."""
    steering = (body.pages, body.turns, body.pins, body.bans, body.forbidden, body.since, body.canvas_length, body.think)
    if any(steering) or body.regex or body.schema_ or body.choices:
        raise Refused("only holes of a known length can be steered or obey: mark each as [[ 8 ]]", "text")
    template, seed, began = infill.parse_template(body.text), seed_of(body), time.perf_counter()
    cfg = writer.sampler.changed(**watched(writer, body))
    infiller = Infiller(writer.engine, writer.tokenizer)
    events = infiller.stream(template, cfg, seed=seed, stop=stop, candidates=body.candidates, longest=LONGEST)
    events = chain([next(events)], events)  # what cannot be done is told before anything else
    yield begin(writer, seed, template.texts[0], max_steps=cfg.max_steps, canvas_length=0)
    block, frames = -1, Frames(writer.tokenizer, everything=True)
    for event in events:
        if isinstance(event, Draft):
            if event.step == 1 and event.block == 0:
                block, frames = block + 1, Frames(writer.tokenizer, everything=True)
            yield frame(frames, replace(event, block=block))
            continue
        (found,) = event
        stats = filled_stats(writer, found, template, time.perf_counter() - began)
        lengths = [len(writer.tokenizer.encode(hole)) for hole in found.gaps]
        more = {"holes": found.gaps, "texts": template.texts, "lengths": lengths, **costs(stats)}
        yield {"type": "end", "reason": "stop", "text": found.text, **more}


def filled_stats(writer: Writer, found: Filled, template: infill.Template, seconds: float) -> Stats:
    """What a fill cost."""
    new = sum(len(writer.tokenizer.encode(hole)) for hole in found.gaps)
    around = sum(len(writer.tokenizer.encode(text)) for text in template.texts)
    holes = len(found.gaps)
    return Stats(found.seed, around, new, holes, holes if found.settled else 0, found.forwards, 0, seconds, 0.0)


def edit_told(writer: Writer, body: CanvasEditRequest, stop: threading.Event) -> Told:
    """A text redrafted in place; a block is a page of it."""
    seed, began, tokenizer = seed_of(body), time.perf_counter(), writer.tokenizer
    asked = tokenizer.encode_chat(to_messages(f"{body.instruction}\n\n{body.text}")) if body.instruction else []
    cfg = writer.sampler.changed(**watched(writer, body))
    options = {"strength": body.strength, "keep": body.keep, "prompt": asked, "seed": seed, "stop": stop}
    options |= {"candidates": body.candidates, "replay": course_of(tokenizer, body)}
    events = stream_edit(writer.engine, tokenizer, body.text, cfg, **options)
    events = chain([next(events)], events)  # what cannot be done is told before anything else
    yield begin(writer, seed, "", max_steps=cfg.max_steps, canvas_length=cfg.canvas_length)
    frames, since, pages, settled = Frames(tokenizer, everything=True), since_of(body), 0, 0
    for event in events:
        match event:
            case Draft() if (event.block, event.step) > since:
                yield frame(frames, event)
            case Committed():
                frames, redrafted = Frames(tokenizer, everything=True), int(event.steps_B[0]) > 0
                pages, settled = pages + redrafted, settled + (redrafted and bool(event.settled_B[0]))
                ids = event.ids_BC[0].tolist()
                parsed = Parsed(tokenizer.decode_fragment(ids))
                yield page(writer, TextCommitted.from_committed(event, parsed, shown=len(ids)))
            case Edited():
                changes = [{"start": one.start, "end": one.end, "old": one.old, "new": one.new} for one in event.changes]
                read, seconds = len(tokenizer.encode(body.text)), time.perf_counter() - began
                new = sum(len(tokenizer.encode(change.new)) for change in event.changes)
                stats = Stats(seed, read, new, pages, settled, event.forwards, 0, seconds, 0.0)
                yield {"type": "end", "reason": "stop", "text": event.text, "changes": changes, **costs(stats)}


def spoken_told(writer: Writer, body: SpokenRequest, stop: threading.Event) -> Told:
    """Token after token."""
    one_of(body.prompt, body.messages)
    prompt, seed = prompt_of(writer, body), seed_of(body)
    ids, limit, tokenizer = writer.encode_prompt(prompt), writer.model.config.max_position_embeddings, writer.tokenizer
    if len(ids) + body.max_tokens > limit:
        raise Refused(f"{len(ids)} tokens and {body.max_tokens} more do not fit the context of {limit}", "max_tokens")
    room(writer, len(ids) + body.max_tokens, "max_tokens")
    heat = 1.0 if body.temperature is None else body.temperature
    yield begin(writer, seed, prompt if isinstance(prompt, str) else "")
    said: list[int] = []
    with ALONE:
        began = time.perf_counter()
        for token in generate_autoregressive(
            writer.model, ids, body.max_tokens, temperature=heat * writer.sampler.t_min, seed=seed
        ):
            if stop.is_set():
                raise Stopped
            said.append(token)
            yield {"type": "token", "id": token, "t": tokenizer.token_text(token)}
    shown, stopped = cut_at_stop(said, writer.sampler, len(said))
    taken, text = time.perf_counter() - began, tokenizer.decode(shown)
    stats = Stats(seed, len(ids), len(said), 0, 0, 0, len(said), taken, 0.0)  # causal passes, no denoising steps
    yield {"type": "end", "reason": "stop" if stopped else "length", "text": text, **costs(stats)}


def decided(writer: Writer, body: DecideRequest, stop: threading.Event) -> Told:
    """Answers and their probabilities, the likeliest first."""
    one_of(body.prompt, body.messages)
    prompt, seed, began = prompt_of(writer, body), body.seed or 0, time.perf_counter()
    room(writer, size := len(writer.encode_prompt(prompt)), "prompt")
    with ALONE:
        found = writer.decide(prompt, body.choices, seed=seed, stop=stop)
    yield begin(writer, seed, prompt if isinstance(prompt, str) else "")
    stats = Stats(seed, size, 0, 1, 1, 1, 0, time.perf_counter() - began, 0.0)
    shares = [{"text": text, "probability": share} for text, share in sorted(found.items(), key=lambda pair: -pair[1])]
    yield {"type": "end", "reason": "stop", "text": shares[0]["text"], "choices": shares, **costs(stats)}


def room(writer: Writer, tokens: int, field: str) -> None:
    """Refuses more context than fits beside what the engine has."""
    taken = KVCache.count_bytes(writer.model.config, tokens, writer.model.dtype)
    if taken > writer.engine.scheduler.budget // 10:
        raise Refused(f"{tokens} tokens take more memory than is left beside the engine: shorten {field}", field)


class Boards:
    """The model for boards: the one that is served if it is such a one, else the one in the package, when first needed."""

    def __init__(self, writer: Writer) -> None:
        self._model, self._sampler, self._device = writer.model, writer.sampler, writer.model.device

    def told(self, body: SudokuRequest, stop: threading.Event) -> Told:
        """A puzzle, pass by pass: the board that was tried last, and which of its cells are accepted."""
        puzzle, seed = boards.given(body.puzzle), seed_of(body)
        with ALONE:
            self._load()
            yield {"type": "begin", "seed": seed, "puzzle": list(puzzle), "before": "", "stops": []}
            options = {"seed": seed, "canvases": body.canvases, "check": body.check}
            if body.left_to_right:
                events = solve.in_reading_order(self._model, puzzle, seed=seed)
            else:
                events = solve.solve(self._model, [puzzle], self._sampler, **options)
            for event in events:
                if stop.is_set():
                    raise Stopped
                if isinstance(event, solve.Pass):
                    board, sure = event.boards_NC[-1].tolist(), event.accepted_NC[-1].int().tolist()
                    tried = {"attempt": event.tries[-1], "canvases": len(event.tries), "step": event.step}
                    yield {"type": "board", **tried, "board": board, "accepted": sure, "clashing": clashes(board, sure)}
                else:
                    yield {"type": "end", **solved(event)}

    def _load(self) -> None:
        if solve.fits(self._model):
            return
        folder = checkpoint.find(SUDOKU_MODEL)
        self._sampler = checkpoint.read_sampler_config(folder, checkpoint.read_model_config(folder))
        self._model = checkpoint.load_model(folder, dtype=select_dtype(self._device), device=self._device)


def clashes(board: Sequence[int], sure: Sequence[int]) -> list[int]:
    """Accepted cells that contradict one another."""
    return sorted(boards.clashing(tuple(digit if kept else 0 for digit, kept in zip(board, sure, strict=True))))


def solved(event: Solution) -> dict[str, Any]:
    """What became of a puzzle."""
    names = ("solved", "settled", "at_first", "canvases", "forwards", "revisions", "seed")
    text, seconds = boards.line(event.board), round(event.seconds, 4)
    return {"reason": "stop", "text": text, "board": list(event.board), "seconds": seconds} | {
        name: getattr(event, name) for name in names
    }


def held_bytes(device: torch.device) -> dict[str, int | None]:
    """Memory that this process holds now, and on the GPU, if there is one; None where it cannot be asked for."""
    on_device = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return {"process": pages * mmap.PAGESIZE, "device": on_device}
    except OSError:
        return {"process": None, "device": on_device}


# 3. Routes


def routes(service: Service) -> list[Route]:
    """All of them."""
    one = CanvasRoutes(service)
    return [
        Route("/v1/canvas", one.canvas, CanvasRequest),
        Route("/v1/canvas/edit", one.edit, CanvasEditRequest),
        Route("/v1/canvas/sudoku", one.sudoku, SudokuRequest),
        Route("/v1/canvas/decide", one.decide, DecideRequest),
        Route("/v1/canvas/left-to-right", one.spoken, SpokenRequest),
    ]


class CanvasRoutes:
    """What the paths do."""

    def __init__(self, service: Service) -> None:
        self.service, self.boards = service, Boards(service.writer)

    async def canvas(self, request: Request) -> Response:
        """POST /v1/canvas."""
        body = await read(request, CanvasRequest)
        return await self._answered(request, body.stream, lambda stop: asked_told(self.service.writer, body, stop))

    async def edit(self, request: Request) -> Response:
        """POST /v1/canvas/edit."""
        body = await read(request, CanvasEditRequest)
        return await self._answered(request, body.stream, lambda stop: edit_told(self.service.writer, body, stop))

    async def sudoku(self, request: Request) -> Response:
        """POST /v1/canvas/sudoku."""
        body = await read(request, SudokuRequest)
        return await self._answered(request, body.stream, lambda stop: self.boards.told(body, stop))

    async def decide(self, request: Request) -> Response:
        """POST /v1/canvas/decide."""
        body = await read(request, DecideRequest)
        return await self._answered(request, body.stream, lambda stop: decided(self.service.writer, body, stop))

    async def spoken(self, request: Request) -> Response:
        """POST /v1/canvas/left-to-right."""
        body = await read(request, SpokenRequest)
        return await self._answered(request, body.stream, lambda stop: spoken_told(self.service.writer, body, stop))

    async def _answered(self, request: Request, stream: bool, work: Callable[[threading.Event], Told]) -> Response:
        found = self._counted(self.service.worker.items(work))
        if not stream:
            return JSONResponse({"events": [event async for event in unless_gone(request, found)]})
        return sse(self._parts(await anext(found), found))

    async def _counted(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        async with aclosing(events):
            async for event in events:
                if (stats := event.pop("stats", None)) is not None:
                    self.service.count(stats)
                if event["type"] == "end":
                    event["memory"] = held_bytes(self.service.writer.model.device)
                yield event

    async def _parts(self, first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        yield first
        try:
            async with aclosing(rest):
                async for event in rest:
                    yield event
        except (RuntimeError, ValueError) as failure:  # it has begun: the status cannot be changed any more
            yield {"type": "error", "error": {"message": str(failure)}}
