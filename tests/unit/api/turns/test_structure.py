"""Which grammar a body's fields ask for."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.api.turns.constraints import structure_of
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.types.errors import InvalidRequestError

SCHEMA = {"type": "object"}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def named(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, **more}}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {}}, None),
        ({"structured_outputs": {"regex": None, "json_object": False, "other": 1}}, None),
        ({"response_format": named()}, specs.json_schema(SCHEMA, strict=False)),
        ({"response_format": named(strict=False)}, specs.json_schema(SCHEMA, strict=False)),
        ({"response_format": named(strict=True)}, specs.json_schema(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA, "strict": True}},
            specs.json_schema(SCHEMA),
        ),
        ({"response_format": {"type": "json_object"}}, specs.json_object()),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            specs.json_schema(SCHEMA, strict=False),
        ),
        ({"response_format": TAG}, specs.structural_tag(TAG)),
        ({"structured_outputs": {"json": SCHEMA}}, specs.json_schema(SCHEMA, strict=False)),
        ({"structured_outputs": {"json": "{}"}}, specs.json_schema({}, strict=False)),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            specs.json_schema(SCHEMA, strict=False, is_compact=True),
        ),
        (
            {"structured_outputs": {"json": "{}", "whitespace_pattern": None}},
            specs.json_schema({}, strict=False),
        ),
        ({"structured_outputs": {"regex": "a"}}, specs.regex("a")),
        ({"structured_outputs": {"choice": ["a"]}}, specs.choice(["a"])),
        ({"structured_outputs": {"grammar": "x"}}, specs.context_free("x")),
        ({"structured_outputs": {"json_object": True}}, specs.json_object()),
        ({"structured_outputs": {"structural_tag": TAG}}, specs.structural_tag(TAG)),
        ({"guided_json": SCHEMA}, specs.json_schema(SCHEMA, strict=False)),
        ({"guided_regex": "a"}, specs.regex("a")),
        ({"guided_choice": ["a"]}, specs.choice(["a"])),
        ({"guided_grammar": "x"}, specs.context_free("x")),
        ({"regex": "a"}, specs.regex("a")),
        ({"ebnf": "x"}, specs.context_free("x", kind=GrammarKind.GBNF)),
        ({"json_schema": "{}"}, specs.json_schema({}, strict=False)),
        ({"response_format": {"type": "text"}, "regex": "a"}, specs.regex("a")),
    ],
)
def test_fields_ask_for(fields: dict[str, Any], wanted: GrammarSpec | None) -> None:
    structure = structure_of(fields)
    if wanted is None:
        assert structure is None
        return
    assert structure is not None
    assert structure[0] == wanted
    assert fields[structure[1]] is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": 5}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
        ),
        ({"response_format": named(schema=None)}, "response_format"),
        ({"response_format": named(schema=[])}, "response_format"),
        ({"response_format": named(strict="yes")}, "response_format"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs"),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}, "structured_outputs"),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            "structured_outputs",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs"),
        ({"guided_choice": {}}, "guided_choice"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"regex": ""}, "regex"),
        # Half a surrogate pair inside a text of JSON.
        ({"guided_json": r'{"const": "\ud800"}'}, "guided_json"),
        ({"response_format": named(), "guided_regex": "a"}, "guided_regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ],
)
def test_what_is_malformed_or_asked_twice_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structure_of(fields)
    assert refusal.value.param == param
