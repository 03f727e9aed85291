"""Constraints on the text of a turn: forced calls, a structure, or one of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_parallm.api.turns.fields import SamplingFields
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.tools import ToolMode
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.grammar.structured_outputs import choice_spec, structured_outputs_spec
from mlx_parallm.grammar.vocabulary import UNSUPPORTED
from mlx_parallm.parsing.forced import ForcedCalls, forced_calls
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.strict import strict_calls
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import Grammar
from mlx_parallm.types.json_values import is_mapping

# Where a body of the Responses API has its format: a field within a field.
TEXT_FORMAT = "text.format"

# Reads a field's value; ``param`` is the field's name, for errors.
_Read = Callable[..., GrammarSpec | None]


async def body_grammar(body: SamplingFields, model: GenerationModel) -> Grammar | None:
    """Return what the fields of a request body ask an answer to match; None if they do not.

    Raises:
        InvalidRequestError: see ``body_structure`` and ``grammar_of``.
    """
    structure = body_structure(body)
    return None if structure is None else await grammar_of(structure[0], model, param=structure[1])


def body_structure(
    body: SamplingFields, *, text_format: Any = None
) -> tuple[GrammarSpec, str] | None:
    """Return what the fields of a request body ask for, and the field that asks; None if none does.

    ``text_format`` is what the Responses API has as ``text.format``.

    Raises:
        InvalidRequestError: see ``structure_of``.
    """
    fields = {name: getattr(body, name, None) for name in STRUCTURE_FIELDS}
    return structure_of(fields | {TEXT_FORMAT: text_format})


def structure_of(fields: Mapping[str, Any]) -> tuple[GrammarSpec, str] | None:
    """Return what a body's fields ask for, and the field that asks; None if none does.

    Args:
        fields: a body's fields by name; absent and null ones ask for nothing.

    Raises:
        InvalidRequestError: one is malformed, or several ask for something.
    """
    structures: list[tuple[GrammarSpec, str]] = []
    for name, read in _READERS.items():
        value = fields.get(name)
        spec = None if value is None else read(value, param=name)
        if spec is not None:
            structures.append((spec, name))
    if len(structures) > 1:
        names = " and ".join(name for _, name in structures)
        raise InvalidRequestError(
            f"{names} exclude each other: an answer can match one structure.",
            param=structures[1][1],
        )
    return structures[0] if structures else None


def _response_format(value: Any, *, param: str) -> GrammarSpec | None:
    """OpenAI's ``response_format``, and the same in vLLM's further types; None for plain text.

    Raises:
        InvalidRequestError: it is malformed.
    """
    if not is_mapping(value):
        raise _wrong(param, "is an object with a type")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            # SGLang's and llama.cpp's clients give a schema beside it.
            schema = value.get("schema")
            if schema is not None:
                return specs.json_schema(schema, strict=False, param=param)
            return specs.json_object(param=param)
        case "json_schema":
            return _named_schema(value.get("json_schema", value), param)
        case "structural_tag":
            return specs.structural_tag(value, param=param)
        case other:
            raise _wrong(param, f"has no type {json.dumps(str(other)[:64])}")


def _named_schema(value: Any, param: str) -> GrammarSpec:
    if not is_mapping(value) or "schema" not in value:
        raise _wrong(param, "needs a json_schema with a schema")
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong(param, "has a strict that is neither true nor false")
    if value["schema"] is None:
        raise _wrong(param, "needs a json_schema with a schema")
    return specs.json_schema(value["schema"], strict=strict is True, param=param)


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {what}.", param=param)


def _llama_grammar(value: Any, *, param: str) -> GrammarSpec | None:
    """Return what llama.cpp's ``grammar`` asks for; its clients send an empty text for nothing."""
    if value == "":
        return None
    return specs.context_free(value, kind=GrammarKind.GBNF, param=param)


# What an answer must match, as vLLM, SGLang and llama.cpp write it: specifications check values.
_schema = partial(specs.json_schema, strict=False)
_READERS: Mapping[str, _Read] = {
    "response_format": _response_format,
    TEXT_FORMAT: _response_format,
    "structured_outputs": structured_outputs_spec,
    "guided_json": _schema,
    "guided_regex": specs.regex,
    "guided_choice": choice_spec,
    "guided_grammar": specs.context_free,
    "regex": specs.regex,
    "ebnf": partial(specs.context_free, kind=GrammarKind.GBNF),
    "json_schema": _schema,
    "grammar": _llama_grammar,
}
#: The fields of a body that ``structure_of`` reads.
STRUCTURE_FIELDS = tuple(name for name in _READERS if name != TEXT_FORMAT)


# Work is bounded otherwise; this bounds it where the machine is busy or a bound is missing.
COMPILE_TIMEOUT_S = 10.0


