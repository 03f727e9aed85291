"""The elements of inputs that choose by whole numbers, through all layers that hand them on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.api.nets.checks import checked_inputs
from mlx_parallm.models.nets import choices
from mlx_parallm.models.nets.fields import Fields
from mlx_parallm.models.nets.layer import Layer, TensorForm
from mlx_parallm.models.nets.plan import INTEGERS, LAYER_TYPES, NetPlan, parse_net
from mlx_parallm.models.nets.pointwise import Function
from mlx_parallm.types.errors import InvalidRequestError, ModelLoadError
from mlx_parallm.types.nets import ANY, Choices
from mlx_parallm.worker.nets.layers import forward
from tests.builders.nets import layer, random_weights, tensor

SIDE = 4
#: ``PASSING``: the types of layers that hand whole numbers on.
PASSING = {"identity", "flatten", "slice", "concat"}
#: ``CHOOSING``: those that choose by whole numbers, with the field that says among how many.
CHOOSING = {"embedding": "num_embeddings", "one_hot": "num_classes"}
#: ``FIELDS``: fields of each type, for an input of ``SIDE`` in each of three dimensions.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    **{function: {} for function in Function},
    "linear": {"in_features": SIDE, "out_features": 2},
    "conv2d": {"in_channels": SIDE, "out_channels": 2, "kernel_size": 1},
    "max_pool2d": {"kernel_size": 1},
    "avg_pool2d": {"kernel_size": 1},
    "layer_norm": {"normalized_shape": SIDE},
    "batch_norm": {"num_features": SIDE},
    "embedding": {"num_embeddings": 5, "embedding_dim": 2},
    "lstm": {"input_size": SIDE, "hidden_size": 2},
    "gru": {"input_size": SIDE, "hidden_size": 2},
    "flatten": {},
    "concat": {},
    "add": {},
    "multiply": {},
    "slice": {"start": 1, "stop": 3},
    "one_hot": {"num_classes": 5},
    "scale": {"factor": 2},
    "clip": {"low": 0},
    "normalize": {"shape": [SIDE] * 3},
    "parameter": {"shape": [2]},
}


def layer_of(kind: str) -> Layer:
    fields = Fields({"type": kind, **FIELDS[kind]}, kind)
    fields.kind = fields.text("type")
    return LAYER_TYPES[kind].read(kind, () if kind == "parameter" else ("x",), fields)


@pytest.mark.parametrize("kind", LAYER_TYPES)
def test_every_layer_that_takes_whole_numbers_is_known(kind: str) -> None:
    each, whole = layer_of(kind), TensorForm(sizes=(SIDE,) * 3, is_integer=True)
    try:
        form = each.form(*(whole for _ in each.inputs))
    except ModelLoadError as refusal:
        form, why = None, str(refusal)
    else:
        why = ""
    assert form or "whole numbers" in why or "floating point" in why
    assert (form is not None and form.is_integer) == (kind in PASSING)
    assert (each.num_choices is not None) == (kind in CHOOSING)
    if kind in PASSING:
        assert form is not None
        assert list(each.choices_before([Choices(0, 1, 7)], [whole]))


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a net of layers that hand whole numbers on, and at the end some that choose by them."""
    timed = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    sizes = st.lists(st.integers(1, 3), max_size=3)
    inputs = [
        tensor(f"x{place}", *([-1] * is_timed), *draw(sizes), dtype=draw(st.sampled_from(INTEGERS)))
        for place, is_timed in enumerate(timed)
    ]
    forms = {
        each["name"]: each["shape"][1 + is_timed :]
        for each, is_timed in zip(inputs, timed, strict=True)
    }
    layers: list[dict[str, Any]] = []
    for place in range(draw(st.integers(0, 8))):
        name, source = f"l{place}", draw(st.sampled_from(sorted(forms)))
        made, forms[name] = draw(passing(name, source, forms))
        layers.append(made)
    for place in range(draw(st.integers(1, 3))):
        kind, source = draw(st.sampled_from(sorted(CHOOSING))), draw(st.sampled_from(sorted(forms)))
        count = {CHOOSING[kind]: draw(st.integers(1, 4))}
        more = {"embedding_dim": 1} if kind == "embedding" else {}
        layers.append(layer(f"c{place}", kind, source, **count, **more))
    return net(inputs, layers, forms)


