"""Which weights made which tokens of a sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class VersionSpans:
    """Labels of weights by token, as spans ``[start, end)`` that partition a sample's tokens.

    The shape is vLLM's and SGLang's ``weight_versions``. Neighbours have different labels, and no
    span is empty: a sample of no tokens has no span.
    """

    _ends: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    def add(self, version: str, count: int) -> None:
        """Note that the next ``count`` tokens were made by these weights."""
        if count == 0:
            return
        start = self._ends[-1][1] if self._ends else 0
        if self._ends and self._ends[-1][0] == version:
            self._ends.pop()
        self._ends.append((version, start + count))

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each span, in order; one that comes back is there again."""
        return tuple(version for version, _ in self._ends)

    def to_json(self) -> list[dict[str, Any]]:
        """``[{"version": label, "start": first token, "end": behind the last}]``."""
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in self._ends:
            spans.append({"version": version, "start": start, "end": end})
            start = end
        return spans
