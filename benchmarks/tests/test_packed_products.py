"""Times of packed products: what is run for which rows, and the average of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.gpu import packed_products
from benchmarks.gpu.packed_products import PACKINGS, Weight, device_us, layer_times, print_table
from mlx_parallm.worker.layers.packed_kernel import PackedKernels
from tests.kernels.shim_compile import require_compiler
from tests.kernels.tensor_shim import TensorShim

ROWS = (2, 20)


def test_times_are_of_one_product() -> None:
    calls: list[int] = []

    def record(run: Callable[[], Any]) -> tuple[list[dict[str, Any]], float]:
        calls.clear()
        run()
        return [{"cat": "kernel", "dur": 6.0} for _ in calls] + [{"cat": "cpu_op", "dur": 1e9}], 0.0

    def product() -> mx.array:
        calls.append(1)
        return mx.zeros(1)

    assert device_us(record, [product, product]) == pytest.approx(6.0)


@pytest.mark.parametrize("is_added", [False, True])
def test_every_packing_is_run_for_all_rows(
    is_added: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    weights = {"o": Weight(24, 2048, 1, is_added=is_added)}
    monkeypatch.setattr(packed_products, "WEIGHTS", weights)
    kernels, names = PackedKernels(shim := TensorShim()), list[str]()
    shim.mutate = lambda name, body: names.append(name.rpartition("_")[0]) or body
    times = layer_times(kernels, lambda run: (run() or [], 0.0), "o", ROWS)
    assert set(times) == {"bf16", *PACKINGS}
    assert all(set(part) == set(ROWS) for part in times.values())
    assert {"packed_rows", "packed_tiles"} <= set(names)
    print_table({"o": times}, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(ROWS)
