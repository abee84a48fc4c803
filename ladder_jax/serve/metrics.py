"""What Prometheus may scrape: requests by status, times, and the engine's own counts."""

import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ladder_jax.decode.engine import Engine
from ladder_jax.serve.refusal import DROPPED

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # of a histogram's buckets


class Metrics:
    """Of one server, in a registry of its own."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        own = dict(namespace="ladder_jax", registry=self._registry)
        self._requests = Counter("requests", "Answered HTTP requests.", ["path", "status"], **own)
        self._seconds = Histogram(
            "request_duration_seconds", "From a request's head to its last byte.", ["path"], buckets=SECONDS, **own
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From the queue to the first token, a request.", buckets=SECONDS, **own
        )
        self._registry.register(_OfEngine(engine))
        prometheus_client.ProcessCollector(registry=self._registry)

    def count(self, app: ASGIApp, *, paths: tuple[str, ...]) -> ASGIApp:
        """`app`, measured. Other paths than `paths` are one, "other": clients cannot make up new series."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            status, begun = DROPPED, time.perf_counter()
            path = scope["path"] if scope["path"] in paths else "other"

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, watched)
            finally:
                self._requests.labels(path, status).inc()
                self._seconds.labels(path).observe(time.perf_counter() - begun)

        return counted

    def response(self) -> Response:
        return Response(
            prometheus_client.generate_latest(self._registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )


class _OfEngine:
    """A collector: the engine's `stats` at the time of the scrape."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("queued", "Prompts that wait for a slot.", stats.queued),
            ("running", "Slots in use.", stats.running),
            ("slots", "Slots there are.", self._engine.slots),
        ):
            yield GaugeMetricFamily(f"ladder_jax_{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "Tokens read.", stats.prompt_tokens),
            ("new_tokens", "Tokens made, of what has finished.", stats.new_tokens),
        ):
            yield CounterMetricFamily(f"ladder_jax_{name}", text, value)
        finished = CounterMetricFamily("ladder_jax_finished", "Prompts that have ended, and why.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
