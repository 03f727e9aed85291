"""Malformed schemas are refused, or accepted; nothing else happens."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.json_schema.rewrite import rewritten
from mlx_parallm.grammar.json_schema.rules import Rules
from mlx_parallm.grammar.json_schema.well_formed import TYPES
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object
from tests.small_vocabulary import small_compiler

COMPILER = small_compiler()
WRONG: list[Any] = [
    *(None, True, -3, 1.5, 10**400, 1e300, "3", "[", {}),
    *([], ["x", 1], [["string"]], {"a": 1}, {"a": [1]}, [{"type": {"a": 1}}]),
]
PLACES: dict[str, Any] = {
    "root": lambda part: part,
    "oneOf": lambda part: {"oneOf": [part, {"const": 5}]},
    "not": lambda part: {"not": part},
    "if": lambda part: {"if": part, "then": {"type": "integer"}},
    "propertyNames": lambda part: {"type": "object", "propertyNames": part},
    "uniqueItems": lambda part: {"items": {"enum": [1, 2]}, "uniqueItems": True, **part},
    "reference": lambda part: {"oneOf": [{"$ref": "#/x/y"}, {"const": 5}], "x": {"y": part}},
}
KEYWORDS = sorted({*TYPES, *Rules(Document({})).by_keyword, "const"})


def compiles(schema: Any, *, strict: bool = True) -> bool:
    """Return whether a grammar was made; any other exception than a refusal passes through."""
    try:
        return bool(COMPILER.compile(specs.json_schema(schema, strict=strict)))
    except InvalidRequestError:
        return False


def test_every_keyword_with_a_value_of_a_wrong_type_is_rewritten_or_left() -> None:
    for keyword, wrong, place in itertools.product(KEYWORDS, WRONG, PLACES.values()):
        assert is_object(rewritten(place({keyword: wrong})))


@pytest.mark.slow
@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_value_of_a_wrong_type_is_refused_or_accepted(keyword: str) -> None:
    for wrong, place in itertools.product(WRONG, PLACES.values()):
        schema = place({keyword: wrong})
        assert compiles(schema, strict=False) or not compiles(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": ["x"]}},
        {"not": {"type": {"a": 1}}},
        {"oneOf": [{"type": [["string"]]}, {"type": "integer"}]},
        {"items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": "3"},
        {"items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": -3},
        {"type": "integer", "minimum": 10**400},
        {"oneOf": [{"minimum": 10**400}, {"maximum": 1}]},
        {"dependencies": {"a": 5}, "type": "object"},
        {"oneOf": [{"$ref": "#/properties"}], "properties": {"type": {"type": "string"}}},
    ],
    ids=str,
)
def test_a_malformed_schema_is_refused_in_strict(schema: Any) -> None:
    with pytest.raises(InvalidRequestError):
        COMPILER.compile(specs.json_schema(schema))


def test_recursive_references_stand_beside_schemas_that_are_no_objects() -> None:
    for other in (True, False):
        for members in ([other, {"$ref": "#/$defs/d"}], [{"$ref": "#/$defs/d"}, other]):
            compiles({"allOf": members, "$defs": {"d": {"$ref": "#"}}})
