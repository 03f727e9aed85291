"""Regular expressions of texts in JSON schemas: complements of finite sets, and of formats."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from mlx_parallm.grammar.regex.characters import others, union
from mlx_parallm.grammar.regex.syntax import Characters, Edge, Repeat, Sequence, parse
from mlx_parallm.types.errors import InvalidRequestError

# MAX_CHARS of texts, and MAX_COMPLEMENT_CHARS of an expression for all other texts.
MAX_CHARS = 2_000
MAX_COMPLEMENT_CHARS = 20_000
# LITERAL: an expression that matches texts as they stand, or those that begin with them.
_PLAIN = r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s])*"
LITERAL = re.compile(rf"\^(?:({_PLAIN})|\((?:\?:)?({_PLAIN}(?:\|{_PLAIN})*)\))(\$?)")

LINE_BREAK = ((10, 10),)
_PATH = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=@/]|%[0-9A-Fa-f]{2})"
_QUERY = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=@/:?]|%[0-9A-Fa-f]{2})"


def other_texts(
    texts: Collection[str], *, is_prefix: bool = False, has_breaks: bool = True
) -> str | None:
    """Return an expression of all texts but these; None if it would be too long.

    Args:
        texts: what does not match.
        is_prefix: True if no text that begins with one of them matches either.
        has_breaks: True if texts with line breaks match.
    """
    if sum(map(len, texts)) > MAX_CHARS:
        return None
    complete = set(texts)
    # Below these no other text begins.
    ends = complete if is_prefix else set[str]()
    following: dict[str, set[str]] = {"": set()}
    for text in complete:
        for end in range(len(text)):
            if text[:end] in ends:
                break
            following.setdefault(text[:end], set()).add(text[end])
        else:
            following.setdefault(text, set())
    any_sign, breaks = (r"(?s:.)", "") if has_breaks else (".", r"\n")
    parts: list[str] = []
    size = 0
    for prefix, characters in following.items():
        if prefix in ends:
            continue
        shown = escaped(prefix)
        others = "".join(sorted(map(escaped, characters))) + breaks
        rest = f"[^{others}]" if characters else any_sign
        parts += [shown] * (prefix not in complete) + [f"{shown}{rest}{any_sign}*"]
        size += len(parts[-1])
        if size > MAX_COMPLEMENT_CHARS:
            return None
    pattern = f"^(?:{'|'.join(parts)})$"
    return pattern if parts and len(pattern) <= MAX_COMPLEMENT_CHARS else None


def complement(pattern: str) -> str | None:
    """Return an expression of texts that another one does not match; None if it is unknown.

    Texts that only some languages would match are not among them: in Python, ``$`` matches before
    a line break at the end too.
    """
    match = LITERAL.fullmatch(pattern)
    if match is None:
        return _other_runs(pattern)
    options = re.split(r"(?<!\\)\|", match[1] if match[2] is None else match[2])
    texts = [re.sub(r"\\(.)", r"\1", each) for each in options]
    return other_texts(texts, is_prefix=not match[3], has_breaks=False)


def _other_runs(pattern: str) -> str | None:
    """Return the complement of an expression for a run of characters of one set."""
    try:
        node = parse(pattern, is_loose=True)
    except InvalidRequestError:
        return None
    match node:
        case Sequence((Edge(True), Repeat(Characters(ranges), least, most), Edge(False))):
            pass
        case Sequence((Edge(True), Characters(ranges), Edge(False))):
            least = most = 1
        case _:
            return None
    gaps = others(union([ranges, LINE_BREAK]))
    other = "".join(f"\\u{{{low:x}}}-\\u{{{high:x}}}" for low, high in gaps)
    parts = [rf".*[{other}].*"] if gaps else []
    parts += [rf".{{0,{least - 1}}}"] if least else []
    parts += [rf".{{{most + 1},}}"] if most is not None else []
    return f"^(?:{'|'.join(parts)})$" if parts else None


def escaped(text: str) -> str:
    """Return a text as an expression of Rust's syntax, also for within brackets."""
    return "".join(
        each if each.isalnum() or each in " _" else f"\\u{{{ord(each):x}}}" for each in text
    )


#: ``FORMATS``: expressions of formats that llguidance does not know.
FORMATS: Mapping[str, str] = {
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "uri-reference": rf"^(?:[A-Za-z][A-Za-z0-9+\-.]*:(?:{_PATH}|:)*|{_PATH}*)"
    rf"(?:\?{_QUERY}*)?(?:#{_QUERY}*)?$",
}
#: ``NARROWER``: known formats whose texts are all texts of formats that are not known.
NARROWER: Mapping[str, str] = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri-reference",
}
#: ``ENFORCED``: formats that llguidance knows.
ENFORCED = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