async def grammar_of(
    spec: GrammarSpec, model: GenerationModel, *, param: str, begins_after: str | None = None
) -> Grammar:
    """Compile what an answer must match, off the event loop unless it is known.

    Args:
        spec: what to match.
        model: who answers.
        param: the request field it came from, for errors.
        begins_after: see ``Grammar``.

    Raises:
        InvalidRequestError: it is wrong, cannot be enforced, or is too much work.
    """
    compiler = model.grammars
    if compiler is None:
        raise InvalidRequestError(f"{UNSUPPORTED}.", param=param)
    text = compiler.known(spec)
    if text is None:
        future = asyncio.wrap_future(compiler.submit(spec))
        try:
            text = await asyncio.wait_for(future, COMPILE_TIMEOUT_S)
        except InvalidRequestError as refusal:
            refusal.param = param
            raise
        except TimeoutError:
            raise InvalidRequestError(
                f"It took more than {COMPILE_TIMEOUT_S:.0f} s to make a grammar of this.",
                param=param,
            ) from None
    return Grammar(text=text, begins_after=begins_after, param=param)


async def beginnings_of(
    grammar: Grammar, model: GenerationModel, starts: tuple[str, ...]
) -> frozenset[str]:
    """Return those of some texts with which what a compiled grammar matches may begin."""
    compiler = model.grammars
    if compiler is None or not starts:
        return frozenset()
    return frozenset(await asyncio.wrap_future(compiler.submit_starts(grammar.text, starts)))


@dataclass(frozen=True, slots=True)
class Constraint:
    """Notation of a turn, and what its text must match.

    Attributes:
        grammar: what its text must match; None for anything.
        tool_format: how its tool calls are written; None where there are none.
        is_structure: True if its answer matches a structure, unless it is calls.
        call_starts: with a structure: texts of which one begins calls, and none begins what matches
            the structure; empty if only a parser of calls can distinguish them.
    """

    grammar: Grammar | None
    tool_format: ToolFormat | None
    is_structure: bool = False
    call_starts: tuple[str, ...] = ()


async def constrain(turn: TurnRequest, model: GenerationModel, rendered: str) -> Constraint:
    """Return what a turn must match, and how its calls are to be read.

    * A forced call: calls only, in the model's own format where that can be forced. If the template
      takes no tools, the model has not seen them, but what it calls is valid. There is reasoning
      before it only where the prompt opens it or the request asks for it: a model that would rather
      say something else would escape into it.
    * A structure: content that matches it; with tools, that or calls.
    * Tools with ``strict``: whenever the model begins a call, it is a valid one, where the format
      marks calls. Calls to other tools are left as free as their schema.

    Raises:
        InvalidRequestError: the model cannot do it, or a schema cannot be enforced.
    """
    tools = turn.callable_tools
    _check(turn, model)
    form = model.tool_format if tools else None
    if tools and turn.tool_choice.mode is ToolMode.REQUIRED:
        calls = _calls(turn, model)
        spec = specs.context_free(calls.grammar, kind=GrammarKind.LARK, param="tools")
        grammar = await grammar_of(spec, model, param="tools")
        grammar = replace(grammar, param=turn.tool_choice.param)
        return Constraint(_before_calls(grammar, turn, model, rendered), calls.tool_format)
    if turn.structure is not None:
        return await _structured(turn, turn.structure, model, rendered)
    strict = _strict_calls(turn, model, rendered)
    if strict is None:
        return Constraint(None, form)
    grammar = await grammar_of(strict, model, param="tools")
    return Constraint(_after_thoughts(grammar, turn, model, rendered), form)


async def _structured(
    turn: TurnRequest, structure: GrammarSpec, model: GenerationModel, rendered: str
) -> Constraint:
    """Return the constraint of a turn whose answer matches a structure, or is calls."""
    grammar = await grammar_of(structure, model, param=turn.structure_field)
    answer, calls = grammar, tuple[str, ...]()
    if turn.callable_tools:
        either = _either(turn, model, structure)
        answer = await grammar_of(either, model, param=turn.structure_field)
        calls = _call_starts(model.tool_format)
    after = _before_answer(answer, turn, model.reasoning_format, rendered)
    # What the structure's own texts begin with is neither reasoning nor a call.
    own = await beginnings_of(grammar, model, (*after.free_starts, *calls))
    return Constraint(
        answer if own.intersection(after.free_starts) else after,
        model.tool_format if turn.callable_tools else None,
        is_structure=True,
        call_starts=() if own.intersection(calls) else calls,
    )


def _call_starts(form: ToolFormat | None) -> tuple[str, ...]:
    """Return the texts that forced calls begin with."""
    if form is None or form.forced is None:
        return ()
    start = form.forced.begin + form.forced.call.partition("$")[0]
    return (start, f"\n\n{start}") if start else ()


def _before_answer(
    grammar: Grammar, turn: TurnRequest, form: ReasoningFormat | None, rendered: str
) -> Grammar:
    """Return the grammar of an answer, with what may be free before it."""
    if form is None or form.answer_start is None:
        return _after_reasoning(grammar, turn, form, rendered)
    is_open = form.is_open_after(rendered, turn.begun)
    has_begun = bool(turn.begun) or rendered.rstrip().endswith(form.answer_start)
    if has_begun and not is_open:
        return grammar
    return replace(grammar, begins_after=form.answer_start)


