"""What a caller may ask a sample to match, before it is compiled for a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mlx_parallm.grammar.json_size import is_longer
from mlx_parallm.types.errors import InvalidRequestError

# Of the text of a specification; OpenAI takes 120,000 characters of names and values.
MAX_CHARS = 256 * 1024
# Of brackets in JSON. llguidance reads 127 levels, of which a schema's property takes two.
MAX_DEPTH = 100


class GrammarKind(StrEnum):
    """How the text of a specification is to be read."""

    JSON_SCHEMA = "json_schema"
    #: The same, with keywords that cannot be enforced left out.
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
    """What a sample must match: a kind, and its text (JSON for schemas, choices and tags)."""

    kind: GrammarKind
    text: str


def json_schema(
    schema: Mapping[str, Any] | str | bool, *, strict: bool = True, param: str | None = None
) -> GrammarSpec:
    """JSON that a schema accepts, its properties in the schema's order.

    Args:
        schema: an object, or its JSON text.
        strict: refuse keywords that cannot be enforced when it is compiled, instead of leaving
            them out.
        param: the request field it came from, for errors.

    Raises:
        InvalidRequestError: it is no JSON object, or too large or too deep.
    """
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("A JSON schema is a JSON object.", param=param)
    kind = GrammarKind.JSON_SCHEMA if strict else GrammarKind.LENIENT_JSON_SCHEMA
    return GrammarSpec(kind, _json_text(schema, param))


def json_object(*, param: str | None = None) -> GrammarSpec:
    """Any JSON object."""
    return json_schema({"type": "object"}, param=param)


def regex(pattern: str, *, param: str | None = None) -> GrammarSpec:
    """Text that a regular expression matches from beginning to end, in the syntax of Rust's regex.

    Raises:
        InvalidRequestError: it is too large.
    """
    return _text_spec(GrammarKind.REGEX, pattern, param)


def choice(options: Sequence[str], *, param: str | None = None) -> GrammarSpec:
    """One of several texts.

    Raises:
        InvalidRequestError: there is none, one is empty or no text, or they are too large.
    """
    if not options or not all(isinstance(one, str) and one for one in options):
        raise InvalidRequestError(
            "A choice needs one or more texts, none of them empty.", param=param
        )
    return GrammarSpec(GrammarKind.CHOICE, _json_text(list(options), param))


def context_free(
    text: str, *, kind: GrammarKind = GrammarKind.EITHER, param: str | None = None
) -> GrammarSpec:
    """A context-free grammar, in llguidance's Lark or llama.cpp's GBNF.

    Raises:
        InvalidRequestError: it is too large.
    """
    return _text_spec(kind, text, param)


def structural_tag(tag: Mapping[str, Any] | str, *, param: str | None = None) -> GrammarSpec:
    """Text with constrained parts, as vLLM and XGrammar describe it; see docs/structured-output.md.

    Raises:
        InvalidRequestError: it is no JSON object, or too large or too deep.
    """
    if isinstance(tag, str):
        tag = _parsed(tag, param)
    if not isinstance(tag, Mapping):
        raise InvalidRequestError("A structural tag is a JSON object.", param=param)
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, _json_text(tag, param))


def _text_spec(kind: GrammarKind, text: str, param: str | None) -> GrammarSpec:
    if not isinstance(text, str) or not text:
        raise InvalidRequestError("A text that is not empty is needed.", param=param)
    _check_size(len(text), param)
    return GrammarSpec(kind, text)


def _json_text(value: Any, param: str | None) -> str:
    # First: to write or to walk through what is too large takes long.
    if is_longer(value, MAX_CHARS):
        raise _too_long(f"more than {MAX_CHARS}", param)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # JSON within a text can write half a surrogate pair, which no grammar can hold.
        text.encode()
    except RecursionError:
        raise _too_deep(param) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"This is no JSON: {error}", param=param) from error
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
        raise InvalidRequestError(f"This is no JSON: {error}", param=param) from error


def _check_size(length: int, param: str | None) -> None:
    if length > MAX_CHARS:
        raise _too_long(str(length), param)


def _too_long(length: str, param: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"This has {length} characters; structured output takes {MAX_CHARS} at most.", param=param
    )


def _check_depth(value: Any, param: str | None) -> None:
    """Refuse deep nesting without recursion, so that what follows may recurse."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
        if not level:
            return
    raise _too_deep(param)


def _too_deep(param: str | None) -> InvalidRequestError:
    return InvalidRequestError(f"This is nested deeper than {MAX_DEPTH} levels.", param=param)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from (one for one in value.values() if isinstance(one, (Mapping, list, tuple)))
    elif isinstance(value, (list, tuple)):
        yield from (one for one in value if isinstance(one, (Mapping, list, tuple)))
