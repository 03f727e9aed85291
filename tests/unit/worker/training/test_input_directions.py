"""Principal directions as first factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.worker.training import input_directions
from mlx_parallm.worker.training.input_directions import InputDirections, whitened
from mlx_parallm.worker.training.trainable import TrainedLayer
from mlx_parallm.worker.training.trained_model import TrainedModel

WIDTH, RANK = 40, 3
TEXTS = [PoolingInput((3, 1, 4)), PoolingInput((1, 5)), PoolingInput((9, 2, 6, 5))]


class TwoLayers:
    """Embeds tokens and runs them, with two of padding, through two linear layers."""

    def __init__(self, scale: float = 1.0) -> None:
        table = np.random.default_rng(1).standard_normal((10, WIDTH)).astype(np.float32)
        self.table = mx.array(scale * table)
        self.modules: Mapping[str, nn.Module] = {
            "a": nn.Linear(WIDTH, WIDTH),
            "b": nn.Linear(WIDTH, 5),
            "unused": nn.Linear(WIDTH, 5),
        }
        self.num_runs = 0

    def run_layers(self, text: PoolingInput) -> None:
        self.num_runs += 1
        x = self.table[mx.array([[*text.token_ids, 0, 0]])]
        self.modules["b"](self.modules["a"](x))


def directions(model: TwoLayers, *paths: str) -> InputDirections:
    layers = [TrainedLayer(path=path, num_inputs=WIDTH, num_outputs=5, rank=RANK) for path in paths]
    random = {path: mx.zeros((RANK, WIDTH)) for path in paths}
    return InputDirections(cast("TrainedModel", cast("Any", model)), layers, TEXTS, random)


def varied(count: int, deviations: list[float], seed: int = 0) -> np.ndarray:
    """Return rows around a mean that vary so much along orthogonal directions."""
    draw = np.random.default_rng(seed)
    axes = np.linalg.qr(draw.standard_normal((WIDTH, len(deviations))))[0]
    rows = draw.standard_normal((count, len(deviations))) * deviations @ axes.T
    return (rows + 7.0).astype(np.float32)


@pytest.mark.parametrize("count", [12, 500])
def test_directions_are_those_of_an_exact_decomposition(count: int) -> None:
    inputs = varied(count, [9.0, 5.0, 3.0, *[0.5] * 20])
    factors = whitened(inputs, np.zeros((RANK, WIDTH), np.float32))
    centred = inputs.astype(np.float64) - inputs.mean(0, dtype=np.float64)
    exact = np.linalg.svd(centred, full_matrices=False)[2][:RANK]
    units = factors / np.linalg.norm(factors, axis=1, keepdims=True)
    np.testing.assert_allclose(np.abs(np.sum(units * exact, axis=1)), 1.0, atol=1e-5)


def test_products_vary_by_1() -> None:
    inputs = varied(300, [9.0, 5.0, 3.0, 1.0])
    products = inputs @ whitened(inputs, np.zeros((RANK, WIDTH), np.float32)).T
    np.testing.assert_allclose(products.std(axis=0), 1.0, rtol=1e-4)
    np.testing.assert_allclose(np.corrcoef(products.T), np.eye(RANK), atol=1e-4)


def test_weak_directions_are_not_scaled_up() -> None:
    inputs = varied(300, [100.0, 1e-1, 1e-2])
    sizes = np.linalg.norm(whitened(inputs, np.zeros((RANK, WIDTH), np.float32)), axis=1)
    assert np.all(sizes <= sizes[0] / input_directions.LEAST_SHARE * 1.001)


@pytest.mark.parametrize(
    ("inputs", "num_found"), [(varied(2, [3.0, 2.0]), 1), (varied(1, [1.0]), 0)]
)
def test_directions_that_texts_lack_are_random(inputs: np.ndarray, num_found: int) -> None:
    fallback = np.random.default_rng(5).uniform(-1, 1, (RANK, WIDTH)).astype(np.float32)
    factors = whitened(inputs, fallback)
    np.testing.assert_array_equal(factors[num_found:], fallback[num_found:])
    assert not np.any(np.all(factors[:num_found] == fallback[:num_found], axis=1))


def test_padding_is_not_measured_and_modules_stay_as_they_were() -> None:
    model = TwoLayers()
    classes = {path: type(module) for path, module in model.modules.items()}
    result = directions(model, "a", "b").wait()
    tokens = [token for text in TEXTS for token in text.token_ids]
    rows = np.array(model.table)[tokens]
    np.testing.assert_allclose(result["a"], whitened(rows, np.zeros((RANK, WIDTH))), atol=1e-6)
    assert {path: type(module) for path, module in model.modules.items()} == classes


def test_stages_are_texts_and_layers_and_the_last_one_is_left_for_wait() -> None:
    model = TwoLayers()
    expected = directions(model, "a", "b").wait()
    pending = directions(model, "a", "b")
    assert pending.num_stages == len(TEXTS) + 2
    while pending.num_stages > 1:
        pending.advance()
    result = pending.wait()
    assert pending.num_stages == 0
    assert all(np.array_equal(result[path], expected[path]) for path in expected)


def test_memory_is_bounded_by_running_the_texts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = directions(TwoLayers(), "a", "b").wait()
    monkeypatch.setattr(input_directions, "MAX_BYTES", 1)
    model = TwoLayers()
    model.modules = TwoLayers().modules
    apart = directions(model, "a", "b")
    assert apart.num_stages == 2 * len(TEXTS) + 2
    np.testing.assert_allclose(apart.wait()["a"], expected["a"], atol=1e-6)
    assert model.num_runs == 2 * len(TEXTS)


def test_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_directions, "MAX_TOKENS", 5)
    model = TwoLayers()
    directions(model, "a").wait()
    assert model.num_runs == 2


@pytest.mark.parametrize(
    ("scale", "path", "why"), [(1.0, "unused", "none"), (float("nan"), "a", "not finite")]
)
def test_layers_without_directions_are_refused(scale: float, path: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        directions(TwoLayers(scale), path).wait()
    assert caught.value.param == "trainable.init"
