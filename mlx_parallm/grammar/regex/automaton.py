"""Automata of regular expressions (Thompson, 1968), without backtracking."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from mlx_parallm.grammar.regex.characters import MAX_CODE, Ranges, has
from mlx_parallm.grammar.regex.syntax import (
    Characters,
    Choice,
    Edge,
    Node,
    Repeat,
    parse,
)
from mlx_parallm.grammar.regex.syntax import Sequence as Parts
from mlx_parallm.types.errors import InvalidRequestError

# MAX_STATES of an automaton: each character of a text may visit all of them.
MAX_STATES = 1024
LINE_BREAK = 10


@dataclass(slots=True)
class Automaton:
    """A nondeterministic automaton whose states are numbers.

    Attributes:
        moves: by state, the characters that lead to another state, and that state.
        free: by state, states that are reached without a character.
        at_start: states that are left for the next one only at the beginning of the text.
        at_end: the same at the end of the text.
        start: the first state.
        end: the state of a match.
    """

    moves: list[tuple[Ranges, int] | None] = field(default_factory=list[tuple[Ranges, int] | None])
    free: list[list[int]] = field(default_factory=list[list[int]])
    at_start: dict[int, int] = field(default_factory=dict[int, int])
    at_end: dict[int, int] = field(default_factory=dict[int, int])
    start: int = 0
    end: int = 0

    def closure(
        self,
        states: Iterable[int],
        *,
        begins: bool = False,
        ends: bool = False,
        known: Container[int] = (),
    ) -> list[int]:
        """Return states with those that are reached from them without a character, in order.

        ``known`` states are left out, with what is reached through them.
        """
        reached: dict[int, None] = {}
        waiting = list(states)[::-1]
        while waiting:
            state = waiting.pop()
            if state in reached or state in known:
                continue
            reached[state] = None
            if begins and state in self.at_start:
                waiting.append(self.at_start[state])
            if ends and state in self.at_end:
                waiting.append(self.at_end[state])
            waiting.extend(reversed(self.free[state]))
        return list(reached)

    def after(self, states: Iterable[int], code: int) -> list[int]:
        """Return the states that a character leads to."""
        moves = [self.moves[state] for state in states]
        return [move[1] for move in moves if move is not None and has(move[0], code)]

    def add(self, other: Automaton) -> int:
        """Add the states of another automaton; return what its numbers grow by."""
        shift = len(self.free)
        self.moves += [each and (each[0], each[1] + shift) for each in other.moves]
        self.free += [[state + shift for state in each] for each in other.free]
        for mine, theirs in ((self.at_start, other.at_start), (self.at_end, other.at_end)):
            mine |= {state + shift: target + shift for state, target in theirs.items()}
        return shift


def automaton(pattern: str, *, is_loose: bool = False) -> Automaton:
    """Return the automaton of an expression; see ``parse``.

    Raises:
        InvalidRequestError: see ``parse``; or it has too many states.
    """
    return _Builder().whole(parse(pattern, is_loose=is_loose))


class _Builder:
    def __init__(self) -> None:
        self._made = Automaton()

    def whole(self, node: Node) -> Automaton:
        self._made.start = self._state()
        self._made.end = self._add(node, self._made.start)
        return self._made

    def _state(self) -> int:
        if len(self._made.free) >= MAX_STATES:
            raise InvalidRequestError(f"The expression needs more than {MAX_STATES} states.")
        self._made.moves.append(None)
        self._made.free.append([])
        return len(self._made.free) - 1

    def _add(self, node: Node, start: int) -> int:
        """Add what a node matches after a state; return the state behind it."""
        match node:
            case Characters(ranges):
                end = self._state()
                entry = self._fresh(start)
                self._made.moves[entry] = (ranges, end)
                return end
            case Parts(parts):
                for part in parts:
                    start = self._add(part, start)
                return start
            case Choice(options):
                end = self._state()
                for option in options:
                    self._made.free[self._add(option, self._linked(start))].append(end)
                return end
            case Edge(is_start):
                entry, end = self._linked(start), self._state()
                (self._made.at_start if is_start else self._made.at_end)[entry] = end
                return end
            case Repeat(part, least, most):
                return self._repeat(part, least, most, start)

    def _repeat(self, part: Node, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            before, start = start, self._add(part, start)
            # More turns of a part without states would add none either, so no limit ended them.
            if start == before:
                break
        if most is None:
            loop = self._linked(start)
            self._made.free[self._add(part, self._linked(loop))].append(loop)
            return self._linked(loop)
        end = self._state()
        for _ in range(most - least):
            self._made.free[start].append(end)
            start = self._add(part, self._linked(start))
        self._made.free[start].append(end)
        return end

    def _linked(self, start: int) -> int:
        """Return a new state that is reached without a character."""
        state = self._state()
        self._made.free[start].append(state)
        return state

    def _fresh(self, state: int) -> int:
        return state if self._made.moves[state] is None else self._linked(state)


class Comparison:
    """Compares expressions, within a limit of work for all comparisons together.

    Where languages differ in what an expression matches, it counts as a match.
    """

    def __init__(self, max_steps: int) -> None:
        self._steps_left = max_steps
        self._known: dict[tuple[str, ...], bool] = {}

    def is_empty(self, patterns: Iterable[str]) -> bool:
        """True if no text has a match of each expression; False if that is not known."""
        key = tuple(sorted(set(patterns)))
        if key not in self._known:
            self._known[key] = self._is_empty(key)
        return self._known[key]

    def may_match(self, pattern: str, text: str) -> bool:
        """False if an expression surely has no match in a text."""
        literal = "".join(f"\\u{{{ord(each):x}}}" for each in text)
        return not self.is_empty([pattern, f"^{literal}$"])

    def _is_empty(self, patterns: Sequence[str]) -> bool:
        self._steps_left -= sum(map(len, patterns))
        if self._steps_left < 0:
            return False
        try:
            automata = [automaton(pattern, is_loose=True) for pattern in patterns]
        except InvalidRequestError:
            return False
        self._steps_left -= sum(len(each.free) for each in automata)
        samples = _samples(automata)
        starts = tuple(_Search.begin(each) for each in automata)
        waiting, seen = [starts], {starts}
        while waiting and self._steps_left > 0:
            current = list(zip(waiting.pop(), automata, strict=True))
            if all(search.is_accepted(each) for search, each in current):
                return False
            for code in samples:
                following = tuple(search.after(each, code) for search, each in current)
                pairs = zip(following, current, strict=True)
                self._steps_left -= sum(
                    len(search.states) + len(before.states) + 1 for search, (before, _) in pairs
                )
                if self._steps_left < 0:
                    return False
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        return not waiting


@dataclass(frozen=True, slots=True)
class _Search:
    """Where a search for a match stands.

    Attributes:
        states: of a match that is not complete.
        is_over: True once there was a match.
        is_broken: True after a line break before which the text had a match that ends with it.
    """

    states: frozenset[int]
    is_over: bool = False
    is_broken: bool = False

    @classmethod
    def begin(cls, automaton: Automaton) -> _Search:
        """Return the search before the first character."""
        states = frozenset(automaton.closure([automaton.start], begins=True))
        return cls(states, is_over=automaton.end in states)

    def after(self, automaton: Automaton, code: int) -> _Search:
        """Return the search after the next character."""
        if self.is_over:
            return self
        following = automaton.after(self.states, code)
        states = frozenset(automaton.closure([*following, automaton.start]))
        if automaton.end in states:
            return _Search(frozenset(), is_over=True)
        return _Search(states, is_broken=code == LINE_BREAK and self._ends(automaton))

    def is_accepted(self, automaton: Automaton) -> bool:
        """True if the text so far has a match; in Python, a line break may follow "$"."""
        return self.is_over or self.is_broken or self._ends(automaton)

    def _ends(self, automaton: Automaton) -> bool:
        return automaton.end in automaton.closure(self.states, ends=True)


def _samples(automata: Iterable[Automaton]) -> list[int]:
    """Return one character of each set that every automaton treats alike."""
    starts = {0, LINE_BREAK, LINE_BREAK + 1}
    for each in automata:
        for move in each.moves:
            for low, high in move[0] if move is not None else ():
                starts |= {low, high + 1}
    return sorted(start for start in starts if start <= MAX_CODE)
