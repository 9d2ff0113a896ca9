"""Async streams: merge several, stop when the client disconnects, write them as server-sent events or JSON lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from redraft.server.completion import Started
from redraft.server.errors import ClientDisconnected, log_fault, message_of, status_of
from redraft.server.worker import Stream

T = TypeVar("T")
DISCONNECT_POLL_SECONDS = 0.1
END = object()  # stands for the end of a stream


async def next_until_disconnected(request: Request, items: Stream[T]) -> T | Any:
    """Awaits the next item, or END. Raises ClientDisconnected if the client leaves meanwhile."""
    task = asyncio.ensure_future(anext(items, END))
    try:
        return await result_until_disconnected(request, task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # until it has left the stream, which the caller closes next


async def result_until_disconnected(request: Request, task: asyncio.Future[T]) -> T:
    """Awaits the result of a task. Raises ClientDisconnected if the client leaves meanwhile; the task goes on."""
    while not task.done():
        await asyncio.wait({task}, timeout=DISCONNECT_POLL_SECONDS)
        if not task.done() and await request.is_disconnected():
            raise ClientDisconnected("the client has disconnected")
    return task.result()


async def until_disconnected(request: Request, items: Stream[T]) -> Stream[T]:
    """Yields the items until the client disconnects."""
    async with aclosing(items):
        while (item := await next_until_disconnected(request, items)) is not END:
            yield item


async def end_with_error(
    chunks: Stream[dict[str, Any]], error_chunk: Callable[[int, str], dict[str, Any]]
) -> Stream[dict[str, Any]]:
    """Yields the chunks. An exception becomes one last chunk: the status of a started response cannot change any more.

    `error_chunk` makes it from the HTTP status and the message, in the shape of the wire format.
    """
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk
    except Exception as error:
        log_fault(error)
        yield error_chunk(status_of(error), message_of(error))


async def stream_list(chunks: Sequence[T]) -> Stream[T]:
    """A list as a stream."""
    for chunk in chunks:
        yield chunk


async def merge_streams(streams: Sequence[Stream[T]]) -> Stream[tuple[int, T]]:
    """Yields (stream number, item) of several streams as items come.

    The first item is a Started, when all streams have started. A slow reader holds the streams up.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=len(streams))
    all_started = asyncio.Event()

    async def pump(index: int, stream: Stream[T]) -> None:
        try:
            async for item in stream:
                await queue.put((index, item, None))
                if isinstance(item, Started):
                    await all_started.wait()
        except Exception as error:
            await queue.put((index, None, error))
        await queue.put(None)

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        started = 0
        while open_streams:
            entry = await queue.get()
            if entry is None:
                open_streams -= 1
                continue
            index, item, error = entry
            if error is not None:
                raise error
            if isinstance(item, Started):
                started += 1
                if started < len(tasks):
                    continue
                all_started.set()
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def sse_response(chunks: Stream[dict[str, Any]], *, named: bool = False, end: str = "data: [DONE]\n\n") -> Response:
    """Server-sent events. With `named`, every event has its type on a line of its own."""

    async def lines() -> AsyncIterator[str]:
        async with aclosing(chunks):
            async for chunk in chunks:
                name = f"event: {chunk['type']}\n" if named else ""
                yield f"{name}data: {to_json(chunk)}\n\n"
        if end:
            yield end

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def ndjson_response(chunks: Stream[dict[str, Any]]) -> Response:
    """One JSON object per line."""

    async def lines() -> AsyncIterator[str]:
        async with aclosing(chunks):
            async for chunk in chunks:
                yield to_json(chunk) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def to_json(value: Any) -> str:
    """JSON without spaces: some clients search the raw text for '"content":"'."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
