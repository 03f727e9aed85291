"""vLLM's ``structured_outputs``, of requests over HTTP and of ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.grammar import StructuredOutputsParams
from mlx_parallm.types.json_values import is_mapping, is_sequence

# UNENFORCED: options of vLLM that a request may have only as they are by default.
UNENFORCED = ("disable_additional_properties", "whitespace_pattern")
# COMPACT: the option without white space, and the kinds that it changes.
COMPACT, COMPACT_KINDS = "disable_any_whitespace", ("json", "json_object")


def structured_outputs_spec(value: Any, *, param: str) -> GrammarSpec | None:
    """Return the specification of a request's structured outputs; None if it asks for nothing.

    Args:
        value: ``StructuredOutputsParams``, or a mapping with fields of its names; others are
            ignored.
        param: the request field it came from, for errors.

    Raises:
        InvalidRequestError: it is malformed, asks for several structures, or for something that
            cannot be enforced.
    """
    if isinstance(value, StructuredOutputsParams):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if not is_mapping(value):
        raise _wrong(param, "is an object")
    present = {key: item for key, item in value.items() if item is not None and item is not False}
    for option in UNENFORCED:
        if option in present:
            raise _wrong(param, f"has {option}, which cannot be enforced")
    kinds = [key for key in _READERS if key in present]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise _wrong(param, f"asks for {' and '.join(kinds)}, which exclude each other")
    (kind,) = kinds
    if COMPACT not in present:
        return _READERS[kind](present[kind], param=param)
    if kind not in COMPACT_KINDS:
        raise _wrong(param, f"has {COMPACT}, which {kind} cannot have")
    return _READERS[kind](present[kind], param=param, is_compact=True)


def choice_spec(value: Any, *, param: str) -> GrammarSpec:
    """Return the specification of a list of texts; raise InvalidRequestError if it is none."""
    if not is_sequence(value):
        raise _wrong(param, "takes a list of texts as choice")
    return specs.choice(value, param=param)


def _json_object(value: Any, *, param: str, is_compact: bool = False) -> GrammarSpec:
    if value is not True:
        raise _wrong(param, "has a json_object that is not true")
    return specs.json_schema({"type": "object"}, is_compact=is_compact, param=param)


def _wrong(param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {what}.", param=param)


# Reads a field's value; ``param`` is the field's name, for errors.
_Read = Callable[..., GrammarSpec]
_READERS: Mapping[str, _Read] = {
    "json": partial(specs.json_schema, strict=False),
    "regex": specs.regex,
    "choice": choice_spec,
    "grammar": specs.context_free,
    "json_object": _json_object,
    "structural_tag": specs.structural_tag,
}
