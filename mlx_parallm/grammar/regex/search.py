"""Finds the first match of expressions in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.grammar.regex.automaton import Automaton, automaton
from mlx_parallm.types.errors import InvalidRequestError

# MAX_STATES of a request's expressions together: a character may visit all of them.
MAX_STATES = 256
# MAX_HELD characters of a text that may become a match.
MAX_HELD = 1024
# MAX_CACHED steps of the search that are known.
MAX_CACHED = 4096

_States = frozenset[tuple[int, int]]


def check_stop_expressions(patterns: Sequence[str]) -> None:
    """Raise InvalidRequestError, without ``param``, if expressions cannot end a text."""
    StopExpressions(patterns)


class StopExpressions:
    """Expressions whose first match ends a text, prepared for any number of texts."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Prepare the expressions.

        Raises:
            InvalidRequestError: see ``automaton``; or one matches the empty text or looks at the
                text's end, or they have too many states; without ``param``.
        """
        self.patterns = tuple(dict.fromkeys(patterns))
        self.automata = [automaton(pattern) for pattern in self.patterns]
        self._steps: dict[tuple[_States, str], _States] = {}
        for pattern, each in zip(self.patterns, self.automata, strict=True):
            _check(pattern, each)
        if sum(len(each.free) for each in self.automata) > MAX_STATES:
            raise InvalidRequestError(
                f"The expressions need more than {MAX_STATES} states together."
            )
        self._entries = self._begin(begins=False)
        self._first = self._begin(begins=True)

    def search(self) -> StopSearch:
        """Return the search in one text."""
        return StopSearch(self)

    def step(self, states: _States, character: str, *, is_first: bool) -> _States:
        """Return the states of matches that are not complete, after a character."""
        states = states | (self._first if is_first else self._entries)
        key = (states, character)
        known = self._steps.get(key)
        if known is None:
            known = frozenset(
                (number, state)
                for number, each in enumerate(self.automata)
                for state in each.closure(
                    each.after([own for index, own in states if index == number], ord(character))
                )
            )
            if len(self._steps) >= MAX_CACHED:
                self._steps.clear()
            self._steps[key] = known
        return known

    def _begin(self, *, begins: bool) -> _States:
        return frozenset(
            (number, state)
            for number, each in enumerate(self.automata)
            for state in each.closure([each.start], begins=begins)
        )


class StopSearch:
    """The search in one text.

    Attributes:
        num_held: last characters of the text that may be part of a match.
    """

    __slots__ = ("_expressions", "_held", "_num_taken", "_states", "num_held")

    def __init__(self, expressions: StopExpressions) -> None:
        self._expressions = expressions
        self._states: _States = frozenset()
        self._held = ""
        self._num_taken = 0
        self.num_held = 0

    def add(self, character: str) -> tuple[str, int] | None:
        """Take a character; return the expression of which it completes a match, and its length."""
        is_first = self._num_taken == 0
        self._num_taken += 1
        self._states = self._expressions.step(self._states, character, is_first=is_first)
        if not self._states:
            self._held = ""
            self.num_held = 0
            return None
        self._held = (self._held + character)[-MAX_HELD:]
        self.num_held = len(self._held)
        ends = [
            number
            for number, each in enumerate(self._expressions.automata)
            if (number, each.end) in self._states
        ]
        matches = [(self._expressions.patterns[each], self._length(each)) for each in ends]
        return max(matches, key=lambda match: match[1]) if matches else None

    def _length(self, number: int) -> int:
        """Return the length of the longest match that ends here."""
        each = self._expressions.automata[number]
        # By state, where the earliest match that has reached it begins.
        starts: dict[int, int] = {}
        for place, character in enumerate(self._held):
            is_first = place == 0 and self._num_taken == len(self._held)
            entries = dict.fromkeys(each.closure([each.start], begins=is_first), place)
            following: dict[int, int] = {}
            for state, start in (entries | starts).items():
                for target in each.after([state], ord(character)):
                    following[target] = min(start, following.get(target, start))
            starts = {}
            for state, start in sorted(following.items(), key=lambda entry: entry[1]):
                for reached in each.closure([state]):
                    starts.setdefault(reached, start)
        return len(self._held) - starts.get(each.end, 0)


def _check(pattern: str, each: Automaton) -> None:
    shown = pattern if len(pattern) <= 80 else f"{pattern[:80]}…"
    if each.at_end:
        raise InvalidRequestError(f"The expression {shown!r} must not name the text's end.")
    if each.end in each.closure([each.start], begins=True):
        raise InvalidRequestError(f"The expression {shown!r} matches the empty text.")
