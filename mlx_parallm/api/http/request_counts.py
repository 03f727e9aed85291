"""Counts of answered HTTP requests, for ``GET /metrics``."""

from __future__ import annotations

from collections import Counter
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


class RequestCounts:
    """Counts the answers of this process, and adds those of others. Used on one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[Answered] = Counter()

    def add(self, counts: Mapping[Answered, int]) -> None:
        """Add answers."""
        self._counts.update(counts)

    def count(self, labels: Answered) -> None:
        """Add one answer."""
        self._counts[labels] += 1

    def take(self) -> Mapping[Answered, int]:
        """Return all answers, and count from zero again."""
        taken, self._counts = self._counts, Counter()
        return taken

    def family(self) -> CounterMetricFamily:
        """Return the metric: the labels are those of prometheus-fastapi-instrumentator."""
        family = CounterMetricFamily(
            "http_requests", "HTTP requests that were answered.", labels=Answered._fields
        )
        for labels, count in sorted(self._counts.items()):
            family.add_metric(labels, count)
        return family


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
