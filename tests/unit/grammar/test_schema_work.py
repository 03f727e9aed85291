"""The work for a JSON schema is bounded, and not done by those who ask for a grammar."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.json_schema import disjoint, work
from mlx_parallm.grammar.json_schema.document import Document
from mlx_parallm.grammar.json_schema.negation import Negation
from mlx_parallm.grammar.json_schema.rewrite import rewritten
from mlx_parallm.grammar.spec import GrammarKind
from mlx_parallm.parsing.forced import forced_calls
from mlx_parallm.types.errors import InvalidRequestError
from tests.small_vocabulary import ids_of, small_compiler

COMPILER = small_compiler()
# STEPS that are allowed here, and CALLS of functions for each of them.
STEPS = 20_000
CALLS = 12
NAMES = [f"v{number}" for number in range(300)]


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for number in range(depth):
        other = {"properties": {"a": schema, "b": {"const": number}}, "required": ["a"]}
        schema = {"oneOf": [schema, other]}
    return schema


HOSTILE: dict[str, Any] = {
    "values of properties": {
        "oneOf": [{"properties": {"k": {"enum": NAMES}, "x": {"const": n}}} for n in range(64)]
    },
    "values": {"oneOf": [{"enum": [*NAMES, f"z{number}"]} for number in range(64)]},
    "numbers": {"oneOf": [{"enum": list(range(300))} for _ in range(64)]},
    "one list of values": {
        "$defs": {"e": {"enum": NAMES}},
        "oneOf": [{"properties": {"k": {"$ref": "#/$defs/e"}}} for _ in range(64)],
    },
    "expressions": {
        "type": "string",
        "oneOf": [{"pattern": f"^(?:{'|'.join(NAMES[:100])}|{n})$"} for n in range(64)],
    },
    "oneOf in oneOf": nested(8),
    "not in not": {"not": {"properties": {"a": {"not": nested(7)}}}},
    "lists of values": {
        "properties": {
            f"p{n}": {"items": {"enum": list("abcdef")}, "uniqueItems": True} for n in range(200)
        }
    },
    "references to references": {
        "$defs": {
            f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
            for n in range(30)
        }
        | {"d30": {"type": "string"}},
        "allOf": [{"$ref": "#/$defs/d0"}],
        "oneOf": [{"$ref": "#/$defs/d0"}, {"type": "integer"}],
    },
    "a long text": {"not": {"enum": ["a" * 2000]}},
    "many short texts": {"not": {"pattern": f"^(?:{'|'.join(map(chr, range(200, 1800)))})"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_functions_are_called_a_bounded_number_of_times(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_STEPS", STEPS)
    monkeypatch.setattr(disjoint, "MAX_TEXT_STEPS", STEPS // 10)
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        rewritten(HOSTILE[name], lenient=True)
    finally:
        sys.setprofile(before)
    assert num_calls < CALLS * STEPS


def test_too_much_work_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MAX_STEPS", STEPS)
    schema = {"oneOf": [{"enum": list(range(20))} for _ in range(32)]}
    with pytest.raises(InvalidRequestError, match="too large: to enforce its oneOf"):
        COMPILER.compile(specs.json_schema(schema))
    assert rewritten(schema, lenient=True) is schema
    assert COMPILER.compile(specs.json_schema(schema, strict=False))


def test_a_schema_is_negated_once() -> None:
    document = Document({})
    negation = Negation(document)
    schema = {"enum": NAMES}
    alternatives = negation.of(schema)
    num_steps = document.work.num_steps
    assert negation.of(schema) is alternatives
    assert document.work.num_steps == num_steps
    assert negation.of({"enum": NAMES}) == alternatives


@pytest.mark.parametrize("kind", [GrammarKind.LARK, GrammarKind.EITHER])
def test_arguments_of_forced_calls_are_rewritten_by_the_compiler(kind: GrammarKind) -> None:
    one_of = {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    parameters = {"type": "object", "properties": {"a": {}, "b": {}}, **one_of}
    tool = {"name": "f", "parameters": parameters, "strict": True}
    grammar = forced_calls(None, [tool], parallel=False).grammar
    assert json.dumps(one_of["oneOf"]) in grammar
    text = COMPILER.compile(specs.context_free(grammar, kind=kind))
    for arguments, is_valid in (({"a": 1}, True), ({"a": 1, "b": 2}, False)):
        call = json.dumps([{"name": "f", "parameters": arguments}])
        ids = ids_of(call)
        assert (COMPILER.matcher(text).try_consume_tokens(ids) == len(ids)) is is_valid


def test_what_is_no_json_in_a_rule_is_left_to_llguidance() -> None:
    for rest in ("{x}", '{"type": "string"', "{" * 5000 + "}"):
        with pytest.raises(InvalidRequestError):
            COMPILER.compile(specs.context_free(f"start: %json {rest}", kind=GrammarKind.LARK))


@pytest.mark.parametrize("strict", [True, False])
def test_large_schemas_of_tools_are_refused_only_in_strict(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "MAX_STEPS", STEPS)
    parameters = {"oneOf": [{"properties": {"a": {"enum": NAMES[:20]}}} for _ in range(32)]}
    tool = {"name": "f", "parameters": parameters, "strict": strict}
    spec = specs.context_free(forced_calls(None, [tool], parallel=False).grammar)
    if strict:
        with pytest.raises(InvalidRequestError, match="too large"):
            COMPILER.compile(spec)
    else:
        assert COMPILER.compile(spec)
