"""Metrics for Prometheus: requests by status, durations, and the engine's counters."""

import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ladder_jax.decode.engine import Engine
from ladder_jax.serve.refusal import CLIENT_CLOSED_REQUEST

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # upper bounds of histogram buckets


class Metrics:
    """The metrics of one server, in its own registry."""

    def __init__(self, engine: Engine):
        self._registry = CollectorRegistry()
        common = dict(namespace="ladder_jax", registry=self._registry)
        self._requests = Counter("requests", "Answered HTTP requests.", ["path", "status"], **common)
        self._seconds = Histogram(
            "request_duration_seconds", "From a request's head to its last byte.", ["path"], buckets=SECONDS, **common
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds", "From submission to the first token.", buckets=SECONDS, **common
        )
        self._registry.register(_EngineCollector(engine))
        prometheus_client.ProcessCollector(registry=self._registry)

    def count(self, app: ASGIApp, *, paths: tuple[str, ...]) -> ASGIApp:
        """Middleware: counts and times requests. Paths not in `paths` count as "other": clients cannot add series."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            status, start_time = CLIENT_CLOSED_REQUEST, time.perf_counter()
            path = scope["path"] if scope["path"] in paths else "other"

            async def send_and_note_status(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, send_and_note_status)
            finally:
                self._requests.labels(path, status).inc()
                self._seconds.labels(path).observe(time.perf_counter() - start_time)

        return counted

    def response(self) -> Response:
        return Response(
            prometheus_client.generate_latest(self._registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )


class _EngineCollector:
    """Collects the engine's `stats` when Prometheus scrapes."""

    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text, value in (
            ("queued", "Prompts that wait for a slot.", stats.queued),
            ("running", "Slots in use.", stats.running),
            ("slots", "Slots.", self._engine.slots),
        ):
            yield GaugeMetricFamily(f"ladder_jax_{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts that got a slot.", stats.prompt_tokens),
            ("new_tokens", "New tokens of finished prompts.", stats.new_tokens),
        ):
            yield CounterMetricFamily(f"ladder_jax_{name}", text, value)
        finished = CounterMetricFamily("ladder_jax_finished", "Prompts that have ended, and why.", labels=["reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
