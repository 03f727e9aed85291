"""Finds the first match of expressions in a text that grows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from mlx_parallm.grammar.regex.automaton import Automaton, automaton
from mlx_parallm.grammar.regex.syntax import MAX_CHARS
from mlx_parallm.types.errors import InvalidRequestError

# MAX_STATES of a request's expressions together: a character may visit all of them.
MAX_STATES = 256
# MAX_HELD characters of a text that may become a match.
MAX_HELD = 1024
# MAX_CACHED states of all steps of a search that are known.
MAX_CACHED = 1 << 15
# MAX_PREPARED requests' expressions that are kept.
MAX_PREPARED = 16

#: ``_Live``: states of incomplete matches by where the matches begin, the earliest first. A state
#: stands where its earliest match begins.
_Live = tuple[frozenset[int], ...]


class _Step(NamedTuple):
    """Matches that are not complete after a character.

    Attributes:
        live: the states after it.
        origins: by place in it, the place before; the one behind all is that of the character.
        ends: by completed expression, the place of its match.
    """

    live: _Live
    origins: tuple[int, ...]
    ends: tuple[tuple[str, int], ...]


def check_stop_expressions(patterns: Sequence[str]) -> None:
    """Raise InvalidRequestError, without ``param``, if expressions cannot end a text."""
    stop_expressions(tuple(patterns))


@functools.lru_cache(MAX_PREPARED)
def stop_expressions(patterns: tuple[str, ...]) -> StopExpressions:
    """Return prepared expressions; see ``StopExpressions``."""
    return StopExpressions(patterns)


class StopExpressions:
    """Expressions whose first match ends a text, prepared for any number of texts."""

    def __init__(self, patterns: Sequence[str]) -> None:
        """Prepare the expressions.

        Raises:
            InvalidRequestError: see ``automaton``; or one matches the empty text or looks at the
                text's end, or they have too many states or characters; without ``param``.
        """
        self.patterns = tuple(dict.fromkeys(patterns))
        if sum(map(len, self.patterns)) > MAX_CHARS:
            raise InvalidRequestError(
                f"The expressions have more than {MAX_CHARS} characters together."
            )
        self._joined = Automaton()
        # By state, the expression that it completes.
        self._ends: dict[int, str] = {}
        starts: list[int] = []
        for pattern in self.patterns:
            each = automaton(pattern)
            _check(pattern, each)
            shift = self._joined.add(each)
            starts.append(each.start + shift)
            self._ends[each.end + shift] = pattern
            if len(self._joined.free) > MAX_STATES:
                raise InvalidRequestError(
                    f"The expressions need more than {MAX_STATES} states together."
                )
        self._steps: dict[tuple[_Live, str], _Step] = {}
        self._num_cached = 0
        self._entries = frozenset(self._joined.closure(starts))
        self._first = frozenset(self._joined.closure(starts, begins=True))

    def search(self) -> StopSearch:
        """Return the search in one text."""
        return StopSearch(self)

    def step(self, live: _Live, character: str, *, is_first: bool) -> _Step:
        """Return what a character leads to from the states before it."""
        live = (*live, self._first if is_first else self._entries)
        key = (live, character)
        known = self._steps.get(key)
        if known is None:
            known = self._after(live, ord(character))
            self._num_cached += 1 + sum(map(len, live)) + sum(map(len, known.live))
            if self._num_cached > MAX_CACHED:
                self._steps.clear()
                self._num_cached = 0
            self._steps[key] = known
        return known

    def _after(self, live: _Live, code: int) -> _Step:
        seen: set[int] = set()
        after: list[frozenset[int]] = []
        origins: list[int] = []
        ends: list[tuple[str, int]] = []
        for origin, group in enumerate(live):
            reached = self._joined.closure(self._joined.after(group, code), known=seen)
            if reached:
                ends += [(self._ends[each], len(after)) for each in reached if each in self._ends]
                seen.update(reached)
                after.append(frozenset(reached))
                origins.append(origin)
        return _Step(tuple(after), tuple(origins), tuple(ends))


class StopSearch:
    """The search in one text.

    Attributes:
        num_held: last characters of the text that may be part of a match.
    """

    __slots__ = ("_expressions", "_live", "_num_taken", "_starts", "num_held")

    def __init__(self, expressions: StopExpressions) -> None:
        self._expressions = expressions
        self._live: _Live = ()
        # By place in ``_live``, the number of characters before its matches.
        self._starts: list[int] = []
        self._num_taken = 0
        self.num_held = 0

    def add(self, character: str) -> tuple[str, int] | None:
        """Take a character; return the expression of which it completes a match, and its length."""
        step = self._expressions.step(self._live, character, is_first=self._num_taken == 0)
        starts = [*self._starts, self._num_taken]
        self._live, self._starts = step.live, [starts[origin] for origin in step.origins]
        self._num_taken += 1
        self.num_held = self._length(0) if self._starts else 0
        matches = [(pattern, self._length(place)) for pattern, place in step.ends]
        return max(matches, key=lambda match: match[1]) if matches else None

    def _length(self, place: int) -> int:
        """Return the length of the matches that begin earliest at a place, as far as is held."""
        return min(self._num_taken - self._starts[place], MAX_HELD)


def _check(pattern: str, each: Automaton) -> None:
    shown = pattern if len(pattern) <= 80 else f"{pattern[:80]}…"
    if each.at_end:
        raise InvalidRequestError(f"The expression {shown!r} must not name the text's end.")
    if each.end in each.closure([each.start], begins=True):
        raise InvalidRequestError(f"The expression {shown!r} matches the empty text.")
