"""Configs with random faults: each is refused by name, or its net can be computed."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.models.nets.plan import NetPlan, parse_net
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.nets import TensorSpec
from mlx_parallm.worker.nets.layers import forward

GOLDEN = Path(__file__).parents[3] / "golden" / "nets"
#: ``MAX_NUMBERS``: the most weights, and numbers of a row, of a net that is computed here.
MAX_NUMBERS = 1 << 16
ROWS, TIMES = 2, 3

SIZES = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 6, 8, 32, 64, 2**40])
WRONG = st.sampled_from([None, True, False, "", "x", 0.5, -2.0, 1e400, [], {}, [[1]], "0", "1"])
VALUES = st.one_of(
    SIZES,
    WRONG,
    st.lists(SIZES, max_size=4),
    st.sampled_from(["tanh", "softmax", "flatten", "concat", "add", "scale", "one_hot", "clip"]),
    st.sampled_from(["int64", "uint8", "bool", "float16", "bfloat16", "float32"]),
)
REMOVED = object()


@cache
def configs() -> list[Any]:
    """Return the configs of the golden nets."""
    files = sorted(GOLDEN.glob("*.safetensors"))
    loaded: list[Any] = [mx.load(str(file), return_metadata=True) for file in files]
    return [json.loads(metadata["config"]) for _, metadata in loaded]


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values of a config."""
    below = content.items() if isinstance(content, dict) else enumerate(content)
    paths: list[tuple[Any, ...]] = []
    for key, value in below:
        paths.append((*path, key))
        if isinstance(value, dict | list):
            paths += places(value, (*path, key))
    return paths


def with_change(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a config with one value changed or removed."""
    changed = copy.deepcopy(content)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if value is REMOVED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


def random_input(spec: TensorSpec) -> mx.array:
    shape = [ROWS, *(TIMES if size < 0 else size for size in spec.shape[1:])]
    if spec.dtype.startswith(("float", "bfloat")):
        return mx.random.normal(shape).astype(getattr(mx, spec.dtype))
    whole = mx.random.randint(0, min((each.count for each in spec.choices), default=2), shape)
    return whole.astype(mx.bool_ if spec.dtype == "bool" else getattr(mx, spec.dtype))


def check(plan: NetPlan) -> None:
    """Compute a net, unless it is large, and compare shapes and dtypes with its signature."""
    parameters, signature = plan.parameters, plan.signature
    sizes = [math.prod(each.shape) for each in parameters.values()]
    sizes += [math.prod(spec.shape[1 + spec.has_time :]) for spec in signature.inputs]
    if sum(sizes) > MAX_NUMBERS:
        return
    weights = {
        name: mx.zeros(each.shape, getattr(mx, each.dtypes[0])) for name, each in parameters.items()
    }
    inputs = {spec.name: random_input(spec) for spec in signature.inputs}
    outputs, states = forward(plan, weights, inputs)
    mx.eval(outputs, states)
    for specs, arrays in ((signature.outputs, outputs), (signature.states, states)):
        assert arrays.keys() == {spec.name for spec in specs}
        for spec in specs:
            sizes = spec.shape[1:]
            wanted = (ROWS, *(TIMES if size < 0 else size for size in sizes))
            assert arrays[spec.name].shape == wanted, spec
            assert str(arrays[spec.name].dtype).endswith(spec.dtype.rstrip("_")), spec


def try_changes(data: st.DataObject, most: int) -> None:
    """Read a config with some changes, and compute its net if it is accepted."""
    content = data.draw(st.sampled_from(configs()))
    for _ in range(data.draw(st.integers(1, most))):
        path = data.draw(st.sampled_from(places(content)))
        content = with_change(content, path, data.draw(VALUES | st.just(REMOVED)))
        if not isinstance(content.get("layers"), list):
            break
    try:
        plan = parse_net(content)
    except ModelLoadError as problem:
        refusal = str(problem)
    else:
        refusal = "config.json: "
        check(plan)
    assert refusal.startswith("config.json: ")
    assert len(refusal) < 1000


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_changed_configs_are_refused_or_computed(data: st.DataObject) -> None:
    try_changes(data, 2)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=1500, deadline=None)
def test_many_changed_configs_are_refused_or_computed(data: st.DataObject) -> None:
    try_changes(data, 6)


def test_configs_as_they_are_can_be_computed() -> None:
    for content in configs():
        check(parse_net(content))
