"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), one JSON object each."""

import contextlib
from collections.abc import AsyncIterator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ladder_jax.serve.generation import Disconnected, unless_disconnected
from ladder_jax.serve.refusal import Refusal, dumps

DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends each object as an event until the last one, or until the client disconnects. Then calls `ended`."""

    media_type = "text/event-stream"

    def __init__(self, objects: AsyncIterator[dict], *, ended: Callable[[], None]):
        # X-Accel-Buffering keeps nginx from buffering the stream.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._objects, self._ended = objects, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with contextlib.suppress(Disconnected):
                await unless_disconnected(receive, self._send(send))
        finally:
            self._ended()

    async def _send(self, send: Send) -> None:
        async def send_event(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for value in self._objects:
                await send_event(b"data: %b\n\n" % dumps(value))
        except Refusal as refusal:  # the status was sent already
            await send_event(b"data: %b\n\n" % dumps(refusal.body()), more=False)
        else:
            await send_event(DONE, more=False)
