"""The metric families of a process. They are written on the engine thread and read by scrapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry

F = TypeVar("F")

# A sample of the text format: its name, its labels if there are any, and the rest.
_SAMPLE = re.compile(rb"([^\s{]+)(?:\{(.*)\})?( \S+.*)")
# _OWN_NUMBER: the label by which an engine numbers itself, with the comma before it. No value
# matches, because quotes in values are escaped.
_OWN_NUMBER = re.compile(rb'(?:^|,)engine="0"(?=,|$)')


class MetricFamilies:
    """Every metric family of the process, in one registry; engines add label values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._made: dict[object, Any] = {}

    def of(self, make: Callable[[CollectorRegistry], F]) -> F:
        """Return the families that ``make`` declares in the registry; it is called once."""
        if make not in self._made:
            self._made[make] = make(self.registry)
        return cast("F", self._made[make])


def labelled_by_engine(texts: Mapping[int, bytes]) -> bytes:
    """Return the metrics of several engines as one text, with the label ``engine``.

    The format is that of https://prometheus.io/docs/instrumenting/exposition_formats: all samples
    of a family follow its HELP and TYPE lines, which are there once.

    Args:
        texts: each engine's metrics, by its number. All have the same families.
    """
    families: dict[bytes, list[bytes]] = {}
    for rank, text in texts.items():
        samples: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"#"):
                samples = families.setdefault(line, [])
            elif match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                label = b'engine="%d"' % rank
                others = _OWN_NUMBER.sub(b"", labels or b"").strip(b",")
                labels = b",".join(filter(None, (label, others)))
                samples.append(b"%s{%s}%s" % (name, labels, value))
    lines = [line for header, samples in families.items() for line in (header, *samples)]
    return b"".join(line + b"\n" for line in lines)
