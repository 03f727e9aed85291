"""Counts of answered HTTP requests and of their recordings, for ``GET /metrics``."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from http import HTTPMethod
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override

from mlx_parallm.api.http.middleware import HttpMiddleware
from mlx_parallm.api.http.routing import ROUTE

METHODS = frozenset(HTTPMethod)
# OTHER: methods and paths that clients make up must not make label values.
OTHER = "other"


class Answered(NamedTuple):
    """The labels that requests are counted by: those of ``http_requests_total``."""

    method: str
    handler: str
    status: str


class AudioHeard(NamedTuple):
    """The labels that seconds of audio are counted by."""

    model_name: str


#: ``Labels``: of what is counted: answers, or seconds of audio.
Labels = Answered | AudioHeard


class RequestCounts:
    """Counts the requests of this process, and adds those of others. Used on one event loop."""

    def __init__(self) -> None:
        self._counts: dict[Labels, float] = {}

    def add(self, counts: Mapping[Labels, float]) -> None:
        """Add what another process has counted."""
        for labels, amount in counts.items():
            self.count(labels, amount)

    def count(self, labels: Labels, amount: float = 1) -> None:
        """Add an answer, or an amount of seconds."""
        self._counts[labels] = self._counts.get(labels, 0) + amount

    def take(self) -> Mapping[Labels, float]:
        """Return all counts, and count from zero again."""
        taken, self._counts = self._counts, {}
        return taken

    def families(self) -> list[CounterMetricFamily]:
        """Return the metrics: answers have the labels of prometheus-fastapi-instrumentator."""
        answers = CounterMetricFamily(
            "http_requests", "HTTP requests that were answered.", labels=Answered._fields
        )
        audio = CounterMetricFamily(
            "vllm:audio_seconds", "Seconds of audio heard.", labels=AudioHeard._fields
        )
        for labels, amount in sorted(self._counts.items()):
            family = answers if isinstance(labels, Answered) else audio
            family.add_metric(labels, amount)
        return [answers, audio]


class CountingMiddleware(HttpMiddleware):
    """Counts a request when its answer begins; one that is never answered does not count."""

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        super().__init__(app)
        self._counts = counts

    @override
    def answer(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        def send_and_count(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                self._counts.count(_labels(scope, message["status"]))
            return send(message)

        return self._app(scope, receive, send_and_count)


def _labels(scope: Scope, status: int) -> Answered:
    # Starlette names the route of a path with parameters when it has matched it.
    route = scope.get(ROUTE) or scope.get("route")
    return Answered(
        scope["method"] if scope["method"] in METHODS else OTHER,
        OTHER if route is None else route.path_format,
        str(status),
    )
