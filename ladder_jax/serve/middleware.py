"""What every request passes before the application: it is counted and timed, for Prometheus, and may
be refused, by names, key, shutdown, and the size and time of its body.

Names protect against DNS rebinding: a web page can make its own host name resolve to 127.0.0.1. Its
requests then come from this machine, and the browser treats them as of the same origin. But their
headers contain the page's host name.
"""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator

import fastapi
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ladder_jax.decode.engine import Engine
from ladder_jax.errors import UserError
from ladder_jax.serve.schema import BODIES, Refusal

BODY_BYTES = 4 * 2**20
BODY_SECONDS = 30.0
CONTENT_TYPE = "application/json"
LOCAL = ("localhost", "127.0.0.1", "[::1]")
_NAME = re.compile(r"(https?://)?(\[[0-9a-f:.]+\]|[^:/?#@\[\]]+?)\.?(:\d+)?")
"""Of an origin, or of a host: http://NAME:PORT, NAME:PORT."""
_POLL = 0.05  # seconds
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histograms' buckets."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected."""


class Metrics:
    """The metrics of one server, in its own registry: requests by status, durations, and the
    engine's counters.

    paths: those that are counted by name. Others count as "other", so that clients cannot add
        series.
    """

    def __init__(self, engine: Engine, *, paths: tuple[str, ...]):
        self._engine = engine
        self._paths = paths
        self._registry = CollectorRegistry()
        common = dict(namespace="ladder_jax", registry=self._registry)
        self._requests = Counter(
            "requests", "Answered HTTP requests.", ["path", "status"], **common
        )
        histogram = functools.partial(Histogram, buckets=_BUCKETS, **common)
        about = "From a request's head to its last byte."
        self._seconds = histogram("request_duration_seconds", about, ["path"])
        about = "From submission to the first token."
        self.first_token = histogram("time_to_first_token_seconds", about)
        self._registry.register(self)
        prometheus_client.ProcessCollector(registry=self._registry)

    @contextlib.contextmanager
    def request(self, path: str, send: Send) -> Iterator[Send]:
        """Counts and times a request. Gives `send` that notes the answer's status."""
        path = path if path in self._paths else "other"
        status = CLIENT_CLOSED_REQUEST
        begun = time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            yield noting
        finally:
            self._requests.labels(path, status).inc()
            self._seconds.labels(path).observe(time.perf_counter() - begun)

    def response(self) -> Response:
        text = prometheus_client.generate_latest(self._registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """The engine's numbers, when Prometheus asks."""
        stats = self._engine.stats()
        for kind, name, about, value in (
            (GaugeMetricFamily, "queued", "Prompts that wait for a slot.", stats.queued),
            (GaugeMetricFamily, "running", "Slots in use.", stats.running),
            (GaugeMetricFamily, "slots", "Slots.", self._engine.slots),
            (
                CounterMetricFamily,
                "prompt_tokens",
                "Tokens of prompts that got a slot.",
                stats.prompt_tokens,
            ),
            (
                CounterMetricFamily,
                "new_tokens",
                "New tokens of finished prompts.",
                stats.new_tokens,
            ),
        ):
            yield kind(f"ladder_jax_{name}", about, value)
        finished = CounterMetricFamily(
            "ladder_jax_finished", "Prompts that have ended, and why.", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished


def check_key(key: str) -> None:
    """Raises UserError for a key that cannot be sent in a header."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError("the API key must be printable ASCII characters without spaces")


def own_names(host: str, sock: socket.socket, *, key: str | None) -> frozenset[str] | None:
    """The allowed names of a server that listens at `host`; None (any) if it has a key or is not
    local.
    """
    address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    if key is not None or not address.is_loopback:
        return None
    names = (f"[{name}]" if ":" in name else name for name in (host.lower(), str(address)))
    return frozenset((*LOCAL, *names))


class Gate:
    """The application `app` behind these checks. It counts requests, and can refuse new ones.

    key: what clients must send; None if they need none. names: allowed in `Host` and `Origin`; None
        for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None = None,
        names: Collection[str] | None = None,
        metrics: Metrics,
    ):
        self._app = app
        self._key = key
        self._names = names
        self._metrics = metrics
        self.draining = False
        self.active = 0

    def drain(self) -> int:
        """Refuses new requests for answers from now on. Returns the number in progress."""
        self.draining = True
        return self.active

    def wait(self, seconds: float, *, unless: Callable[[], bool]) -> None:
        """Waits until no answer is in progress, for at most `seconds`, or until `unless` is
        true.
        """
        deadline = time.monotonic() + seconds
        while self.active and time.monotonic() < deadline and not unless():
            time.sleep(_POLL)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._metrics.request(scope["path"], send) as counted_send:
            # Counted first, then refused: so `drain` in another thread misses none that is let in.
            self.active += scope["path"] in BODIES
            try:
                self._check(scope["path"], Headers(scope=scope))
                await self._app(scope, receive, counted_send)
            except Refusal as refusal:
                await refusal.response()(scope, receive, counted_send)
            finally:
                self.active -= scope["path"] in BODIES

    def _check(self, path: str, headers: Headers) -> None:
        if self._names is not None:
            self._check_names(headers)
        if self._key is not None and path != "/health":
            self._check_key(headers)
        if self.draining and path in BODIES:
            again = {"Retry-After": "5", "Connection": "close"}
            raise Refusal(
                503, "the server is shutting down; try again", code="draining", headers=again
            )

    def _check_names(self, headers: Headers) -> None:
        for header, status in (("host", 421), ("origin", 403)):
            for value in headers.getlist(header):
                found = _NAME.fullmatch(value.lower())
                is_origin = bool(found and found[1])
                if not found or found[2] not in self._names or is_origin != (header == "origin"):
                    names = ", ".join(sorted(self._names))
                    message = f"{value[:200]!r} is none of this server's names (allowed: {names}, or an --api-key)"
                    raise Refusal(status, f"{header.title()} {message}")

    def _check_key(self, headers: Headers) -> None:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        # In constant time: the duration must not reveal how many characters of a key are right.
        right = hmac.compare_digest(sent.strip().encode(), self._key.encode())
        if scheme.lower() != "bearer" or not right:
            message = (
                "wrong API key"
                if sent
                else "this server requires an API key: Authorization: Bearer KEY"
            )
            raise Refusal(
                401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )


async def read_body(http: fastapi.Request) -> bytes:
    """Raises Refusal for a body that is too large, too slow, or not JSON.

    Starlette's own limit answers in plain text, and waits for as long as it takes.
    """
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                content += part
                if len(content) > BODY_BYTES:
                    raise Refusal(413, f"the request's body may have {BODY_BYTES} bytes")
    except TimeoutError:
        message = f"the request's body did not come within {BODY_SECONDS:g} seconds"
        raise Refusal(408, message, headers={"Connection": "close"}) from None
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content and kind != CONTENT_TYPE:
        raise Refusal(415, f"the body must be JSON, and its Content-Type {CONTENT_TYPE}")
    return bytes(content)
