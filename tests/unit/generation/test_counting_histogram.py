"""A histogram that takes equal values at once has the samples of one that takes each."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from mlx_parallm.generation.metrics import CountingHistogram

BUCKETS = (0.25, 1.0, 4.0)
#: Sums of these are exact, in any order.
VALUES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 4.0, 5.0]))


@given(VALUES)
def test_counted_values_are_observed_each(values: list[float]) -> None:
    ours, stock = CollectorRegistry(), CollectorRegistry()
    counting = CountingHistogram("x", "", ("y",), registry=ours, buckets=BUCKETS).labels("z")
    histogram = Histogram("x", "", ("y",), registry=stock, buckets=BUCKETS).labels("z")
    counting.observe_counts(Counter(values))
    for value in values:
        histogram.observe(value)

    def samples(registry: CollectorRegistry) -> list[tuple[str, dict[str, str], float]]:
        families = registry.collect()
        return [
            (sample.name, sample.labels, sample.value)
            for family in families
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    assert samples(ours) == samples(stock)
