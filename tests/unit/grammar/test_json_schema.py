"""Schemas with keywords that llguidance does not know accept what they should, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.json_schema.patterns import complement
from mlx_parallm.grammar.json_schema.rewrite import rewritten
from mlx_parallm.grammar.regex.automaton import Comparison
from mlx_parallm.types.errors import InvalidRequestError
from tests.small_vocabulary import ids_of, small_compiler

COMPILER = small_compiler()
INTEGER = {"type": "integer"}
CAT: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": INTEGER},
    "required": ["kind"],
}
DOG: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
    "required": ["kind"],
}
AB = {"properties": {"a": INTEGER, "b": INTEGER}, "additionalProperties": False, "type": "object"}
# ANCHORED and NESTED_ID: references within them are not followed.
ANCHORED: dict[str, Any] = {"$defs": {"n": {"$anchor": "name", "minimum": 5, "minLength": 2}}}
NESTED_ID: dict[str, Any] = {"$defs": {"n": {"$id": "http://x/y", "minimum": 5}}}


def accepts(schema: Any, values: list[Any]) -> list[bool]:
    """Return which values a strict schema's grammar matches."""
    text = COMPILER.compile(specs.json_schema(schema))
    answers: list[bool] = []
    for value in values:
        matcher = COMPILER.matcher(text)
        ids = ids_of(json.dumps(value))
        taken = matcher.try_consume_tokens(ids) == len(ids)
        answers.append(taken and matcher.is_accepting())
    return answers


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        pytest.param(
            {"oneOf": [{"$ref": "#/$defs/cat"}, DOG], "$defs": {"cat": CAT}},
            [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "x"}],
            [{"kind": "cow"}, {"kind": "cat", "lives": "x"}],
            id="oneOf by a constant",
        ),
        pytest.param(
            {"oneOf": [{"type": "number"}, {"type": ["string", "null"]}, {"type": "array"}]},
            [1.5, "a", None, []],
            [True, {}],
            id="oneOf by type",
        ),
        pytest.param(
            AB | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": 1}, {"b": 1}],
            [{}, {"a": 1, "b": 2}],
            id="oneOf by presence",
        ),
        pytest.param(
            {"oneOf": [{"minimum": 0, "type": "integer"}, {"maximum": 9, "type": "integer"}]},
            [-1, 10],
            [0, 9],
            id="oneOf that overlaps",
        ),
        pytest.param(
            {"oneOf": [{"pattern": "^[a-c]+$"}, {"pattern": "^[x-z]+$"}]},
            ["abc", "xyz"],
            ["ax", "", 1],
            id="oneOf by expressions",
        ),
        pytest.param(
            {"oneOf": [AB, {"type": "object", "required": ["c"]}]},
            [{}, {"a": 1}, {"c": 1}],
            [{"d": 1}],
            id="oneOf by a forbidden property",
        ),
        pytest.param(
            {"oneOf": [{"enum": ["a", "b"]}, {"type": "string", "maxLength": 2}]},
            ["c", "ab", ""],
            ["a", "b", "abc"],
            id="oneOf with values",
        ),
        pytest.param(
            AB | {"dependentRequired": {"a": ["b"]}},
            [{}, {"b": 1}, {"a": 1, "b": 2}],
            [{"a": 1}],
            id="dependentRequired",
        ),
        pytest.param(
            AB | {"dependencies": {"a": ["b"], "b": {"properties": {"b": {"const": 1}}}}},
            [{}, {"b": 1}, {"a": 5, "b": 1}],
            [{"a": 1}, {"b": 2}],
            id="dependencies",
        ),
        pytest.param(
            AB | {"dependentSchemas": {"a": {"properties": {"a": {"minimum": 5}}}}},
            [{"a": 5}, {"b": 1}],
            [{"a": 4}],
            id="dependentSchemas",
        ),
        pytest.param(
            {
                "type": "object",
                "properties": {"kind": {"enum": ["x", "y"]}, "size": INTEGER},
                "required": ["kind"],
                "if": {"properties": {"kind": {"const": "x"}}},
                "then": {"required": ["size"]},
                "else": {"properties": {"size": False}},
            },
            [{"kind": "x", "size": 1}, {"kind": "y"}],
            [{"kind": "x"}, {"kind": "y", "size": 1}],
            id="if, then and else",
        ),
        pytest.param(
            {"type": ["string", "null"], "not": {"enum": ["ab", None]}},
            ["a", "abc", ""],
            ["ab", None],
            id="not of values",
        ),
        pytest.param(
            {"type": "object", "not": {"required": ["a", "b"]}},
            [{}, {"a": 1}, {"c": 1}],
            [{"a": 1, "b": 1}],
            id="not of names",
        ),
        pytest.param(
            {"properties": {"a": {"not": {}}, "b": INTEGER}, "type": "object"},
            [{}, {"b": 1}],
            [{"a": 1}],
            id="not of everything",
        ),
        pytest.param(
            {"type": "array", "items": {"enum": ["a", "b", 1]}, "uniqueItems": True},
            [[], ["b"], ["b", "a"], [1, "a", "b"]],
            [["a", "a"], ["a", "b", "a"], ["c"]],
            id="uniqueItems of values",
        ),
        pytest.param(
            {"type": "array", "maxItems": 1, "uniqueItems": True},
            [[], ["x"]],
            [[1, 2]],
            id="uniqueItems of one item",
        ),
        pytest.param(
            {"type": "string", "format": "no-such-format"}, ["x"], [1], id="unknown format"
        ),
        pytest.param({"type": "integer", "format": "int32"}, [1], ["x"], id="format of a number"),
        pytest.param(
            {"type": "string", "format": "json-pointer"}, ["", "/a/0"], ["a"], id="json-pointer"
        ),
        pytest.param(
            {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}},
            [{}, {"ab": 1}],
            [{"x": 1}],
            id="propertyNames",
        ),
        pytest.param(AB | {"minProperties": 1}, [{"a": 1}, {"b": 1}], [{}], id="minProperties"),
        pytest.param(
            AB | {"maxProperties": 1}, [{}, {"b": 1}], [{"a": 1, "b": 1}], id="maxProperties"
        ),
        pytest.param(
            {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1},
            [{"a": 1}, {"c": 1}],
            [{}],
            id="minProperties of an open object",
        ),
        pytest.param(
            {
                "$ref": "#/$defs/node",
                "$defs": {
                    "node": {
                        "type": "object",
                        "properties": {
                            "value": INTEGER,
                            "next": {"$ref": "#/$defs/node", "required": ["value"]},
                        },
                    }
                },
            },
            [{}, {"next": {"value": 1}}, {"next": {"value": 1, "next": {"value": 2}}}],
            [{"next": {}}, {"next": {"value": 1, "next": {}}}],
            id="recursive reference with siblings",
        ),
        pytest.param(
            {
                "$ref": "#/$defs/tree",
                "$defs": {
                    "tree": {
                        "type": "object",
                        "oneOf": [
                            {"properties": {"leaf": INTEGER}, "required": ["leaf"]},
                            {
                                "properties": {
                                    "all": {"type": "array", "items": {"$ref": "#/$defs/tree"}}
                                },
                                "required": ["all"],
                            },
                        ],
                    }
                },
            },
            [{"leaf": 1}, {"all": [{"leaf": 1}, {"all": []}]}],
            [{}, {"all": [{}]}, 1],
            id="recursive oneOf",
        ),
        pytest.param(
            {
                "properties": {"x": {"$ref": "#/oneOf/1/properties/y"}},
                "oneOf": [{"required": ["z"]}, {"properties": {"y": INTEGER}, "required": ["x"]}],
                "type": "object",
                "additionalProperties": False,
            },
            [{"x": 1}],
            [{"x": "a"}, {}],
            id="reference into a keyword that is rewritten",
        ),
    ],
)
def test_a_keyword_is_enforced(schema: Any, good: list[Any], bad: list[Any]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    # The newest draft has no dependencies, and formats are annotations by default.
    if schema.keys().isdisjoint(["dependencies", "format"]):
        assert [validator.is_valid(value) for value in (*good, *bad)] == (
            [True] * len(good) + [False] * len(bad)
        )
    assert accepts(schema, good) == [True] * len(good)
    assert accepts(schema, bad) == [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"oneOf": [{"pattern": "a+b"}, {"pattern": "ab+"}], "type": "string"}, "oneOf"),
        ({"oneOf": [{"format": "ipv4"}, {"format": "hostname"}], "type": "string"}, "oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"not": {"format": "email"}, "type": "string"}, "not"),
        ({"not": {"multipleOf": 3}, "type": "integer"}, "not"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"if": {"contains": {"const": 1}}, "then": {"minItems": 2}, "type": "array"}, "if"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"not": {"$ref": "#name"}, "type": "integer"}, "not"),
        (ANCHORED | {"not": {"$ref": "#name"}, "type": "object"}, "not"),
        (ANCHORED | {"propertyNames": {"$ref": "#name"}, "type": "object"}, "propertyNames"),
        (ANCHORED | {"if": {"$ref": "#name"}, "then": {"required": ["a"]}}, "if"),
        (ANCHORED | {"oneOf": [{"$ref": "#name"}, {"type": "integer", "minimum": 3}]}, "oneOf"),
        (NESTED_ID | {"not": {"$ref": "#/$defs/n"}, "type": "integer"}, "not"),
        ({"not": {"allOf": [{}] * 70 + [{"minimum": 3}]}, "type": "integer"}, "not"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        COMPILER.compile(specs.json_schema(schema))
    assert COMPILER.compile(specs.json_schema(schema, strict=False))


def test_a_schema_without_such_keywords_stays_itself() -> None:
    assert rewritten(AB) is AB


def test_properties_keep_their_order() -> None:
    schema = {
        "oneOf": [{"properties": {"z": {"const": 1}}, "required": ["z"]}, {"required": ["y"]}],
        "properties": {"a": INTEGER, "z": INTEGER},
        "type": "object",
    }
    assert accepts(schema, [{"z": 1, "a": 1}, {"a": 1, "z": 1}]) == [True, False]


COUNTED: list[Any] = [
    dict.fromkeys(names, 1)
    for count in range(5)
    for names in itertools.combinations(["a", "b", "c", "d"], count)
]


@pytest.mark.parametrize("required", [[], ["a"], ["c"], ["a", "c"], ["c", "d"]], ids=str)
@pytest.mark.parametrize("rest", [{}, {"additionalProperties": False}], ids=["open", "closed"])
def test_numbers_of_properties_beside_required_ones(
    required: list[str], rest: dict[str, Any]
) -> None:
    """Check that no object passes with too few or too many properties, whatever is required."""
    num_accepted = 0
    for least, most in itertools.product([None, 0, 1, 2, 3], [None, 0, 1, 2, 3]):
        bounds = {"minProperties": least, "maxProperties": most}
        kept = {key: value for key, value in bounds.items() if value is not None}
        schema = {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "required": required,
            **rest,
            **kept,
        }
        try:
            accepted = accepts(schema, COUNTED)
        except InvalidRequestError:
            continue
        validator = jsonschema.Draft202012Validator(schema)
        wrong = [
            value
            for value, is_accepted in zip(COUNTED, accepted, strict=True)
            if is_accepted and not validator.is_valid(value)
        ]
        assert wrong == [], schema
        num_accepted += sum(accepted)
    assert num_accepted or (rest and not {"a", "b"}.issuperset(required))


def leaves() -> st.SearchStrategy[Any]:
    return st.sampled_from(
        [
            {"type": "integer"},
            {"type": "string", "maxLength": 1},
            {"type": ["null", "boolean"]},
            {"const": "a"},
            {"enum": ["a", "b", 1, None]},
            {"minimum": 1},
            {"exclusiveMaximum": 1, "type": "number"},
            {"pattern": "^[ab]$"},
            {"minLength": 1, "type": "string"},
            {"required": ["a"]},
            {"required": ["a", "b"], "type": "object"},
            {"maxItems": 1, "type": "array"},
            {"maxProperties": 1, "type": "object"},
        ]
    )


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.lists(inner, min_size=2, max_size=3)
    return st.one_of(
        st.builds(lambda options: {"oneOf": options}, pairs),
        st.builds(lambda options: {"anyOf": options}, pairs),
        st.builds(lambda options: {"allOf": options}, pairs),
        st.builds(lambda each: {"not": each}, inner),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, b: {"properties": {"a": a, "b": b}, "type": "object"}, inner, inner),
        st.builds(lambda a: {"properties": {"a": a}, "additionalProperties": False}, inner),
        st.builds(lambda a: {"dependentSchemas": {"a": a}}, inner),
        st.builds(lambda a: {"items": a, "maxItems": 2, "type": "array"}, inner),
    )


