"""Turns that think before a structure, in every format; and answers that look like markers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from mlx_parallm.api.chat.request import chat_tools
from mlx_parallm.api.turns.prepare import PreparedTurn, prepare_turn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.parts import ContentText, ReasoningText, ToolCallBegin
from mlx_parallm.parsing.registry import tool_format_names
from mlx_parallm.parsing.turn import REASONING_FORMATS
from mlx_parallm.tokenizer.loading import load_tokenizer
from tests.byte_vocabulary import END, ByteVocabulary
from tests.fakes import make_info

SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
ANSWER = specs.json_schema({"const": "yes"})
THOUGHTS = "Let me {think}."
FORMATS = {form.name: form for form in REASONING_FORMATS}
TOOL_FORMATS = {
    form.name: form
    for form in map(registry.tool_format, tool_format_names())
    if form.forced is not None and not form.is_harmony
}
SPECIAL = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")


def pieces_of(form: ReasoningFormat | ToolFormat) -> list[str]:
    """Return the special tokens that the markers of a format consist of."""
    own = (*form.markers, *form.silent)
    return list(dict.fromkeys(piece for marker in own for piece in SPECIAL.findall(marker)))


@cache
def vocabulary_of(*added: str) -> ByteVocabulary:
    return ByteVocabulary(added)


def model_of(
    vocabulary: ByteVocabulary,
    form: ReasoningFormat | None,
    calls: ToolFormat | None = None,
    *,
    ending: str = "",
) -> GenerationModel:
    """Return a model whose prompts end with a text."""
    template = f"{{{{ tools }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{ending}"
    return GenerationModel(
        names=("m",),
        root="m",
        created=0,
        tokenizer=load_tokenizer(DEMO_FOLDER, chat_template=template),
        info=make_info(),
        grammars=vocabulary.compiler,
        tool_format=calls,
        reasoning_format=form,
    )


async def prepare(
    model: GenerationModel, structure: GrammarSpec, tools: Sequence[Any] = (), **variables: Any
) -> PreparedTurn:
    turn = TurnRequest(
        request_id="r",
        messages=[{"role": "user", "content": "hi"}],
        tools=chat_tools(tools),
        structure=structure,
        template_kwargs=variables,
    )
    return await prepare_turn(turn, model)


def read(prepared: PreparedTurn, text: str) -> tuple[str, str, int]:
    """Return reasoning, content and the number of calls of a text, which comes in any pieces."""
    answers = set[tuple[str, str, int]]()
    for size in (1, 3, len(text)):
        (parser,) = prepared.parsers()
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parts = [part for piece in pieces for part in parser.add(piece)] + parser.flush()
        thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningText))
        content = "".join(part.text for part in parts if isinstance(part, ContentText))
        calls = sum(isinstance(part, ToolCallBegin) for part in parts)
        answers.add((thoughts, content, calls))
    (answer,) = answers
    return answer


def between(form: ReasoningFormat) -> str:
    """Return what a model writes between its thoughts and the answer."""
    next_message = "<|start|>assistant" if form.name in ("openai_gptoss", "muse_spark") else ""
    return form.end if form.answer_start is None else f"{form.end}{next_message}{form.answer_start}"


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("name", FORMATS)
async def test_thinking_that_was_asked_for_comes_before_a_structure(
    name: str, are_tokens: bool, opens: bool
) -> None:
    form = FORMATS[name]
    vocabulary = vocabulary_of(*(pieces_of(form) if are_tokens else ()))
    model = model_of(vocabulary, form, ending=form.start if opens else "")
    prepared = await prepare(model, ANSWER, enable_thinking=True)
    params = prepared.request.params
    for start in [""] if opens else form.starts:
        text = f"{start}{THOUGHTS}{between(form)}"
        ids = [*vocabulary.ids_of(text), *vocabulary.bytes_of('"yes"'), END]
        assert vocabulary.refused(params, ids) is None
        # The structure holds where it begins, and the turn does not end before.
        assert vocabulary.refused(params, [*ids[:-6], *vocabulary.bytes_of("x")]) == len(ids) - 6
        thinking = len(vocabulary.ids_of(start)) + 2
        assert vocabulary.refused(params, [*ids[:thinking], END]) == thinking
        assert read(prepared, f'{text}"yes"') == (THOUGHTS, '"yes"', 0)


@pytest.mark.parametrize("name", FORMATS)
async def test_a_structure_holds_at_once_where_the_template_ended_thinking(name: str) -> None:
    form = FORMATS[name]
    vocabulary = vocabulary_of(*pieces_of(form))
    prepared = await prepare(model_of(vocabulary, form, ending=between(form)), ANSWER)
    ids = [*vocabulary.bytes_of('"yes"'), END]
    assert vocabulary.refused(prepared.request.params, ids) is None
    assert vocabulary.refused(prepared.request.params, vocabulary.ids_of(form.start)) == 0
    assert read(prepared, '"yes"') == ("", '"yes"', 0)


async def test_a_marker_in_words_is_for_those_who_ask() -> None:
    form = FORMATS["granite"]
    vocabulary = vocabulary_of()
    model = model_of(vocabulary, form)
    params = (await prepare(model, ANSWER)).request.params
    assert vocabulary.refused(params, vocabulary.ids_of("Here is")) == 0
    switches: list[dict[str, Any]] = [
        {"enable_thinking": True},
        {"thinking": True},
        {"reasoning_effort": "low"},
    ]
    for asks in switches:
        params = (await prepare(model, ANSWER, **asks)).request.params
        assert vocabulary.refused(params, vocabulary.ids_of(form.start)) is None


@pytest.mark.parametrize("name", FORMATS)
async def test_a_structure_that_looks_like_thinking_is_content(name: str) -> None:
    form = FORMATS[name]
    vocabulary = vocabulary_of(*pieces_of(form))
    for text in (f"{form.start}a{form.end}b", f"\n{form.start}a", f"a{form.end}", form.end):
        prepared = await prepare(
            model_of(vocabulary, form), specs.choice([text]), enable_thinking=True
        )
        start = form.answer_start or ""
        ids = [*vocabulary.ids_of(start), *vocabulary.bytes_of(text), END]
        assert vocabulary.refused(prepared.request.params, ids) is None
        thoughts, content, _ = read(prepared, start + text)
        assert (thoughts, content) == ("", text.lstrip() if start else text)


@pytest.mark.parametrize("name", TOOL_FORMATS)
async def test_an_answer_is_a_structure_or_calls(name: str) -> None:
    form = TOOL_FORMATS[name]
    assert form.forced is not None
    vocabulary = vocabulary_of(*pieces_of(form))
    call = form.forced.call.replace("$name", "add").replace("$arguments", '{"a": 1}')
    text = f"{form.forced.begin}{call}{form.forced.end}"
    mentions = json.dumps(f"See {text}", ensure_ascii=False)
    structure = specs.json_schema({"const": f"See {text}"})
    prepared = await prepare(model_of(vocabulary, None, form), structure, [TOOL])
    params = prepared.request.params
    assert vocabulary.refused(params, [*vocabulary.ids_of(text), END]) is None
    assert read(prepared, text) == ("", "", 1)
    assert vocabulary.refused(params, [*vocabulary.bytes_of(mentions), END]) is None
    assert read(prepared, mentions) == ("", mentions, 0)


async def test_calls_that_a_structure_may_look_like_are_told_apart_by_their_parser() -> None:
    form = registry.tool_format("llama3_json")
    prepared = await prepare(model_of(vocabulary_of(), None, form), specs.json_object(), [TOOL])
    assert prepared.constraint.call_starts == ()
    assert read(prepared, '{"name": "add", "parameters": {"a": 1}}') == ("", "", 1)
    assert read(prepared, '{"name": "Ada"}') == ("", '{"name": "Ada"}', 0)
