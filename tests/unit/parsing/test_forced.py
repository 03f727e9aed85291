"""Forced calls: the grammars compile, and whatever matches them is read as valid calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import llguidance
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlx_parallm.parsing.forced import arguments_schema, forced_calls
from mlx_parallm.parsing.formats import ToolFormat, merge, tools_of
from mlx_parallm.parsing.parts import ContentText, Part, ToolCallArguments, ToolCallBegin
from mlx_parallm.parsing.registry import tool_format, tool_format_names
from mlx_parallm.parsing.turn import turn_parser
from mlx_parallm.types.errors import InvalidRequestError

TEXT = {"type": "string", "maxLength": 6}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": TEXT,
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "places": {"type": "array", "items": {"$ref": "#/$defs/at"}, "maxItems": 2},
                },
                "required": ["city"],
                "$defs": {
                    "at": {
                        "type": "object",
                        "properties": {"x": {"type": "boolean"}, "y": {"enum": ["a", None, "}"]}},
                        "required": ["x"],
                        "additionalProperties": False,
                    }
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "say-it",
            "strict": True,
            "parameters": {"properties": {"text": TEXT, "é": TEXT}, "required": ["text"]},
        },
    },
]
TOKENIZER = llguidance.LLTokenizer("byte")
LONGEST = 4000


def sample(grammar: str, chance: random.Random) -> str:
    return TOKENIZER.decode_bytes(sample_tokens(grammar, chance, TOKENIZER)).decode()


def sample_tokens(
    grammar: str, chance: random.Random, tokenizer: llguidance.LLTokenizer
) -> list[int]:
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    while not matcher.is_stopped():
        assert len(tokens) < LONGEST
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        token = chance.choice(allowed)
        if token == tokenizer.eos_token:
            break
        tokens.append(token)
        assert matcher.consume_token(token)
    return tokens


def parts_of(form: ToolFormat, text: str, size: int) -> list[Part]:
    parser = turn_parser(tool_format=form, reasoning_format=None, tools=TOOLS)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return merge([part for piece in pieces for part in parser.add(piece)] + parser.flush())


def check_calls(parts: list[Part], text: str) -> list[str]:
    """Return the names of the calls; fail unless there is nothing but valid calls."""
    schemas = {tool.name: arguments_schema(tool) for tool in tools_of(TOOLS)}
    names = []
    for begin, arguments in zip(parts[::2], parts[1::2], strict=True):
        assert isinstance(begin, ToolCallBegin), text
        assert isinstance(arguments, ToolCallArguments), text
        jsonschema_rs.validate(schemas[begin.name], json.loads(arguments.text))
        names.append(begin.name)
    assert names, text
    return names


@pytest.mark.parametrize(
    "name", [*sorted({tool_format(name).name for name in tool_format_names()}), None]
)
@pytest.mark.parametrize("parallel", [True, False])
def test_random_matching_texts_are_calls(name: str | None, parallel: bool) -> None:
    own = tool_format(name) if name else None
    forced = forced_calls(own, TOOLS, parallel=parallel)
    counts = []
    for seed in range(4):
        text = sample(forced.grammar, random.Random(seed))
        names = check_calls(parts_of(forced.tool_format, text, size=1 + 2 * seed), text)
        counts.append(len(names))
    assert parallel or max(counts) == 1


def test_a_named_tool_is_the_only_one() -> None:
    forced = forced_calls(tool_format("hermes"), TOOLS, parallel=True, named="now")
    for seed in range(3):
        text = sample(forced.grammar, random.Random(seed))
        assert set(check_calls(parts_of(forced.tool_format, text, size=3), text)) == {"now"}


def test_special_tokens_are_sampled_as_such() -> None:
    """Check that a tokenizer with markers as special tokens never spells them otherwise."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    form = tool_format("kimi_k2")
    tokenizer.add_special_tokens(["<|im_end|>", *form.markers])
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    vocabulary = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=special["<|im_end|>"])
    forced = forced_calls(form, TOOLS, parallel=True, special_tokens=special)
    for seed in range(3):
        tokens = sample_tokens(forced.grammar, random.Random(seed), vocabulary)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert special["<|tool_call_begin|>"] in tokens
        check_calls(parts_of(forced.tool_format, text, size=2), text)


def test_special_tokens_are_written_by_their_ids() -> None:
    special = {"<tool_call>": 7, "</tool_call>": 8}
    forced = forced_calls(tool_format("hermes"), TOOLS, parallel=False, special_tokens=special)
    assert '<[7]> "\\n{' in forced.grammar
    assert "tool_call>" not in forced.grammar


@pytest.mark.parametrize(("tools", "named"), [([], None), (TOOLS, "other")])
def test_there_must_be_a_tool(tools: list[dict[str, Any]], named: str | None) -> None:
    with pytest.raises(InvalidRequestError):
        forced_calls(None, tools, parallel=True, named=named)


def test_unnamed_properties_are_left_out_unless_the_schema_says_otherwise() -> None:
    def schema(parameters: dict[str, Any]) -> dict[str, Any]:
        return arguments_schema(tools_of([{"name": "f", "parameters": parameters}])[0])

    assert schema({"properties": {}})["additionalProperties"] is False
    assert schema({"properties": {}, "additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in schema({"type": "object"})
    assert "additionalProperties" not in schema({"properties": {}, "allOf": []})


FORCED = [name for name in tool_format_names() if tool_format(name).forced is not None]


@pytest.mark.parametrize("name", FORCED)
def test_arguments_may_hold_any_marker_of_their_format(name: str) -> None:
    form = tool_format(name)
    assert form.forced is not None
    call = form.forced
    markers = {*form.markers, *form.silent, call.begin, call.end, call.separator or "", "<think>"}
    for marker in markers:
        arguments = json.dumps({"text": f"x {marker} y"}, ensure_ascii=False)
        written_call = call.call.replace("$name", "say-it").replace("$arguments", arguments)
        text = f"{call.begin}{written_call}{call.end}"
        for size in (1, len(text)):
            parser = turn_parser(tool_format=form, reasoning_format=None, tools=TOOLS)
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            parts = [part for piece in pieces for part in parser.add(piece)] + parser.flush()
            written = [part.text for part in parts if isinstance(part, ToolCallArguments)]
            assert json.loads("".join(written)) == json.loads(arguments), marker
            assert len([part for part in parts if isinstance(part, ToolCallBegin)]) == 1
            assert not any(isinstance(part, ContentText) for part in parts)
