"""The file of results, to which rows are added one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.checks import machine
from benchmarks.gpu.bench import Outcome

DIGITS = 5
#: ``SHOWN``: the fields of a record that a table needs.
SHOWN = ("values", "figures", "missing", "error", "environment", "machine")


class Results:
    """Records by row name, written after every change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.rows = json.loads(path.read_text())["rows"]

    def is_measured(self, name: str) -> bool:
        """True if there are all figures."""
        return name in self.rows and not why_incomplete(self.rows[name])

    def has_failed(self, name: str) -> bool:
        """True if it was tried and failed."""
        return bool(why_incomplete(self.rows.get(name, {})))

    def begin(self, name: str) -> None:
        """Note that a row begins, should it end the process."""
        self._put(name, {"error": "the process ended in this row"})

    def fail(self, name: str, error: str, about: dict[str, Any]) -> None:
        """Store the reason for missing figures."""
        self._put(name, {"error": error, **about})

    def add(self, name: str, outcome: Outcome, about: dict[str, Any]) -> None:
        """Store figures."""
        self._put(name, rounded(asdict(outcome)) | about)

    def take(self, others: Results) -> None:
        """Keep what a table needs of newer records; one that failed replaces no figures."""
        for name, record in others.rows.items():
            is_better = others.is_measured(name) or not self.is_measured(name)
            if is_better and _time(record) >= _time(self.rows.get(name, {})):
                self._put(name, {key: record[key] for key in SHOWN if record.get(key, "") != ""})

    def _put(self, name: str, record: dict[str, Any]) -> None:
        self.rows[name] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n")
        os.replace(part, self._path)


def about_run(commit: str | None) -> dict[str, Any]:
    """Return facts of the run that put the figures in context."""
    about = machine()
    device = str(dict(mx.device_info()).get("device_name", "?"))
    environment = {key: value for key, value in os.environ.items() if key.startswith("MLX_")}
    return {
        "machine": about | {"commit": commit or about["commit"], "device": device},
        "environment": dict(sorted(environment.items())),
    }


def why_incomplete(record: Mapping[str, Any]) -> str:
    """Return why there are not all figures; empty where there are."""
    return record.get("error") or record.get("missing") or ""


def _time(record: dict[str, Any]) -> str:
    """Return the time of the measurement in sortable form; empty if unknown."""
    return record.get("machine", {}).get("time", "")


def rounded(value: Any) -> Any:
    """Return a value with its numbers rounded to the significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