def net(
    inputs: list[dict[str, Any]], layers: list[dict[str, Any]], forms: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Return a net whose outputs are what its choosing layers read, and its first input."""
    timed = {each["name"]: each["shape"][1:2] == [-1] for each in inputs}
    for each in layers:
        timed[each["name"]] = any(timed[source] for source in each["inputs"])
    sources = [each["inputs"][0] for each in layers if each["type"] in CHOOSING]
    outputs = [
        tensor(name, *([-1] * timed[name]), *forms[name], dtype="int64")
        for name in {inputs[0]["name"], *sources}
    ]
    model_type = {"model_type": "mlx_parallm_net"}
    return {**model_type, "inputs": inputs, "layers": layers, "outputs": outputs}


@st.composite
def passing(
    draw: st.DrawFn, name: str, source: str, forms: Mapping[str, list[int]]
) -> tuple[dict[str, Any], list[int]]:
    """Draw a layer that hands whole numbers on; return it with the sizes that it makes."""
    sizes = forms[source]
    kind = draw(st.sampled_from(sorted(PASSING if sizes else PASSING - {"slice", "concat"})))
    if kind == "slice":
        start = draw(st.integers(0, sizes[-1] - 1))
        stop = draw(st.integers(start + 1, sizes[-1]))
        return layer(name, kind, source, start=start, stop=stop), [*sizes[:-1], stop - start]
    if kind == "concat":
        like = [each for each, other in forms.items() if other and other[:-1] == sizes[:-1]]
        chosen = draw(st.lists(st.sampled_from(like), min_size=1, max_size=3))
        last = sum(forms[each][-1] for each in chosen)
        return layer(name, kind, *chosen), [*sizes[:-1], last]
    flat = [int(np.prod(sizes, dtype=int))]
    return layer(name, kind, source), flat if kind == "flatten" else sizes


def numbers_for(plan: NetPlan, draw: np.random.Generator) -> dict[str, np.ndarray]:
    """Return zeros, which every choice allows, and a number that some do not."""
    arrays: dict[str, np.ndarray] = {}
    for spec in plan.signature.inputs:
        shape = [2, *(3 if size == ANY else size for size in spec.shape[1:])]
        arrays[spec.name] = np.zeros(shape, spec.dtype)
    spec = plan.signature.inputs[draw.integers(len(plan.signature.inputs))]
    least = -1 if spec.dtype.startswith("int") else 1
    number = draw.integers(least, 1 if spec.dtype == "bool" else 4, endpoint=True)
    flat = arrays[spec.name].reshape(-1)
    flat[draw.integers(flat.size)] = number
    return arrays


def fits(plan: NetPlan, content: dict[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
    """True if every number that a choosing layer reads is one of its choices."""
    inputs = {name: mx.array(array) for name, array in arrays.items()}
    outputs, _ = forward(plan, random_weights(content), inputs)
    return all(
        ((outputs[each.inputs[0]] >= 0) & (outputs[each.inputs[0]] < each.num_choices)).all().item()
        for each in plan.layers
        if each.num_choices is not None
    )


@given(configs(), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_numbers_are_refused_exactly_where_a_layer_has_no_such_choice(
    content: dict[str, Any], seed: int
) -> None:
    plan, draw = parse_net(content), np.random.default_rng(seed)
    for _ in range(5):
        arrays = numbers_for(plan, draw)
        expected = (
            nullcontext()
            if fits(plan, content, arrays)
            else pytest.raises(InvalidRequestError, match="of a row, which may be one of")
        )
        with expected:
            checked_inputs(plan.signature, arrays, "inputs", max_rows=2)


def test_choices_are_told_in_ranges() -> None:
    content = {
        "inputs": [tensor("x", 2, 3, dtype="int32"), tensor("y", 2, dtype="uint8")],
        "layers": [
            layer("last", "slice", "x", start=2, stop=3),
            layer("kind", "one_hot", "last", num_classes=5),
            layer("flat", "flatten", "x"),
            layer("first", "slice", "flat", stop=2),
            layer("all", "concat", "first", "y"),
            layer("words", "embedding", "all", num_embeddings=9, embedding_dim=1),
        ],
        "outputs": [tensor("words", 4, 1)],
    }
    x, y = parse_net({"model_type": "mlx_parallm_net", **content}).signature.inputs
    assert x.choices == (Choices(0, 2, 9), Choices(2, 3, 5), Choices(5, 6, 5))
    assert y.choices == (Choices(0, 2, 9),)


@pytest.mark.parametrize(
    ("limit", "why"),
    [
        ("MAX_PIECES", "layer 'last': embedding and one_hot read whole numbers in more than 2"),
        ("MAX_RANGES", "input 'x': its whole numbers have 3 ranges of choices; at most 2"),
    ],
)
def test_nets_with_too_much_to_follow_are_refused(
    limit: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, limit, 2)
    content = {
        "inputs": [tensor("x", 3, 2, dtype="int32")],
        "layers": [
            layer("last", "slice", "x", start=1, stop=2),
            layer("kind", "one_hot", "last", num_classes=5),
        ],
        "outputs": [tensor("kind", 3, 1, 5)],
    }
    with pytest.raises(ModelLoadError, match=why):
        parse_net({"model_type": "mlx_parallm_net", **content})
