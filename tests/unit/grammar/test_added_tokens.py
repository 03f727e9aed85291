"""Texts in structures that spell added tokens, or that the normaliser would change."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.masks import ConstrainedRow, GrammarMasks
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.parsing.forced import forced_calls
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import SampleSpec
from tests.byte_vocabulary import NO_FLAGS, byte_level
from tests.unit.grammar.test_tokenizers import sentencepiece_tokenizer

# KINDS of added tokens: with none of the flags, and with each.
KINDS = ({}, *({flag: True} for flag in ("special", *NO_FLAGS)))
MARKERS = ("<think>", "<|mark|>", "[mark]", "ab mark")
NORMALISERS: tuple[Any, ...] = (
    None,
    {"type": "NFC"},
    {"type": "NFKC"},
    {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
)
# CHANGED has characters that each of them changes or takes away.
CHANGED = " E\u0301\ufb01 "


def call(text: str) -> GrammarSpec:
    """Return the specification of a forced call with this argument."""
    schema = {"type": "object", "properties": {"a": {"const": text}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return specs.context_free(forced_calls(None, [tool], parallel=False).grammar)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a text without white space at its ends, in a regular expression."""
    return "".join(f"\\{character}" if character in "[]|" else character for character in text)


def is_value(text: str, answer: str) -> bool:
    return json.loads(answer) == text


def is_text(text: str, answer: str) -> bool:
    return answer == text


#: Each structure of a text, and what is true of its answers.
STRUCTURES: dict[str, tuple[Callable[[str], GrammarSpec], Callable[[str, str], bool]]] = {
    "const": (lambda text: specs.json_schema({"const": text}), is_value),
    "enum": (lambda text: specs.json_schema({"enum": [text, "other"]}), lambda _t, _a: True),
    "key": (
        lambda text: specs.json_schema(
            {
                "type": "object",
                "properties": {text: {"const": 1}},
                "required": [text],
                "additionalProperties": False,
            }
        ),
        lambda text, answer: json.loads(answer) == {text: 1},
    ),
    "pattern": (
        lambda text: specs.json_schema({"type": "string", "pattern": f"^{escaped(text)}$"}),
        is_value,
    ),
    "regex": (lambda text: specs.regex(escaped(text)), is_text),
    "parts": (lambda text: specs.context_free(f'start: "{text[0]}" "{text[1:]}"'), is_text),
    "gbnf": (lambda text: specs.context_free(f"root ::= {quoted(text)}"), is_text),
    "choice": (lambda text: specs.choice([text]), is_text),
    "tag": (
        lambda text: specs.structural_tag(
            {"format": {"type": "json_schema", "json_schema": {"const": text}}}
        ),
        is_value,
    ),
    "call": (call, lambda text, answer: json.loads(answer)[0]["parameters"] == {"a": text}),
}


def sentencepiece() -> dict[str, Any]:
    return json.loads(sentencepiece_tokenizer().to_str())


#: Tokenizers, and the token that ends their texts.
FAMILIES = {"byte-level": (byte_level, 0), "sentencepiece": (sentencepiece, 2)}


@cache
def compiler_of(family: str, kind: int = 0, normaliser: int = 0) -> GrammarCompiler:
    """Return the compiler of a family with the markers as added tokens, and a normaliser."""
    make, end = FAMILIES[family]
    content = make()
    first = 1 + max(content["model"]["vocab"].values())
    content["added_tokens"] += [
        {"id": first + number, "content": marker, "special": False} | NO_FLAGS | KINDS[kind]
        for number, marker in enumerate(MARKERS)
    ]
    both = [part for part in (content.get("normalizer"), NORMALISERS[normaliser]) if part]
    content["normalizer"] = {"type": "Sequence", "normalizers": both} if both else None
    size = first + len(MARKERS)
    vocabulary = GrammarVocabulary(json.dumps(content), frozenset([end]), size, size)
    return GrammarCompiler(vocabulary)


def answer_of(compiler: GrammarCompiler, spec: GrammarSpec) -> str:
    """Return a random answer under the masks of the server; fail where there can be none."""
    masks, draw, output = GrammarMasks(compiler), random.Random(0), list[int]()
    vocabulary = compiler.vocabulary
    params = SamplingParams(grammar=Grammar(text=compiler.compile(spec)))
    while not vocabulary.eos_ids & set(output):
        sample = SampleSpec(params=params, seed=0, position=0, prompt_ids=(1,), output_ids=output)
        masked = masks.compute([ConstrainedRow(0, 0, sample)])
        assert not masked.failed
        bits = np.unpackbits(masked.words[0].view(np.uint8), bitorder="little")
        output.append(draw.choice(np.flatnonzero(bits).tolist()))
    return b"".join(map(vocabulary.token_bytes, output[:-1])).decode()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_hold_what_spells_an_added_token(family: str, structure: str) -> None:
    make, holds = STRUCTURES[structure]
    for kind in range(len(KINDS)):
        for text in MARKERS:
            answer = answer_of(compiler_of(family, kind), make(text))
            assert holds(text, answer), (KINDS[kind], text, answer)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_hold_what_the_normaliser_would_change(family: str, structure: str) -> None:
    make, holds = STRUCTURES[structure]
    for normaliser in range(len(NORMALISERS)):
        answer = answer_of(compiler_of(family, normaliser=normaliser), make(CHANGED))
        assert holds(CHANGED, answer), (NORMALISERS[normaliser], answer)


def test_whether_a_text_can_start_so_is_a_matter_of_characters() -> None:
    compiler = compiler_of("byte-level")
    marked, free = (
        compiler.compile(spec) for spec in (specs.choice(["<think>a"]), specs.json_object())
    )
    assert compiler.starts(marked, "<think>")
    assert compiler.starts(marked, "")
    assert not compiler.starts(marked, "<|mark|>")
    assert not compiler.starts(free, "<think>")
    assert compiler.starts(free, '{"<think>')
