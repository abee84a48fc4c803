"""The application: its paths, and the way of a request through the engine and back.

Requests pass from HTTP's event loop to the engine's thread; one that waits occupies no thread.
"""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

import fastapi
from fastapi.sse import EventSourceResponse
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from ladder_jax import __version__
from ladder_jax.decode.engine import (
    Engine,
    Finish,
    Handle,
    NoNumbers,
    Piece,
    QueueFull,
    Result,
)
from ladder_jax.errors import UserError, unknown
from ladder_jax.serve.answer import Form
from ladder_jax.serve.middleware import (
    CLIENT_CLOSED_REQUEST,
    CONTENT_TYPE,
    Gate,
    Metrics,
    read_body,
)
from ladder_jax.serve.prepare import Terms, prepare
from ladder_jax.serve.schema import BODIES, GenerationBody, Refusal, dumps, json_response, parse

SMALL_BODY = 2**17  # bytes
POLL = 0.2  # seconds
PATHS = (*BODIES, "/health", "/metrics", "/v1/models", "/openapi.json")


@dataclasses.dataclass(frozen=True)
class Service:
    """What answers requests. engine: runs in its own thread, with the tokenizer's bytes as its
    decoder.
    """

    engine: Engine
    terms: Terms

    @functools.cached_property
    def metrics(self) -> Metrics:
        return Metrics(self.engine, paths=PATHS)

    @functools.cached_property
    def large_bodies(self) -> asyncio.Semaphore:
        """Held while a large body is read, so that small ones get threads and Python's lock."""
        return asyncio.Semaphore(1)

    async def answer(self, http: fastapi.Request, kind: type[GenerationBody]) -> Response:
        """A whole answer, or its stream. Raises Refusal or UserError."""
        content = await read_body(http)
        alone = self.large_bodies if len(content) > SMALL_BODY else contextlib.nullcontext()
        # In a thread: to read and tokenize a long body would block the event loop.
        async with alone:
            body = await asyncio.to_thread(parse, kind, content)
            requests, form = await asyncio.to_thread(prepare, body, self.terms)
        try:
            handles = self.engine.submit_all(requests)
        except RuntimeError:
            if self.engine.error:  # its loop may end at any time
                raise _failed() from None
            raise
        if body.stream:
            events = self._stream(handles, form)
            # X-Accel-Buffering keeps nginx from buffering the stream.
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            return EventSourceResponse(
                events, headers=headers, background=BackgroundTask(_cancel, handles)
            )
        try:
            results = {
                index: event
                async for index, event in self._events(handles, http=http)
                if isinstance(event, Result)
            }
        finally:
            await _cancel(handles)
        return json_response(form.answer([results[index] for index in range(len(handles))]))

    async def _events(
        self, handles: Sequence[Handle], *, http: fastapi.Request | None = None
    ) -> AsyncIterator[tuple[int, Piece | Result]]:
        """(the handle's index, event): each handle's pieces, then its result.

        http: whose client may leave; a stream notices that by itself. Raises Refusal if it does, if
        a request fails, or if the server shuts down before it has finished.
        """
        loop = asyncio.get_running_loop()
        inbox = asyncio.Queue()
        begun = time.perf_counter()

        def post(index: int, event: Piece | Result | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has shut down
                loop.call_soon_threadsafe(inbox.put_nowait, (index, event))

        for index, handle in enumerate(handles):
            handle.subscribe(functools.partial(post, index))
        unfinished = len(handles)
        is_first = True
        while unfinished:
            if http and await http.is_disconnected():
                raise Refusal(CLIENT_CLOSED_REQUEST, "the client has left")
            try:
                index, event = await asyncio.wait_for(inbox.get(), POLL)
            except TimeoutError:
                continue
            if isinstance(event, NoNumbers):
                raise Refusal(500, str(event), code="no_numbers")
            if isinstance(event, BaseException):
                raise _failed()
            if isinstance(event, Result):
                unfinished -= 1
                if event.finish is Finish.CANCELLED:
                    raise Refusal(503, "the server ended before the answer did", code="draining")
            elif is_first:
                is_first = False
                self.metrics.first_token.observe(time.perf_counter() - begun)
            yield index, event

    async def _stream(self, handles: Sequence[Handle], form: Form) -> AsyncIterator[bytes]:
        """Server-sent events, a JSON object each."""
        results = []
        try:
            for event in form.opening():
                yield _event(event)
            async for index, output in self._events(handles):
                if isinstance(output, Result):
                    results.append(output)
                elif not (output.text or output.logprobs):
                    continue
                yield _event(form.event(index, output))
            for event in form.closing(results):
                yield _event(event)
            yield b"data: [DONE]\n\n"
        except Refusal as refusal:  # the status was sent already
            yield _event(refusal.body())


def create(
    service: Service, *, key: str | None = None, names: Collection[str] | None = None
) -> Gate:
    """key, names: see `Gate`."""
    # Without the documentation pages, which load scripts from other hosts; /openapi.json describes
    # the paths.
    api = fastapi.FastAPI(
        title="ladder-jax serve", version=__version__, docs_url=None, redoc_url=None
    )
    for kind in (HTTPException, UserError, ClientDisconnect, Exception):
        api.add_exception_handler(kind, lambda http, error: _refusal(http, error).response())
    gate = Gate(api, key=key, names=names, metrics=service.metrics)
    model = {
        "id": service.terms.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "ladder_jax",
    }

    def answering(kind: type[GenerationBody]) -> Callable[[fastapi.Request], Awaitable[Response]]:
        async def answer(http: fastapi.Request) -> Response:
            return await service.answer(http, kind)

        return answer

    for path, kind in BODIES.items():
        about = dict(name=kind.__name__, openapi_extra=_described(path, kind))
        api.add_api_route(path, answering(kind), methods=["POST"], **about)

    @api.head("/health", include_in_schema=False)  # load balancers ask with HEAD
    @api.get("/health")  # the first to be known, which the refusal of another method names
    async def health() -> Response:
        if service.engine.error:
            return json_response({"status": "failed"}, status=503)
        if gate.draining:
            return json_response({"status": "draining"}, status=503)
        return json_response({"status": "ok"})

    @api.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @api.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.terms.check_model(name)
        return json_response(model)

    @api.get("/metrics")
    async def metrics() -> Response:
        return service.metrics.response()

    return gate


def _described(path: str, kind: type[GenerationBody]) -> dict:
    """The body of a path in /openapi.json; we read it ourselves."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    content = {CONTENT_TYPE: {"schema": kind.model_json_schema(ref_template=place)}}
    return {"requestBody": {"required": True, "content": content}}


def _refusal(http: fastapi.Request, error: Exception) -> Refusal:
    """The error response for an exception. An unexpected one is a 500, and its traceback goes to
    the log.
    """
    match error:
        case Refusal():
            return error
        case HTTPException(status_code=404):
            return Refusal(404, str(unknown("path", http.url.path, PATHS)))
        case HTTPException(status_code=405):
            message = f"{http.method} is not for {http.url.path} (allowed: {(error.headers or {}).get('Allow')})"
            return Refusal(405, message, headers=error.headers)
        case HTTPException():
            return Refusal(error.status_code, str(error.detail), headers=error.headers)
        case QueueFull():
            return Refusal(429, str(error), code="queue_full", headers={"Retry-After": "1"})
        case UserError():
            return Refusal(400, str(error))
        case ClientDisconnect():
            return Refusal(CLIENT_CLOSED_REQUEST, "the client has left")
        case _:
            return Refusal(500, "an error in the server; its log says more")


async def _cancel(handles: Sequence[Handle]) -> None:
    for handle in handles:  # those that are done stay as they are
        handle.cancel()


def _event(value: dict) -> bytes:
    return b"data: %b\n\n" % dumps(value)


def _failed() -> Refusal:
    return Refusal(500, "the engine has failed, and the server ends", code="engine_failed")
