"""Adapters arrive on a worker whole, and their digest covers all that decides their effect.

A new field fails these tests until it has a value here, travels, and is part of the digest.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank, join_adapter, split_adapter
from mlx_parallm.worker.device.shared_tensors import SharedTensor


def tensor(*shape: int, seed: int = 0, is_bfloat16: bool = False) -> HostTensor:
    numbers = np.random.default_rng([seed, *shape]).integers(0, 1 << 15, shape)
    return HostTensor(numbers.astype(np.uint16 if is_bfloat16 else np.float32), is_bfloat16)


#: MODULE, ADAPTER: a value of every field, and another one that has another effect.
MODULE: dict[str, tuple[Any, Any]] = {
    "kind": ("embedding", "linear"),
    "a": (tensor(2, 5), tensor(2, 5, seed=1)),
    "b": (tensor(4, 2, is_bfloat16=True), tensor(4, 2, seed=1, is_bfloat16=True)),
    "scale": (0.75, 0.5),
    "magnitude": (tensor(4), None),
    "changes_head": (False, True),
}
FILLED_MODULE = LowRank(**{name: value for name, (value, _) in MODULE.items()})
PLAIN_MODULE = LowRank(kind="linear", a=tensor(2, 3), b=tensor(6, 2), scale=2.0)
ADAPTER: dict[str, tuple[Any, Any]] = {
    "modules": (
        {"model.embed": FILLED_MODULE, "model.q": PLAIN_MODULE},
        {"model.embed": FILLED_MODULE, "model.k": PLAIN_MODULE},
    ),
    "saved": ({"head.weight": tensor(3, 3)}, {"head.bias": tensor(3, 3)}),
    "task_type": ("SEQ_CLS", "TOKEN_CLS"),
    "copies": ({"model.embed": tensor(7)}, {"model.embed": tensor(7, seed=1)}),
    "of_checkpoint": (True, False),
    "is_transposed": (True, False),
}
#: WRITTEN: what concerns only the files that are written, so that it is in no digest.
WRITTEN = {"is_transposed"}
FILLED = AdapterWeights(**{name: value for name, (value, _) in ADAPTER.items()})


def shown(value: Any) -> Any:
    """Return a value in which tensors can be compared."""
    if isinstance(value, HostTensor):
        return value.array.tobytes(), value.shape, value.dtype
    if isinstance(value, LowRank | AdapterWeights):
        return {field.name: shown(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    return value


def test_every_field_has_a_value() -> None:
    for kind, values in ((LowRank, MODULE), (AdapterWeights, ADAPTER)):
        assert values.keys() == {field.name for field in fields(kind)}
    assert {field.name for field in fields(HostTensor)} == {"array", "is_bfloat16"}
    assert fields(SharedTensor) == fields(HostTensor)


def test_what_is_split_is_joined_whole() -> None:
    layout, tensors = split_adapter(FILLED)
    joined = join_adapter(layout, tensors)
    assert shown(joined) == shown(FILLED)
    assert joined.digest == FILLED.digest


@pytest.mark.parametrize("name", ADAPTER)
def test_every_field_of_an_adapter_is_in_its_digest(name: str) -> None:
    other = replace(FILLED, **{name: ADAPTER[name][1]})
    assert (other.digest == FILLED.digest) is (name in WRITTEN)


@pytest.mark.parametrize("name", MODULE)
def test_every_field_of_a_module_is_in_the_digest(name: str) -> None:
    module = replace(FILLED_MODULE, **{name: MODULE[name][1]})
    other = replace(FILLED, modules={**FILLED.modules, "model.embed": module})
    assert other.digest != FILLED.digest