def _check(turn: TurnRequest, model: GenerationModel) -> None:
    """Refuse tools that the prompt would not have, or whose calls nobody could read."""
    if not turn.callable_tools or turn.tool_choice.mode is ToolMode.REQUIRED:
        return
    if not model.allows_auto_tools:
        raise unsupported("This server lets no model choose tools by itself.", "tool_choice")
    if not model.tokenizer.takes_tools:
        raise unsupported("This model's chat template takes no tools.", "tools")
    if model.tool_format is None and model.parses_tools:
        raise unsupported(
            "How this model writes tool calls is not known; --tool-call-parser says it.", "tools"
        )


def unsupported(message: str, param: str) -> InvalidRequestError:
    """Return the refusal of what this model cannot do."""
    return InvalidRequestError(message, param=param, code="unsupported_parameter")


def _calls(turn: TurnRequest, model: GenerationModel) -> ForcedCalls:
    return forced_calls(
        model.tool_format,
        _for_grammar(turn),
        parallel=turn.parallel_tool_calls and not turn.tool_choice.is_named,
        special_tokens={} if model.grammars is None else model.grammars.vocabulary.specials,
    )


def _for_grammar(turn: TurnRequest) -> list[dict[str, Any]]:
    """Return the tools as ``parsing`` takes them."""
    return [
        {"name": tool.name, "parameters": tool.enforced(), "strict": tool.strict}
        for tool in turn.callable_tools
    ]


def _either(turn: TurnRequest, model: GenerationModel, structure: GrammarSpec) -> GrammarSpec:
    """Return the structure, or calls in the model's own format."""
    form = model.tool_format
    if form is None or form.forced is None or form.is_harmony:
        raise unsupported(
            "This model cannot choose between tools and a structured answer.", turn.structure_field
        )
    calls = {"type": "grammar", "grammar": _calls(turn, model).grammar}
    either = {"type": "or", "elements": [_node(structure), calls]}
    return specs.structural_tag({"format": either}, param=turn.structure_field)


def _node(spec: GrammarSpec) -> Mapping[str, Any]:
    """Return a specification as a part of a structural tag."""
    match spec.kind:
        case GrammarKind.JSON_SCHEMA | GrammarKind.LENIENT_JSON_SCHEMA:
            strict = spec.kind is GrammarKind.JSON_SCHEMA
            schema = json.loads(spec.text)
            return {"type": "json_schema", "json_schema": schema, "strict": strict}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": spec.text}
        case GrammarKind.CHOICE:
            options = [
                {"type": "const_string", "value": choice} for choice in json.loads(spec.text)
            ]
            return {"type": "or", "elements": options}
        case GrammarKind.STRUCTURAL_TAG:
            tag = json.loads(spec.text)
            if isinstance(tag.get("format"), Mapping):
                return tag["format"]
            raise unsupported(
                "A structural tag without a format cannot be combined with tools.",
                "structured_outputs",
            )
        case GrammarKind.LARK | GrammarKind.GBNF | GrammarKind.EITHER:
            return {"type": "grammar", "grammar": spec.text}


def _strict_calls(turn: TurnRequest, model: GenerationModel, rendered: str) -> GrammarSpec | None:
    """Free text in which every call is valid; None where no tool asks for that, or none can be."""
    strict, form = [tool for tool in turn.callable_tools if tool.strict], model.tool_format
    if form is None or not strict:
        return None
    # An agent that brings a custom tool must not fail on a tokenizer that takes no grammar: the
    # grammar is in the tool's description too.
    if model.grammars is None and all(tool.is_custom for tool in strict):
        return None
    tools = _for_grammar(turn)
    calls = strict_calls(form, tools, parallel=turn.parallel_tool_calls, prompt=rendered)
    return None if calls is None else specs.structural_tag({"format": calls}, param="tools")


def _before_calls(
    grammar: Grammar, turn: TurnRequest, model: GenerationModel, rendered: str
) -> Grammar:
    """Return the grammar of forced calls, with what may be free before them."""
    after = _after_thoughts(grammar, turn, model, rendered)
    return grammar if after.free_starts and not turn.asks_for_thinking else after


def _after_thoughts(
    grammar: Grammar, turn: TurnRequest, model: GenerationModel, rendered: str
) -> Grammar:
    """Return the grammar of calls, before which there may be reasoning."""
    form = model.reasoning_format
    # Harmony's calls are messages of their own, which may come first.
    if form and form.is_harmony:
        return grammar
    return _after_reasoning(grammar, turn, form, rendered)


def _after_reasoning(
    grammar: Grammar, turn: TurnRequest, form: ReasoningFormat | None, rendered: str
) -> Grammar:
    """Return the grammar of what follows the reasoning, which is free."""
    if form is None:
        return grammar
    if form.is_open_after(rendered, turn.begun):
        return replace(grammar, begins_after=form.end)
    if rendered.rstrip().endswith(form.end):
        return grammar
    # A marker in words is also how others begin an answer ("Here is the list").
    if form.start[0].isalpha() and not turn.asks_for_thinking:
        return grammar
    return replace(grammar, begins_after=form.end, free_starts=form.starts)
