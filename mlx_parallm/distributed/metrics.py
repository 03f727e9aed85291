"""The metrics of ranks: how many there are, and how far the slowest is behind."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from mlx_parallm.distributed.link import LeaderLink
from mlx_parallm.distributed.watch import Watch


class RankMetrics(Collector):
    """Reads the metrics at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._watch: Watch | None = None
        self._link: LeaderLink | None = None
        registry.register(self)

    def watch(self, watch: Watch, link: LeaderLink) -> None:
        """Read from these from now on."""
        self._watch, self._link = watch, link

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        if self._watch is None or self._link is None:
            return
        reports = self._watch.report()
        yield GaugeMetricFamily(
            "mlx_parallm:ranks",
            "Processes that compute the generation models together.",
            value=len(reports) + 1,
        )
        yield GaugeMetricFamily(
            "mlx_parallm:rank_step_skew_seconds",
            "Time until the slowest rank had begun the latest op that rank 0 had begun.",
            value=self._watch.skew_s(),
        )
        ages = GaugeMetricFamily(
            "mlx_parallm:rank_beat_age_seconds",
            "Time since the latest beat of a rank.",
            labels=["rank"],
        )
        ops = CounterMetricFamily(
            "mlx_parallm:rank_ops", "Ops that a rank has ended.", labels=["rank"]
        )
        for rank, report in reports.items():
            ages.add_metric([str(rank)], report.age_s)
            ops.add_metric([str(rank)], report.num_ended)
        yield ages
        yield ops
        yield CounterMetricFamily(
            "mlx_parallm:rank_log_bytes",
            "Bytes of the log that each rank got; divide by the messages for those of a step.",
            value=self._link.num_bytes,
        )
        yield CounterMetricFamily(
            "mlx_parallm:rank_log_messages",
            "Messages of the log.",
            value=self._link.num_messages,
        )