SCALARS: list[Any] = [None, True, 0, 1, 2, 0.5, "", "a", "b", "ab"]
VALUES: list[Any] = [
    *SCALARS,
    *([], ["a"], [1, "a"], [["a"]]),
    *({"a": value} for value in (*SCALARS, {}, {"a": 1}, ["a"])),
    *({"a": first, "b": second} for first, second in itertools.product([1, "a"], [1, "a"])),
    *({}, {"b": 1}, {"c": 1}, {"a": 1, "c": 1}),
]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(st.recursive(leaves(), composed, max_leaves=6))
def test_every_value_that_a_grammar_accepts_is_valid(schema: dict[str, Any]) -> None:
    try:
        accepted = accepts(schema, VALUES)
    except InvalidRequestError:
        return
    validator = jsonschema.Draft202012Validator(schema)
    for value, is_accepted in zip(VALUES, accepted, strict=True):
        assert validator.is_valid(value) or not is_accepted, value


@pytest.mark.parametrize(
    ("patterns", "is_empty"),
    [
        (["^a+$", "^b+$"], True),
        (["^a+$", "^[ab]+$"], False),
        (["a", "b"], False),
        (["^$", "^.+$"], True),
        (["^(?:\\d+|x)$", "^y?z$"], True),
        (["^a$", "\\n"], False),
        (["^\\d$", "^[^0-9]$"], False),
        (["^(?i:AB)$", "^ab$"], False),
        (["^[^:]+$", "^[^:]+:[0-9]+$"], True),
        (["(?=a)", "b"], False),
    ],
)
def test_expressions_are_apart(patterns: list[str], is_empty: bool) -> None:
    assert Comparison(100_000).is_empty(patterns) is is_empty


