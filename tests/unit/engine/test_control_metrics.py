"""The metric of adapters that gateways route requests by."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from mlx_parallm.engine.control_metrics import ControlMetrics

FAMILY = "vllm:lora_requests_info"


def test_only_the_latest_adapters_are_listed() -> None:
    registry = CollectorRegistry()
    metrics = ControlMetrics(registry, 4)
    metrics.on_requests({"b", "a"}, {"c"})
    metrics.on_requests({"a"}, ())
    (family,) = (each for each in registry.collect() if each.name == FAMILY)
    (sample,) = family.samples
    assert sample.labels == {
        "max_lora": "4",
        "waiting_lora_adapters": "",
        "running_lora_adapters": "a",
    }
    assert sample.value > 1.7e9


def test_names_are_sorted_and_divided_by_commas() -> None:
    registry = CollectorRegistry()
    ControlMetrics(registry, 4).on_requests({"b", "a"}, {"d", "c"})
    labels = {"max_lora": "4", "waiting_lora_adapters": "c,d", "running_lora_adapters": "a,b"}
    assert registry.get_sample_value(FAMILY, labels)
