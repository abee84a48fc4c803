"""Requests between HTTP's event loop and the engine's thread: none occupies a thread while it waits."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence

from starlette.types import Receive

from ladder_jax.decode.engine import Finish, Handle, NoNumbers, Piece, Request, Result
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.service import Service


class Dropped(Exception):
    """The client disconnected before its answer was complete."""


def submit(service: Service, requests: Sequence[Request]) -> list[Handle]:
    """Submits all of them, or none. The caller must `cancel` them in the end, which leaves finished ones alone."""
    try:
        return service.engine.submit_all(requests)
    except Exception:
        if service.engine.error:
            raise _failed() from None
        raise


def cancel(handles: Sequence[Handle]) -> None:
    for handle in handles:
        if not handle.done:
            handle.cancel()


async def events(service: Service, handles: Sequence[Handle]) -> AsyncIterator[tuple[int, Piece | Result]]:
    """Yields each handle's pieces and, at last, its result, with the handle's index.

    Raises Refusal where a request fails or the server ends before it has finished.
    """
    loop, inbox, begun = asyncio.get_running_loop(), asyncio.Queue(), time.perf_counter()

    def subscribe(index: int, handle: Handle) -> None:
        def listener(event: Piece | Result | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(inbox.put_nowait, (index, event))

        handle.subscribe(listener)

    for index, handle in enumerate(handles):
        subscribe(index, handle)
    left, seen = len(handles), False
    while left:
        index, event = await inbox.get()
        if isinstance(event, NoNumbers):
            raise Refusal(500, str(event), code="no_numbers")
        if isinstance(event, BaseException):
            raise _failed()
        if isinstance(event, Result):
            left -= 1
            if event.finish is Finish.CANCELLED:
                raise Refusal(503, "the server ended before the answer did", code="draining")
        elif not seen:
            seen = True
            service.metrics.first_token.observe(time.perf_counter() - begun)
        yield index, event


async def unless_dropped[T](receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises Dropped."""

    async def dropped() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(dropped())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Dropped
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _failed() -> Refusal:
    return Refusal(500, "the engine has failed, and the server ends", code="engine_failed")
