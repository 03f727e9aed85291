"""Turns in which every call must be valid, in every format that can be enforced."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.formats import ToolFormat
from mlx_parallm.parsing.strict import strict_calls

# As a custom tool with a grammar is enforced.
PATCH = {
    "name": "apply_patch",
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": "^(?:BEGIN a+ END)$"}},
        "required": ["input"],
        "additionalProperties": False,
    },
    "strict": True,
}
FREE = {"name": "free", "parameters": {"type": "object"}}
START = "<|start|>assistant"
NAMES = sorted({registry.tool_format(name).name for name in registry.tool_format_names()})
FORMS = [registry.tool_format(name) for name in NAMES]
# ENFORCED: as docs/tool-calling.md says.
ENFORCED = {
    *("hermes", "longcat", "openai", "mistral", "mistral_json"),
    *("deepseek_v3", "deepseek_v31", "kimi_k2", "granite", "phi4_mini_json", "jamba"),
    *("nemotron_json", "cohere_command3"),
}


@functools.cache
def vocabulary(markers: tuple[str, ...]) -> tuple[GrammarCompiler, Tokenizer]:
    """Return the embedded model's tokens, with markers that are tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|eot|>", *markers])
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id("<|eot|>")
    assert end is not None
    words = GrammarVocabulary(tokenizer.to_str(), frozenset([end]), size, size)
    return GrammarCompiler(words), tokenizer


def accepts(form: ToolFormat, text: str, *, tokens: bool, parallel: bool = True) -> bool:
    calls = strict_calls(form, [PATCH, FREE], parallel=parallel, prompt=START)
    assert calls is not None
    # A marker in words is no token of its own.
    markers = tuple(marker for marker in form.markers if tokens and not marker[0].isalpha())
    compiler, tokenizer = vocabulary(markers)
    matcher = compiler.matcher(compiler.compile(specs.structural_tag({"format": calls})))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def call(form: ToolFormat, arguments: dict[str, Any], name: str = "apply_patch") -> str:
    assert form.forced is not None
    text = form.forced.call.replace("$name", name).replace("$arguments", json.dumps(arguments))
    return form.forced.begin + text + form.forced.end


def test_these_formats_are_enforced() -> None:
    enforced = {
        form.name
        for form in FORMS
        if strict_calls(form, [PATCH], parallel=True, prompt=START) is not None
    }
    assert enforced == ENFORCED


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("name", sorted(ENFORCED - {"openai"}))
def test_a_call_that_the_model_decides_on_is_valid(name: str, tokens: bool) -> None:
    form = registry.tool_format(name)
    good, bad = (call(form, {"input": f"BEGIN {text} END"}) for text in ("aa", "b"))
    check = functools.partial(accepts, form, tokens=tokens)
    assert check("No call < here [1]; import functools")
    assert check(f"Let me see. {good}")
    assert check(call(form, {"any": 1}, "free"))
    assert not check(f"Let me see. {bad}")
    assert not check(call(form, {"input": "BEGIN a END"}, "other"))
    assert form.forced is not None
    if form.forced.separator is not None:
        begin, end = form.forced.begin, form.forced.end
        inner = good[len(begin) : len(good) - len(end)]
        two = f"{begin}{inner}{form.forced.separator}{inner}{end}"
        assert check(two)
        assert not check(two, parallel=False)


ANALYSIS = "<|channel|>analysis<|message|>I call to=functions.apply_patch.<|end|>"
FINAL = "<|channel|>final<|message|>Done."
HEADERS = [
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    " to=functions.{}<|channel|>commentary <|constrain|>json<|message|>",
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize(
    "before",
    ["", ANALYSIS + START, f"{ANALYSIS}{START}<|channel|>commentary<|message|>So<|end|>{START}"],
)
def test_a_call_of_harmony_is_valid(before: str, header: str) -> None:
    check = functools.partial(accepts, registry.tool_format("openai"), tokens=True)
    patch = before + header.format("apply_patch")
    assert check(before + FINAL)
    assert check(patch + '{"input": "BEGIN aaa END"}')
    assert check(before + header.format("free") + '{"any": [1]}')
    assert not check(patch + '{"input": "BEGIN b END"}')
    assert not check(patch + "*** Begin Patch")
    assert not check(before + header.format("other") + "{}")
    assert not check(before + header.format("apply_patch").replace("commentary", "analysis") + "{}")


def test_a_message_of_harmony_that_was_begun_is_free() -> None:
    form = registry.tool_format("openai")
    assert strict_calls(form, [PATCH], parallel=True, prompt=f"{START}{FINAL}") is None