HOSTILE = [
    "(?:(?:(?:){99999}){99999}){99999}a",
    "(?s){99999}",
    "(){0,99999}",
    "a" + "{1}" * 1300,
    "a" + "?" * 4000,
    "(" * 1500 + "a" + ")" * 1500,
    "(?:(?:a{0,999}){0,999}){0,999}",
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_hostile_expression_is_compared_or_left_alone(pattern: str) -> None:
    schema = {"oneOf": [{"pattern": pattern}, {"pattern": "^b+$"}], "type": "string"}
    assert rewritten(schema).keys() >= {"$defs"}
    assert rewritten({"not": {"pattern": pattern}, "type": "string"})


@pytest.mark.parametrize(
    "pattern", ["^[a-c]{2,3}$", "^x", "^(?:ab|cd)$", r"^\d$", "^[^a]+$", r"^a\.b$", "^a*$"]
)
def test_a_complement_is_all_other_texts(pattern: str) -> None:
    other = complement(pattern)
    assert other is not None
    texts = ["", "a", "ab", "abcd", "cd", "cdx", "1", "12", "x", "xy", "a.b", "a\nb", "aa"]
    accepted = accepts({"type": "string", "pattern": other}, texts)
    assert accepted == ["\n" not in text and not re.search(pattern, text) for text in texts]


def test_no_text_before_a_line_break_is_in_a_complement() -> None:
    schema = {"type": "string", "not": {"pattern": "^a$"}}
    assert accepts(schema, ["a\n", "b"]) == [False, True]
