"""Specifications of what a sample must match, before they are compiled for a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping, is_object, is_sequence

# MAX_CHARS of a specification's text; OpenAI takes 120,000 characters of names and values.
MAX_CHARS = 256 * 1024
# MAX_DEPTH of JSON. llguidance reads 127 levels, of which a schema's property takes two.
MAX_DEPTH = 100


class GrammarKind(StrEnum):
    """Language that a specification is written in."""

    JSON_SCHEMA = "json_schema"
    #: A JSON schema whose unsupported keywords are dropped.
    LENIENT_JSON_SCHEMA = "lenient_json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"
    #: Lark or GBNF, whichever it looks like.
    EITHER = "either"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A text that a sample must match, and its kind (JSON for schemas, choices and tags)."""

    kind: GrammarKind
    text: str


def json_schema(
    schema: Mapping[str, Any] | str | bool,
    *,
    strict: bool = True,
    is_compact: bool = False,
    param: str | None = None,
) -> GrammarSpec:
    """Return the specification of JSON that a schema accepts, its properties in order.

    Args:
        schema: an object, or its JSON text.
        strict: True if the compiler refuses keywords that cannot be enforced; False if it drops
            them.
        is_compact: True if there is no white space between the tokens of JSON.
        param: the request field it came from, for errors.

    Raises:
        InvalidRequestError: it is no JSON object, or too large or too deep.
    """
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("A JSON schema must be a JSON object.", param=param)
    if is_compact:
        options = schema.get("x-guidance")
        compact: dict[str, Any] = dict(options) if is_mapping(options) else {}
        schema = {**schema, "x-guidance": compact | {"whitespace_flexible": False}}
    kind = GrammarKind.JSON_SCHEMA if strict else GrammarKind.LENIENT_JSON_SCHEMA
    return GrammarSpec(kind, _json_text(schema, param))


def json_object(*, param: str | None = None) -> GrammarSpec:
    """Return the specification of any JSON object."""
    return json_schema({"type": "object"}, param=param)


def regex(pattern: str, *, param: str | None = None) -> GrammarSpec:
    """Return the specification of a regular expression for the whole text, in Rust's syntax.

    Raises:
        InvalidRequestError: it is too large.
    """
    return _text_spec(GrammarKind.REGEX, pattern, param)


def choice(options: Sequence[str], *, param: str | None = None) -> GrammarSpec:
    """Return the specification of one of several texts.

    Raises:
        InvalidRequestError: there is none, one is empty or no text, or they are too large.
    """
    if not options or not all(map(_is_text, options)):
        raise InvalidRequestError(
            "A choice needs one or more texts, none of them empty.", param=param
        )
    return GrammarSpec(GrammarKind.CHOICE, _json_text(list(options), param))


def context_free(
    text: str, *, kind: GrammarKind = GrammarKind.EITHER, param: str | None = None
) -> GrammarSpec:
    """Return the specification of a context-free grammar, in llguidance's Lark or in GBNF.

    Raises:
        InvalidRequestError: it is too large.
    """
    return _text_spec(kind, text, param)


def structural_tag(tag: Mapping[str, Any] | str, *, param: str | None = None) -> GrammarSpec:
    """Return the specification of text with constrained parts, as in vLLM and XGrammar.

    See docs/structured-output.md.

    Raises:
        InvalidRequestError: it is no JSON object, or too large or too deep.
    """
    if isinstance(tag, str):
        tag = _parsed(tag, param)
    if not isinstance(tag, Mapping):
        raise InvalidRequestError("A structural tag must be a JSON object.", param=param)
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, _json_text(tag, param))


def _is_text(value: object) -> TypeGuard[str]:
    """True if it is a text that is not empty; callers from Python may pass anything."""
    return isinstance(value, str) and value != ""


def _text_spec(kind: GrammarKind, text: object, param: str | None) -> GrammarSpec:
    if not _is_text(text):
        raise InvalidRequestError("The text must not be empty.", param=param)
    _check_size(len(text), param)
    return GrammarSpec(kind, text)


def _json_text(value: Any, param: str | None) -> str:
    # The estimate comes before everything that walks the value, because it may be huge.
    if is_longer(value, MAX_CHARS):
        raise _too_long(f"more than {MAX_CHARS}", param)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # A JSON escape can stand for half a surrogate pair, which no grammar can hold.
        text.encode()
    except RecursionError:
        raise _too_deep(param) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"This is not JSON: {error}", param=param) from error
    _check_size(len(text), param)
    _check_depth(value, param)
    return text


def _parsed(text: str, param: str | None) -> Any:
    _check_size(len(text), param)
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep(param) from None
    except ValueError as error:
        raise InvalidRequestError(f"This is not JSON: {error}", param=param) from error


def _check_size(length: int, param: str | None) -> None:
    if length > MAX_CHARS:
        raise _too_long(str(length), param)


def _too_long(length: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"This has {length} characters; structured output takes {MAX_CHARS} at most.", param=param
    )


def _check_depth(value: Any, param: str | None) -> None:
    """Raise for deep nesting, without recursion; what follows may then recurse."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return
    raise _too_deep(param)


def _too_deep(param: str | None) -> InvalidRequestError:
    return InvalidRequestError(f"This is nested deeper than {MAX_DEPTH} levels.", param=param)


def _children(value: Any) -> Iterator[Any]:
    items = value.values() if is_mapping(value) else value if is_sequence(value) else ()
    yield from (item for item in items if is_mapping(item) or is_sequence(item))


def is_longer(value: Any, limit: int) -> bool:
    """True if a value, as JSON text, surely has more than ``limit`` characters.

    Near the limit the text may be longer even if the result is False, because escapes are not
    counted. The walk stops at the limit and does not recurse, so values may be large, deep or
    cyclic.
    """
    rest: list[Any] = [value]
    size = 0
    while rest and size <= limit:
        item = rest.pop()
        if is_object(item):
            # Each member has quotes, a colon and a comma, with the spaces that Python writes.
            size += 6 * len(item) + sum(map(len, map(str, item)))
            rest.extend(item.values())
        elif is_sequence(item):
            size += 2 + 2 * (len(item) - 1)
            rest.extend(item)
        else:
            size += len(item) + 2 if isinstance(item, str) else 1
    return size > limit
