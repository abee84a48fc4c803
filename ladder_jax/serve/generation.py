"""Pass requests from HTTP's event loop to the engine's thread. A waiting request occupies no thread."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence

from starlette.types import Receive

from ladder_jax.decode.engine import Finish, Handle, NoNumbers, Piece, Request, Result
from ladder_jax.serve.refusal import Refusal
from ladder_jax.serve.service import Service


class Disconnected(Exception):
    """The client disconnected before its answer was complete."""


def submit(service: Service, requests: Sequence[Request]) -> list[Handle]:
    """Submits all requests, or none. The caller must `cancel` the handles at the end; finished ones are unaffected."""
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
    """Yields (the handle's index, event): each handle's pieces, then its result.

    Raises Refusal if a request fails, or the server shuts down before it has finished.
    """
    loop, inbox, start_time = asyncio.get_running_loop(), asyncio.Queue(), time.perf_counter()

    def subscribe(index: int, handle: Handle) -> None:
        def listener(event: Piece | Result | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has shut down
                loop.call_soon_threadsafe(inbox.put_nowait, (index, event))

        handle.subscribe(listener)

    for index, handle in enumerate(handles):
        subscribe(index, handle)
    unfinished, has_first_token = len(handles), False
    while unfinished:
        index, event = await inbox.get()
        if isinstance(event, NoNumbers):
            raise Refusal(500, str(event), code="no_numbers")
        if isinstance(event, BaseException):
            raise _failed()
        if isinstance(event, Result):
            unfinished -= 1
            if event.finish is Finish.CANCELLED:
                raise Refusal(503, "the server ended before the answer did", code="draining")
        elif not has_first_token:
            has_first_token = True
            service.metrics.first_token.observe(time.perf_counter() - start_time)
        yield index, event


async def unless_disconnected[T](receive: Receive, work: Coroutine[None, None, T]) -> T:
    """The result of `work`. If the client disconnects first, cancels `work` and raises Disconnected."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _failed() -> Refusal:
    return Refusal(500, "the engine has failed, and the server ends", code="engine_failed")
