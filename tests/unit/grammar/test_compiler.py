"""Grammars compile, match and are refused, and the compiler keeps a bounded number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.compiler import BoundedCache, GrammarCompiler
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.types.errors import InvalidRequestError
from tests.small_vocabulary import CALL, END, NUM_ROWS, ids_of, small_compiler, tokenizer_json

COMPILER = small_compiler()
INTEGER = {"type": "integer"}
COMPACT = {
    "type": "object",
    "properties": {"a": INTEGER},
    "required": ["a"],
    "x-guidance": {"whitespace_flexible": False},
}


def matches(spec: GrammarSpec, tokens: str | list[int]) -> bool:
    ids = ids_of(tokens) if isinstance(tokens, str) else tokens
    matcher = COMPILER.matcher(COMPILER.compile(spec))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


TAG = {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</f>"}
LEGACY = {
    "structures": [{"begin": "<f=x>", "schema": INTEGER, "end": "</f>"}],
    "triggers": ["<f="],
}


def form(**node: Any) -> GrammarSpec:
    return specs.structural_tag({"type": "structural_tag", "format": node})


CONST = {"type": "const_string", "value": "ab"}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (specs.json_schema(INTEGER), ["1", "-20"], ["", "a", "1.5", " 1"]),
        (specs.json_schema('{"type": "boolean"}'), ["true"], ["1"]),
        (specs.json_schema(True), ["1", '{"a": [1]}'], ["a"]),
        (specs.json_schema(COMPACT), ['{"a":1}'], ['{ "a": 1 }', '{\n"a":1}']),
        (specs.json_object(), ["{}", '{ "a": 1 }', '{\n  "a": 1\n}'], ["[]", "1", "{    }"]),
        (specs.regex("[ab]{2}/c"), ["ab/c"], ["ab/", "ab/cc", "xab/c"]),
        (specs.choice(['a"b', "c\nd"]), ['a"b', "c\nd"], ["a", "c"]),
        (specs.context_free('start: "a" b\nb: /[0-9]+/'), ["a1"], ["a"]),
        (specs.context_free('root ::= "a" [0-9]+'), ["a1"], ["a"]),
        (specs.context_free('root ::= "a"', kind=GrammarKind.GBNF), ["a"], ["b"]),
        (specs.structural_tag(LEGACY), ["", "hi", "x <f=x>1</f> y"], ["x <f=x>a</f>", "<f=y>"]),
        (specs.structural_tag(json.dumps(LEGACY)), ["<f=x>1</f><f=x>2</f>"], ["<f=x>1"]),
        (form(**TRIGGERED), ["a<f=x>1</f>b"], ["a<f=x>1</f"]),
        (form(**TRIGGERED, at_least_one=True), ["a<f=x>1</f>b"], ["a"]),
        (
            form(**TRIGGERED, at_least_one=True, stop_after_first=True),
            ["<f=x>1</f>"],
            ["<f=x>1</f>b"],
        ),
        (form(type="sequence", elements=[CONST, CONST]), ["abab"], ["ab"]),
        (
            form(type="or", elements=[CONST, {"type": "regex", "pattern": "x/?"}]),
            ["ab", "x/"],
            ["abx"],
        ),
        (form(type="grammar", grammar='root ::= "q"'), ["q"], [""]),
        (form(type="any_text"), ["", "abc"], []),
        (
            form(type="tag", begin="(", content={"type": "any_text"}, end=")"),
            ["(a)", "()"],
            ["(", "(a)b"],
        ),
        (
            form(type="tags_with_separator", tags=[TAG], separator=","),
            ["", "<f=x>1</f>", "<f=x>1</f>,<f=x>2</f>"],
            [",", "<f=x>1</f>,"],
        ),
        (
            form(
                type="tags_with_separator",
                tags=[TAG],
                separator=",",
                at_least_one=True,
                stop_after_first=True,
            ),
            ["<f=x>1</f>"],
            ["", "<f=x>1</f>,<f=x>2</f>"],
        ),
    ],
)
def test_what_matches(spec: GrammarSpec, good: list[str], bad: list[str]) -> None:
    assert all(matches(spec, text) for text in good)
    assert not any(matches(spec, text) for text in bad)


def test_a_special_token_in_a_tag_is_a_token() -> None:
    spec = form(type="tag", begin="<call>a", content=CONST, end="<call>")
    assert matches(spec, [CALL, *ids_of("aab"), CALL])
    assert not matches(spec, "<call>aab<call>")
    free = form(type="tag", begin="", content={"type": "any_text"}, end="<call>")
    assert matches(free, [*ids_of("xyz"), CALL])


def test_strict_refuses_what_lenient_leaves_out() -> None:
    schema = {"type": "string", "not": {"format": "date"}}
    with pytest.raises(InvalidRequestError, match="not"):
        COMPILER.compile(specs.json_schema(schema))
    assert matches(specs.json_schema(schema, strict=False), '"b"')
    # A schema cannot make itself lenient.
    with pytest.raises(InvalidRequestError, match="not"):
        COMPILER.compile(specs.json_schema(schema | {"x-guidance": {"lenient": True}}))


HOSTILE = [
    specs.json_schema({"type": "wrong"}),
    specs.json_schema({"$ref": "#/$defs/none"}),
    specs.json_schema({"$ref": "https://example.com/schema"}),
    specs.json_schema({"$ref": "#"}),
    specs.json_schema({"properties": 5}),
    # It panics within seconds; the grammar behind it panics at once.
    pytest.param(
        specs.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(15_000)}}),
        marks=pytest.mark.slow,
    ),
    specs.context_free("start: " + '("a" "b")? ' * 22_000),
    specs.json_schema(
        {
            "allOf": [{"anyOf": [{"minLength": i + j} for j in range(9)]} for i in range(9)],
            "type": "string",
        }
    ),
    specs.regex("("),
    specs.regex("(?=a)b"),
    specs.context_free("start: nothing"),
    specs.context_free("no grammar at all"),
    specs.context_free("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
    specs.structural_tag({"format": {"type": "none"}}),
    specs.structural_tag({"format": 5}),
    specs.structural_tag({}),
    specs.structural_tag({"structures": [], "triggers": []}),
    specs.structural_tag(LEGACY | {"triggers": ["other"]}),
    form(type="regex"),
    form(type="sequence", elements=[5]),
    form(type="tag", begin="a", content=CONST, end=5),
    form(type="json_schema", json_schema=5),
]


@pytest.mark.parametrize("spec", HOSTILE)
def test_what_cannot_be_used_is_refused(spec: GrammarSpec) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        COMPILER.compile(spec)
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(
    "spec",
    [
        specs.regex("(a|b)*a(a|b){500}"),
        specs.regex("((a{1,50}){1,50}){1,50}"),
        specs.regex("(x+x+)+y"),
        specs.json_schema({"type": "object", "properties": {"c": {"$ref": "#"}}}),
        specs.json_schema({"enum": [f"value {i}" for i in range(9_000)]}),
        specs.json_schema({"type": "string", "maxLength": 10_000_000}),
        specs.json_schema({"type": "array", "items": INTEGER, "minItems": 1_000_000}),
    ],
)
def test_what_is_much_work_for_others_is_accepted(spec: GrammarSpec) -> None:
    assert COMPILER.compile(spec)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: specs.json_schema({"description": "x" * 300_000}, param="f"), "characters"),
        (lambda: specs.json_schema("x" * 300_000, param="f"), "characters"),
        (lambda: specs.regex("a" * 300_000, param="f"), "characters"),
        (lambda: specs.choice(["a" * 300_000], param="f"), "characters"),
        (lambda: specs.context_free("a" * 300_000, param="f"), "characters"),
        (lambda: specs.json_schema(nested(10_000), param="f"), "deeper"),
        (lambda: specs.json_schema("[" * 10_000 + "]" * 10_000, param="f"), "deeper"),
        (lambda: specs.structural_tag(nested(10_000), param="f"), "deeper"),
        (lambda: specs.json_schema("{", param="f"), "not JSON"),
        (lambda: specs.json_schema("[]", param="f"), "object"),
        (lambda: specs.json_schema({"const": float("nan")}, param="f"), "not JSON"),
        (lambda: specs.choice([], param="f"), "one or more"),
        (lambda: specs.choice(["a", ""], param="f"), "one or more"),
        (lambda: specs.regex("", param="f"), "not be empty"),
        (lambda: specs.structural_tag("5", param="f"), "object"),
    ],
)
def test_what_is_too_much_or_malformed_is_refused_at_once(make: Any, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what) as refusal:
        make()
    assert refusal.value.param == "f"


def test_a_grammar_is_compiled_once_and_its_matchers_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = small_compiler()
    spec = specs.regex("ab")
    assert compiler.known(spec) is None
    text = compiler.compile(spec)
    assert compiler.known(spec) == text
    monkeypatch.setattr(GrammarVocabulary, "matcher", None)
    assert compiler.compile(spec) == text
    first, second = compiler.matcher(text), compiler.matcher(text)
    assert first.consume_tokens(ids_of("ab"))
    assert second.consume_tokens(ids_of("a"))
    assert first.is_accepting()
    assert not second.is_accepting()


def test_a_refused_grammar_is_not_kept() -> None:
    compiler = small_compiler()
    with pytest.raises(InvalidRequestError):
        compiler.compile(specs.regex("("))
    assert compiler.known(specs.regex("(")) is None


@pytest.mark.parametrize(
    ("text", "ends"), [(None, {END}), (tokenizer_json(), set()), ("{}", {END}), ("nonsense", {END})]
)
def test_a_tokenizer_that_cannot_be_read_is_refused(text: str | None, ends: set[int]) -> None:
    compiler = GrammarCompiler(GrammarVocabulary(text, frozenset(ends), NUM_ROWS, NUM_ROWS))
    with pytest.raises(InvalidRequestError, match="not supported by this model's tokenizer"):
        compiler.compile(specs.regex("a"))


def test_a_cache_forgets_what_was_not_used() -> None:
    cache = BoundedCache[str, int](2, 100)
    cache.put("a", 1, 10)
    cache.put("b", 2, 10)
    assert cache.get("a") == 1
    cache.put("c", 3, 10)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    cache.put("d", 4, 95)
    assert (len(cache), cache.get("d")) == (1, 4)
    cache.put("e", 5, 101)
    assert (len(cache), cache.get("e")) == (1, None)
    cache.put("d", 6, 1)
    cache.put("f", 7, 99)
    assert (cache.get("d"), cache.get("f")) == (6, 7)


@pytest.mark.parametrize(
    ("rule", "is_refused"),
    [
        ('"a" <|end|> "b"', True),
        ('"a" (<|end|>)? b', True),
        (f'<[{END}]> "b"', True),
        (f"<[1,{END}]> <call>", True),
        ('"a" <|end|>', False),
        ('("a" <|end|>)', False),
        ('<|end|> | "b"', False),
        ('"<|end|> b" "c"', False),
        ('/<.end.> b/ "c" // <|end|> b', False),
        ('<call> "b"', False),
    ],
)
def test_a_grammar_that_goes_on_after_an_end_token_is_refused(rule: str, is_refused: bool) -> None:
    spec = specs.context_free(f'%llguidance {{}}\nstart: {rule}\nb: "b"')
    if not is_refused:
        small_compiler().compile(spec)
        return
    with pytest.raises(InvalidRequestError, match="goes on after"):
        small_compiler().compile(spec)
