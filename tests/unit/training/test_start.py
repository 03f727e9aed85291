"""The parameters that a session takes from an adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.training.start import StartParameters
from mlx_parallm.types.errors import InvalidRequestError


def tensor(*shape: int, seed: int = 0) -> HostTensor:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return HostTensor(numbers)


LORA = LowRank(kind="linear", a=tensor(2, 6), b=tensor(5, 2), scale=2.0)
HEAD = {"classifier.weight": tensor(3, 6), "classifier.bias": tensor(3)}
ADAPTER = AdapterWeights({"layers.0.query": LORA}, HEAD, "SEQ_CLS")


def test_factors_and_head_survive_their_file() -> None:
    start = StartParameters.of_arrays(StartParameters.of_adapter(ADAPTER).arrays())
    np.testing.assert_array_equal(start.first["layers.0.query"], LORA.a.array)
    np.testing.assert_array_equal(start.second["layers.0.query"], LORA.b.array.T)
    assert set(start.head) == set(HEAD)
    np.testing.assert_array_equal(start.head["classifier.bias"], HEAD["classifier.bias"].array)


def test_bfloat16_is_read_exactly() -> None:
    exact = np.array([[1.5, -0.25]], np.float32)
    packed = HostTensor((exact.view(np.uint32) >> 16).astype(np.uint16), is_bfloat16=True)
    adapter = AdapterWeights({"query": replace(LORA, a=packed, b=tensor(5, 1))})
    np.testing.assert_array_equal(StartParameters.of_adapter(adapter).first["query"], exact)


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        (AdapterWeights({"q": replace(LORA, magnitude=tensor(5))}), "DoRA"),
        (AdapterWeights({"q": replace(LORA, kind="embedding")}), "no linear layer"),
        (AdapterWeights({"q": LORA, "v": replace(LORA, scale=1.0)}), "several ranks or scales"),
        (
            AdapterWeights({"q": LORA, "v": replace(LORA, a=tensor(3, 6), b=tensor(5, 3))}),
            "several ranks or scales",
        ),
        (replace(ADAPTER, task_type="TOKEN_CLS"), "head is one of tokens"),
    ],
)
def test_other_adapters_are_refused(adapter: AdapterWeights, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        StartParameters.of_adapter(adapter)
    assert caught.value.param == "adapter"
