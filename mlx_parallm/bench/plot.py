"""A plot of a run: the distribution of its times, and tokens over time.

It needs matplotlib; no other module imports this one at its top.
"""

# Many of matplotlib's methods take options without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mlx_parallm.bench.record import RequestRecord
from mlx_parallm.bench.statistics import chunk_gaps_s, tokens_per_chunk


def plot_run(records: Sequence[RequestRecord], path: Path, title: str) -> None:
    """Write an image of three panels to ``path``, whose suffix decides the format.

    Raises:
        OSError: the file cannot be written.
        ValueError: the suffix is no known format.
    """
    answered = [record for record in records if record.error is None and record.chunk_times_s]
    figure = Figure(figsize=(12, 4), layout="constrained")
    first, second, third = figure.subplots(1, 3)
    ttft_ms = [1000 * (record.chunk_times_s[0] - record.start_s) for record in answered]
    gaps_ms = [1000 * gap for record in answered for gap in chunk_gaps_s(record.chunk_times_s)]
    _plot_distribution(first, ttft_ms, "time to first token (ms)")
    _plot_distribution(second, gaps_ms, "time between chunks (ms)")
    _plot_throughput(third, answered)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _plot_distribution(axes: Axes, values: list[float], label: str) -> None:
    ordered = sorted(values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.plot(ordered, shares, drawstyle="steps-post")
    axes.set(xlabel=label, ylabel="share at or below", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _plot_throughput(axes: Axes, records: Sequence[RequestRecord]) -> None:
    begin = min((record.start_s for record in records), default=0.0)
    per_second: dict[int, int] = {}
    for record in records:
        for now, tokens in zip(record.chunk_times_s, tokens_per_chunk(record), strict=True):
            second = int(now - begin)
            per_second[second] = per_second.get(second, 0) + tokens
    seconds = range(max(per_second, default=0) + 1)
    axes.step(seconds, [per_second.get(second, 0) for second in seconds], where="post")
    axes.set(xlabel="seconds since the start", ylabel="output tokens per second", ylim=(0, None))
    axes.grid(alpha=0.3)
