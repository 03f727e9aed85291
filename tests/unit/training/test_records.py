"""Records of sessions as JSON: no field is lost, and folders of earlier versions are read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pytest

from mlx_parallm.storage.records import as_record, dumped
from mlx_parallm.training.records import Costs, Example, MezoRecord, SessionConfig, SessionState
from mlx_parallm.types.pooling import PoolingInput
from mlx_parallm.types.training import ChoiceInput
from tests.unit.training.worker_sessions import CONFIG, EXAMPLES

NUMBERS = itertools.count(1)


def filled(hint: Any, default: Any = MISSING) -> Any:
    """Return a value of a type that is not the default of its field."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        kind, types = cast("Any", hint), get_type_hints(hint)
        return kind(**{part.name: filled(types[part.name], part.default) for part in fields(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(member for member in hint if member is not default)
    if origin is Literal:
        return next(member for member in args if member != default)
    if origin is tuple:
        return (filled(args[0]), filled(args[0]))
    if origin is Mapping:
        return {"a": [1, None, {"b": "\ud800"}]}
    if args:  # a union
        return filled(args[0])
    if hint is bool:
        return default is not True
    return hint(next(NUMBERS)) if hint in (int, str) else next(NUMBERS) + 0.5


@pytest.mark.parametrize("kind", [SessionConfig, SessionState, MezoRecord, Costs])
def test_every_field_of_a_record_is_kept(kind: type[Any]) -> None:
    record = filled(kind)
    assert all(getattr(record, field.name) != field.default for field in fields(kind))
    again = as_record(json.loads(dumped(record)), kind)
    assert again == record
    # Enumerations and tuples are such again.
    assert repr(again) == repr(record)


@pytest.mark.parametrize("kind", [PoolingInput, ChoiceInput])
def test_every_field_of_an_example_is_kept(kind: type[Any]) -> None:
    example = Example(filled(kind), 3, {"a": [1, None]})
    again = Example.from_json(json.loads(dumped(example.to_json())))
    assert again == example
    assert repr(again) == repr(example)


def test_costs_are_added_field_by_field() -> None:
    costs = [filled(Costs), filled(MezoRecord)]
    total = costs[0] + costs[1]
    for field in fields(Costs):
        assert getattr(total, field.name) == sum(getattr(cost, field.name) for cost in costs)


@pytest.mark.parametrize("stored", [None, 5, [], [1], "ab", {}, {"label": 1}, {"token_ids": [1]}])
def test_a_line_that_is_no_example(stored: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Example.from_json(stored)


def test_folders_of_earlier_versions_are_read() -> None:
    choices = {"token_ids": [1, 2], "choices": [[3], [4, 5]], "averages": True, "label": 1}
    assert Example.from_json(choices) == Example(ChoiceInput((1, 2), ((3,), (4, 5)), True), 1)
    pooling = {
        "token_ids": [5, 6, 7, 4], "task": "mlm", "second_at": None, "places": [3],
        "candidates": [3, 9], "num_unattended": 0, "label": 0,
    }  # fmt: skip
    assert Example.from_json(pooling) == EXAMPLES[0]
    config = json.loads(dumped(CONFIG))
    for name in ("paths", "init", "trains_head", "makes_head"):
        del config["trainable"][name]
    del config["adapter"]
    assert as_record(config, SessionConfig) == CONFIG


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("seed",), "7", "^seed: str is no int$"),
        (("seed",), True, "^seed: bool is no int$"),
        (("seed",), None, "^seed: NoneType is no int$"),
        (("order",), "none", "^order: "),
        (("trainable", "layers"), [1, "2"], "^trainable: layers: str is no int$"),
        (("trainable",), [], "^trainable: it is no object$"),
        (("estimator", "new"), 1, "^estimator: it has an unknown field new$"),
        (("objective",), [], "^objective: it is no object$"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_the_field(
    path: tuple[str, ...], value: Any, message: str
) -> None:
    content = json.loads(dumped(CONFIG))
    place = content
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(TypeError, match=message):
        as_record(content, SessionConfig)
