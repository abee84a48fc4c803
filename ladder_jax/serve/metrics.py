"""Metrics for Prometheus: requests by status, durations, and the engine's counters."""

import contextlib
import time
from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from starlette.responses import Response
from starlette.types import Message, Send

from ladder_jax.decode.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Upper bounds of histograms' buckets."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected."""


class Metrics:
    """The metrics of one server, in its own registry.

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
        self._seconds = Histogram(
            "request_duration_seconds",
            "From a request's head to its last byte.",
            ["path"],
            buckets=SECONDS,
            **common,
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "From submission to the first token.",
            buckets=SECONDS,
            **common,
        )
        queued = Gauge("queued", "Prompts that wait for a slot.", **common)
        queued.set_function(lambda: engine.stats().queued)
        running = Gauge("running", "Slots in use.", **common)
        running.set_function(lambda: engine.stats().running)
        Gauge("slots", "Slots.", **common).set(engine.slots)
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
        """The engine's counters, when Prometheus asks."""
        stats = self._engine.stats()
        yield CounterMetricFamily(
            "ladder_jax_prompt_tokens", "Tokens of prompts that got a slot.", stats.prompt_tokens
        )
        yield CounterMetricFamily(
            "ladder_jax_new_tokens", "New tokens of finished prompts.", stats.new_tokens
        )
        finished = CounterMetricFamily(
            "ladder_jax_finished", "Prompts that have ended, and why.", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
