"""Lark grammars of tools' inputs as regular expressions, matched by the compiler of grammars."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_parallm.grammar import lark_regex as module
from mlx_parallm.grammar.lark_regex import COMMON, MAX_PATTERN_CHARS, lark_regex
from mlx_parallm.types.errors import InvalidRequestError

BYTES = LLTokenizer("byte")
# DOUBLED: each rule has the one after it twice.
DOUBLED = "".join(f"r{number}: r{number + 1} r{number + 1}\n" for number in range(40))

# As agents send it for patches of files.
PATCH = """
start: begin hunk+ end
begin: "*** Begin" LF
end: "*** End" LF?
hunk: add | delete | update
add: "*** Add: " name LF add_line+
delete: "*** Delete: " name LF
update: "*** Update: " name LF (context | line)+ eof?
name: /(.+)/
add_line: "+" /(.*)/ LF -> line
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF

%import common.LF
"""
SUM = """
// Sums of products.
start: sum
?sum: product (SP "+" SP product)*
!product.2: atom ("*" atom)*
atom: INT | "(" sum ")"
SP: " "
%import common.INT
"""
LEFT = 'start: list\nlist: list "," ITEM | ITEM\nITEM: /[a-c]/'
SPACED = """
start: "a" B+ ("x".."z")~2..3 ["no"i] D{2} E
B: /b/ | "c"
D: "d" "e"
E: /[e\\/]/i
%ignore WS
%import common (WS)
"""


def matches(pattern: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_regex(pattern), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            [
                '*** Begin\n*** Add: a "b"\n+x = "\\t"\n+\n*** End\n',
                "*** Begin\n*** Update: é\n@@ f\n-a\n+b\n*** End of File\n*** Delete: c\n*** End",
            ],
            ["*** Begin\n*** End", "*** Begin\n*** Add: a\n-b\n*** End"],
        ),
        (SUM, ["1 + 22", "(1 + 2)*3", "((1)*2)"], ["1 +", "(1", "1+2", ""]),
        (LEFT, ["a", "a,b", "a,b,c"], ["", "a,", ",a"]),
        (
            SPACED,
            ["abxydedee", "\n abxydedee ", "a b\n c xyzNO de de E", "acxydede/"],
            ["axydedee", "abxdedee", "abxyd e dee", "abxydee"],
        ),
        (
            'start: N "-" _M | "x"\n%import common.INT -> N\n%import common.WORD->_M\n%ignore " "',
            ["12-ab", " 1 - a ", "  x", "x"],
            ["12", "a-1", " ", ""],
        ),
        ('start: "a.b" "|" "\\n" "\\u00e9"', ["a.b|\né"], ["axb|\né", "a.b"]),
    ],
)
def test_the_expression_matches_what_the_grammar_does(
    grammar: str, good: list[str], bad: list[str]
) -> None:
    pattern = lark_regex(grammar)
    assert [text for text in good if not matches(pattern, text)] == []
    assert [text for text in bad if matches(pattern, text)] == []


@pytest.mark.parametrize("name", COMMON)
def test_terminals_of_the_library_are_those_of_the_compiler(name: str) -> None:
    text = f"start: {name}\n%import common.{name}"
    own = lark_regex(text)
    grammar = f'{{"grammars": [{{"lark_grammar": "start: {name}\\n%import common.{name}"}}]}}'
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error()
    samples = ["1", "12.5", ".5", "1e3", "-2", "+1.0E-3", "a", "Z", "aB_1", '"a\\"b"', " \t", "\n"]
    for sample in [*samples, "\r\n", "\r", "", "f", "G", "_a", '"'] if own else []:
        fresh, data = matcher.deep_copy(), list(sample.encode())
        theirs = fresh.try_consume_tokens(data) == len(data) and fresh.is_accepting()
        assert matches(own, sample) == theirs, sample


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ("start: x", "no rule 'x'"),
        ("", "no rule 'start'"),
        ("start: start", "Nothing"),
        ('start{a}: "a"', "templates of rules, as start{a}"),
        ('start: _list{x, ","}\nx: "a"', "templates of rules, as _list{x"),
        ("start: N\n%import common (INT, WORD) -> N", "-> N"),
        ("start: INT\n%import common.INT -> N", "no rule 'INT'"),
        ('start: "a" <think>', "<"),
        ('start: %json {"type": "object"}', "%json"),
        ('start: "a"\n%import other.X', "other.X"),
        ('start: ("a"', "("),
        ('start: "a")', ")"),
        ('start: "\\q"', "q"),
        ("start: ~/a/", "~"),
        ('start: "a"' + " " * 20_000, "at most"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (f"start: r0\n{DOUBLED}r40:", "large"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(grammar: str, says: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        lark_regex(grammar)
    assert says in str(refusal.value)


def test_recursion_is_written_out_as_deep_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = lark_regex(SUM)
    assert len(deep) <= MAX_PATTERN_CHARS
    monkeypatch.setattr(module, "MAX_DEPTH", 1)
    flat = lark_regex(SUM)
    assert matches(flat, "1 + 2")
    assert not matches(flat, "(1)")
    assert matches(deep, "(1)")
