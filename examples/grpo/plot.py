"""A plot of rewards by step, in SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 50, 16, 34, 44
SAMPLED, HELD_OUT, GREY = "#4477aa", "#cc6633", "#999999"
NUM_TICKS = 4


class StepRewards(Protocol):
    """The figures of a step that the plot shows."""

    reward: float
    evaluation: float | None
    elapsed_s: float


def plot_run(steps: Sequence[StepRewards]) -> str:
    """Return an SVG of the mean rewards of samples and of greedy answers to held-out problems.

    The horizontal axis counts steps; its label has the minutes of the run.
    """
    last = max(len(steps) - 1, 1)

    def place(step: float, reward: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        return x, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * reward

    sampled = [place(number, step.reward) for number, step in enumerate(steps)]
    held_out = [
        place(number, step.evaluation)
        for number, step in enumerate(steps)
        if step.evaluation is not None
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tenths in range(0, 11, 2):
        x, y = place(0, tenths / 10)
        parts.append(_line([(x, y), (WIDTH - RIGHT, y)], GREY, width=0.4))
        parts.append(_text(x - 8, y + 4, f"{tenths * 10} %", anchor="end"))
    for number in range(0, len(steps), max(1, len(steps) // NUM_TICKS)):
        x, y = place(number, 0)
        parts.append(_text(x, y + 18, str(number)))
    minutes = steps[-1].elapsed_s / 60 if steps else 0.0
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 8, f"updates of the adapter; {minutes:.1f} minutes in all"))
    parts += [_line(sampled, SAMPLED), _line(held_out, HELD_OUT)]
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{HELD_OUT}"/>' for x, y in held_out]
    parts.append(_text(LEFT, 20, "mean reward of the samples", colour=SAMPLED, anchor="start"))
    greedy = "of the likeliest answers to held-out problems"
    parts.append(_text(LEFT + 190, 20, greedy, colour=HELD_OUT, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _line(points: Iterable[tuple[float, float]], colour: str, width: float = 2) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, *, colour: str = "#333333", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'
