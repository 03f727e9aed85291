"""Expressions in llguidance's Lark, and texts as sequences of literals and special tokens.

The syntax is at https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

from mlx_parallm.grammar.json_schema.rewrite import rewritten
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

# WHITESPACE between JSON tokens: a single space, or a line break with indentation, as JSON writers
# put it. Without a bound, a model may write white space until its tokens run out.
WHITESPACE = r" |\r?\n[ \t]{0,40}"
NOTHING = '""'
# OPTIONS: llguidance would replace bytes that are forced by the tokens that the tokenizer makes of
# them. Where a text spells an added token (``<think>``), or is changed by the normaliser, these are
# tokens that its own parser refuses. The model chooses among the spellings instead.
OPTIONS = '%llguidance {"no_forcing": true}'
# _RULE_OF_JSON: a rule that is a schema on one line.
_RULE_OF_JSON = re.compile(r"^(\w+: %json )(\{.*\})$", re.MULTILINE)
ANY_TEXT = r"/(.|\n)*/"

#: ``SpecialTokens``: ids of texts that are one token, such as ``<tool_call>``.
SpecialTokens = Mapping[str, int]


def json_schema_grammar(schema: str, *, lenient: bool) -> dict[str, Any]:
    """Return a schema's llguidance grammar; ``lenient`` drops unsupported keywords.

    Raises:
        InvalidRequestError: llguidance cannot read it.
    """
    try:
        text = LLMatcher.grammar_from_json_schema(
            json.dumps(rewritten(json.loads(schema), lenient=lenient), ensure_ascii=False),
            defaults={"whitespace_pattern": WHITESPACE},
            overrides={"lenient": lenient},
        )
    except ValueError as error:
        raise InvalidRequestError(f"The schema cannot be used: {error}") from error
    grammar = json.loads(text)["grammars"][0]
    options = grammar["json_schema"]["x-guidance"]
    # llguidance ignores whitespace_flexible where there is a pattern.
    if options.get("whitespace_flexible") is False and options["whitespace_pattern"] == WHITESPACE:
        del options["whitespace_pattern"]
    return grammar


def regex_grammar(pattern: str) -> dict[str, Any]:
    """Return the llguidance grammar of a regular expression."""
    return json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]


def lark_grammar(text: str) -> dict[str, Any]:
    """Return the llguidance grammar of a text in Lark, with the schemas in its rules rewritten."""
    return {"lark_grammar": _RULE_OF_JSON.sub(_with_rewritten, text)}


def _with_rewritten(rule: re.Match[str]) -> str:
    """Return a rule whose schema is rewritten; one that is no JSON is left to llguidance."""
    try:
        schema = json.loads(rule[2])
        options = schema.get("x-guidance")
        lenient = is_object(options) and options.get("lenient") is True
        return rule[1] + json.dumps(rewritten(schema, lenient=lenient))
    except (ValueError, RecursionError):
        return rule[0]


def lark_of_gbnf(text: str) -> str:
    """Return a GBNF grammar in Lark.

    Raises:
        InvalidRequestError: it cannot be read.
    """
    return _converted(text, gbnf_to_lark)


def lark_of_either(text: str) -> str:
    """Return a Lark or GBNF grammar in Lark.

    Raises:
        InvalidRequestError: it cannot be read.
    """
    return _converted(text, any_to_lark)


def _converted(text: str, convert: Callable[[str], str]) -> str:
    try:
        return convert(text)
    except RecursionError:
        raise InvalidRequestError("The grammar is nested too deeply.") from None
    except Exception as error:
        # The converter raises classes of its own, all of which mean that the text is wrong.
        raise InvalidRequestError(f"The grammar cannot be read: {error}") from error


# Texts, expressions and comments of a grammar, in which nothing names a token.
_NO_TOKENS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*')
# A token by its text or its numbers, and the beginning of what follows it in its rule.
_TOKEN_AND_MORE = re.compile(r"<(?:\[([\d,\- ]+)\]|([^<>\s\[\]]+))>[)\]?+* \t]*(?=([^\s|)\]]|$)?)")


def inner_tokens(grammar: str) -> Iterator[str]:
    """Yield the special tokens, by text or id, after which a rule of a Lark grammar goes on."""
    plain = _NO_TOKENS.sub(lambda match: '""' if match[0][0] in '"/' else "", grammar)
    for match in _TOKEN_AND_MORE.finditer(plain):
        if match[3]:
            yield from [f"<{match[2]}>"] if match[2] else re.findall(r"\d+", match[1])


def literal(text: str, specials: SpecialTokens) -> str:
    """Return a text as a Lark expression with its special tokens as tokens; "" if it is empty.

    A model that has a token ``<tool_call>`` writes it as one, which a text in a grammar never
    matches.
    """
    if not text:
        return ""
    pieces: Sequence[str] = [text]
    if specials:
        longest_first = sorted(specials, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return " ".join(
        f"<[{specials[piece]}]>" if piece in specials else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


@dataclass(slots=True)
class LarkBuilder:
    """A Lark grammar under construction, and the grammars it refers to."""

    specials: SpecialTokens = field(default_factory=dict[str, int])
    rules: list[str] = field(default_factory=list[str])
    others: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _count: int = 0

    def rule(self, body: str) -> str:
        """Add a rule and return its name."""
        name = self._name("rule")
        self.rules.append(f"{name}: {body or NOTHING}")
        return name

    def terminal(self, body: str, *, lazy: bool = False) -> str:
        """Add a terminal, or a lazy lexeme, which ends as soon as it can; return its name."""
        name = self._name("lazy") if lazy else self._name("TERM")
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def other(self, grammar: Mapping[str, Any]) -> str:
        """Add a separate grammar and return the expression that refers to it."""
        name = self._name("grammar")
        self.others.append({**grammar, "name": name})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """See ``lark.literal``."""
        return literal(text, self.specials)

    def text_until(self, end: str) -> str:
        """Return an expression for text up to and with the first ``end``; any text if it is ""."""
        if not end:
            return self.terminal(ANY_TEXT)
        if end in self.specials:
            return f"{self.terminal(ANY_TEXT)} <[{self.specials[end]}]>"
        quoted = json.dumps(end, ensure_ascii=False)
        return self.terminal(f"{ANY_TEXT} {quoted}", lazy=True)

    def grammar(self, start: str) -> dict[str, Any]:
        """Return the whole in llguidance's JSON form; ``start`` is the expression to match."""
        text = "\n".join([OPTIONS, f"start: {start or NOTHING}", *self.rules])
        return {"grammars": [{"name": "main", "lark_grammar": text}, *self.others]}

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"
