"""Pieces of llguidance's Lark, and texts as sequences of them.

The syntax is at https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark, gbnf_to_lark

from mlx_parallm.types.errors import InvalidRequestError

# A single space, or a line break and indentation: what writers of JSON put between tokens. Without
# a bound a model may write white space until its tokens run out.
WHITESPACE = r" |\r?\n[ \t]{0,40}"
NOTHING = '""'
ANY_TEXT = r"/(.|\n)*/"

#: Texts that are one token, such as ``<tool_call>``, by text.
SpecialTokens = Mapping[str, int]


def json_schema_grammar(schema: str, *, lenient: bool) -> dict[str, Any]:
    """The llguidance grammar of a schema's text; ``lenient`` leaves unsupported keywords out."""
    text = LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": WHITESPACE}, overrides={"lenient": lenient}
    )
    return json.loads(text)["grammars"][0]


def regex_grammar(pattern: str) -> dict[str, Any]:
    """The llguidance grammar of a regular expression."""
    return json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]


def lark_of_gbnf(text: str) -> str:
    """A GBNF grammar in Lark.

    Raises:
        InvalidRequestError: it cannot be read.
    """
    return _converted(text, gbnf_to_lark)


def lark_of_either(text: str) -> str:
    """A grammar in Lark, whether it is written in Lark or in GBNF.

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
        # The converter raises classes of its own, all of which mean that the text is at fault.
        raise InvalidRequestError(f"The grammar cannot be read: {error}") from error


def literal(text: str, specials: SpecialTokens) -> str:
    """A text as a Lark expression, its special tokens as tokens; nothing for an empty text.

    A model writes ``<tool_call>`` as one token where it has it, which no text in a grammar matches.
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

    specials: SpecialTokens = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    _count: int = 0

    def rule(self, body: str) -> str:
        """Add a rule; its name."""
        name = self._name("rule")
        self.rules.append(f"{name}: {body or NOTHING}")
        return name

    def terminal(self, body: str, *, lazy: bool = False) -> str:
        """Add a terminal, or a lazy lexeme, which ends as soon as it can; its name."""
        name = self._name("lazy") if lazy else self._name("TERM")
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def other(self, grammar: Mapping[str, Any]) -> str:
        """Add a grammar of its own; the expression that refers to it."""
        name = self._name("grammar")
        self.others.append({**grammar, "name": name})
        return f"@{name}"

    def literal(self, text: str) -> str:
        """See ``lark.literal``."""
        return literal(text, self.specials)

    def text_until(self, end: str) -> str:
        """Any text up to and with the first ``end``; any text at all if that is empty."""
        if not end:
            return self.terminal(ANY_TEXT)
        if end in self.specials:
            return f"{self.terminal(ANY_TEXT)} <[{self.specials[end]}]>"
        quoted = json.dumps(end, ensure_ascii=False)
        return self.terminal(f"{ANY_TEXT} {quoted}", lazy=True)

    def grammar(self, start: str) -> dict[str, Any]:
        """Everything in llguidance's JSON form, beginning with the expression ``start``."""
        text = "\n".join(["%llguidance {}", f"start: {start or NOTHING}", *self.rules])
        return {"grammars": [{"name": "main", "lark_grammar": text}, *self.others]}

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}_{self._count}"
