"""A plot of learning curves over forwards, in SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 56, 16, 56, 44, 62
COLOURS = ("#4477aa", "#cc6633", "#228833", "#aa3377", "#66ccee", "#bbaa33")
GREY, INK = "#999999", "#333333"
NUM_TICKS = 4
# MARGIN: part of the range of values above the largest and below the smallest one.
MARGIN = 0.06

#: ``Line`` is points of a curve: how far it is, and its value.
Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one pair of axes.

    Attributes:
        title: names the values.
        lines: the curves by name; a name has one for each seed, of points at the same places.
        form: how values are written, for ``format``.
    """

    title: str
    lines: Mapping[str, Sequence[Line]]
    form: str = "{:.2f}"


def plot_panels(panels: Sequence[Panel], axis: str) -> str:
    """Return an SVG of panels side by side; thin lines are seeds, thick ones their means."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(names)}
    width = (WIDTH - LEFT - RIGHT - BETWEEN * (len(panels) - 1)) / len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    step = (WIDTH - LEFT - RIGHT) / max(1, len(names))
    for at, name in enumerate(names):
        parts.append(_text(LEFT + at * step, 18, name, colour=colours[name], anchor="start"))
    for at, panel in enumerate(panels):
        parts += _panel(panel, colours, LEFT + at * (width + BETWEEN), width, axis)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    panel: Panel, colours: Mapping[str, str], left: float, width: float, axis: str
) -> list[str]:
    points = [point for lines in panel.lines.values() for line in lines for point in line]
    last = max((x for x, _ in points), default=1.0) or 1.0
    values = [y for _, y in points] or [0.0, 1.0]
    room = MARGIN * (max(values) - min(values) or 1.0)
    low, high = min(values) - room, max(values) + room

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + width * point[0] / last
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (point[1] - low) / (high - low)

    parts = [_text(left, TOP - 12, panel.title, anchor="start")]
    for tick in range(NUM_TICKS + 1):
        value = low + (high - low) * tick / NUM_TICKS
        x, y = place((0.0, value))
        parts.append(_line([(x, y), (x + width, y)], GREY, 0.4))
        parts.append(_text(x - 6, y + 4, panel.form.format(value), anchor="end"))
        x, y = place((last * tick / NUM_TICKS, low))
        parts.append(_text(x, y + 16, f"{last * tick / NUM_TICKS:,.0f}"))
    parts.append(_text(left + width / 2, HEIGHT - 8, axis))
    for name, lines in panel.lines.items():
        parts += [_line(map(place, line), colours[name], 0.6) for line in lines if len(lines) > 1]
        parts.append(_line(map(place, mean_line(lines)), colours[name], 2))
    return parts


def mean_line(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """Return the means of curves, as far as all of them go."""
    return [
        (points[0][0], sum(y for _, y in points) / len(points))
        for points in zip(*lines, strict=False)
    ]


def _line(points: Iterable[tuple[float, float]], colour: str, width: float) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'
