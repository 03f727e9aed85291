"""The structure that an answer must match: from a body's fields to a grammar.

``response_format`` is OpenAI's; ``structured_outputs`` and ``guided_*`` are vLLM's; ``regex``,
``ebnf`` and ``json_schema`` are SGLang's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from mlx_parallm.api.turns.fields import SamplingFields
from mlx_parallm.api.turns.grammars import grammar_of
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarKind, GrammarSpec
from mlx_parallm.grammar.structured_outputs import choice_spec, structured_outputs_spec
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.request import Grammar

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


# What an answer must match, as vLLM and SGLang write it: the specification checks the value.
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
}
#: The fields of a body that ``structure_of`` reads.
STRUCTURE_FIELDS = tuple(name for name in _READERS if name != TEXT_FORMAT)
