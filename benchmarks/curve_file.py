"""A JSON file of learning curves, which is written while they grow, their table and their plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.checks import machine
from benchmarks.curve_plot import Line, Panel, mean_line, plot_panels
from benchmarks.mezo_curves import Point

AXIS = "forwards of one text (a gradient counts as three)"


class CurveFile:
    """Curves by method and seed. Finished ones are found again when a program is started anew.

    Attributes:
        runs: ``{"method", "seed", "steps", "points"}`` of each curve.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Read the file if there is one.

        Raises:
            ValueError: its curves have other settings.
        """
        self.path = path
        self._settings = json.loads(json.dumps(settings))
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            content = json.loads(path.read_text())
            if content["settings"] != self._settings:
                raise ValueError(f"{path} has curves with other settings; name another --out")
            self.runs = content["runs"]

    def has(self, method: str, seed: int) -> bool:
        """True if the curve is complete."""
        run = self._run(method, seed)
        return run is not None and bool(run["points"]) and _is_complete(run)

    def begin(self, method: str, seed: int, steps: int) -> None:
        """Begin a curve of so many steps; a part of it that is there is dropped."""
        before = self._run(method, seed)
        if before is not None:
            self.runs.remove(before)
        self.runs.append({"method": method, "seed": seed, "steps": steps, "points": []})

    def add(self, point: Point) -> None:
        """Append a point to the curve that was begun, and write the file."""
        self.runs[-1]["points"].append(asdict(point))
        self.write()

    def merge(self, others: Iterable[Path]) -> None:
        """Take over the complete curves of other files.

        Raises:
            ValueError: there is no such file, or it has other settings.
        """
        for path in others:
            if not path.exists():
                raise ValueError(f"there is no {path}")
            other = CurveFile(path, self._settings)
            for run in other.runs:
                place = run["method"], run["seed"]
                if other.has(*place) and not self.has(*place):
                    self.runs.append(run)
        if self.runs:
            self.write()

    def write(self) -> None:
        """Write the file; a reader sees the old or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        content = {"machine": machine(), "settings": self._settings, "runs": self.runs}
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(self.path)

    def lines(self, value: str) -> dict[str, list[Line]]:
        """Return the curves of one value by method, over forwards."""
        lines: dict[str, list[Line]] = {}
        for run in self.runs:
            line = [(point["forwards"], point[value]) for point in run["points"]]
            lines.setdefault(run["method"], []).append(line)
        return lines

    def plot(self) -> str:
        """Return the curves of loss and accuracy as SVG."""
        loss = Panel("loss of held-out texts", self.lines("loss"))
        accuracy = Panel("accuracy", self.lines("accuracy"), "{:.0%}")
        return plot_panels([loss, accuracy], AXIS)

    def table(self, num_rows: int = 5) -> str:
        """Return means over seeds at a few places of each curve, and at its end, as Markdown."""
        head = ("method", "seeds", "steps", "forwards", "loss", "accuracy", "zero steps", "seconds")
        rows = [head, ("---",) * len(head)]
        for method in dict.fromkeys(run["method"] for run in self.runs):
            curves = [run["points"] for run in self.runs if run["method"] == method]
            places = range(min(map(len, curves)))
            every = max(1, (len(places) - 1) // num_rows)
            for at in sorted({*places[::every], *places[-1:]}):
                rows.append(_row(method, [curve[at] for curve in curves]))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _run(self, method: str, seed: int) -> dict[str, Any] | None:
        named = (run for run in self.runs if (run["method"], run["seed"]) == (method, seed))
        return next(named, None)


def _is_complete(run: Mapping[str, Any]) -> bool:
    return run["points"][-1]["step"] == run["steps"]


def _row(method: str, points: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    means = {name: statistics.fmean(point[name] for point in points) for name in _MEANS}
    spread = [point["accuracy"] for point in points]
    step = max(1, points[0]["step"])
    return (
        method,
        str(len(points)),
        f"{points[0]['step']:,}",
        f"{points[0]['forwards']:,}",
        f"{means['loss']:.4f}",
        f"{means['accuracy']:.1%} ({min(spread):.1%} to {max(spread):.1%})",
        f"{means['zero_steps'] / step:.1%}",
        f"{means['seconds']:.1f}",
    )


_MEANS = ("loss", "accuracy", "zero_steps", "seconds")


def forwards_until(lines: Sequence[Line], value: float) -> float | None:
    """Return after how many forwards the mean curve first is at most a value; None: never."""
    return next((x for x, y in mean_line(lines) if y <= value), None)
