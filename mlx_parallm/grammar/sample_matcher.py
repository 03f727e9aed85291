"""Follows one sample through its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher

from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.types.request import SamplingParams


class SampleMatcher:
    """Matches the tokens of one sample.

    Attributes:
        num_taken: tokens followed so far.
        ends: tokens that end the sample.
        stop_ids: those of ``ends`` that the caller named.
        is_free: True until the text that begins the grammar was generated.
        has_ended: True after a token that ends the sample.
        error: why no further token can be chosen; None while one can.
    """

    def __init__(self, compiler: GrammarCompiler, params: SamplingParams) -> None:
        assert params.grammar is not None, "only constrained samples have a matcher"
        grammar = params.grammar
        self._vocabulary = compiler.vocabulary
        self._marker = (grammar.begins_after or "").encode()
        self._tail = b""
        # None: its text has left the grammar, which only a start of free text may do.
        self._matcher: LLMatcher | None = compiler.matcher(grammar.text)
        self._opening = _Opening.of(grammar.free_starts, self._matcher, compiler)
        self.ends = self._vocabulary.eos_ids | set(params.stop_token_ids)
        self.stop_ids = params.stop_token_ids
        self.num_taken = 0
        self.is_free = bool(self._marker) and self._opening is None
        self.has_ended = False
        self.error: str | None = self._matcher.get_error() or None

    def matchers(self) -> Iterable[LLMatcher]:
        """Return the matchers of which one must allow the next token; none if it is free."""
        if self.is_free or self.has_ended or self.error:
            return ()
        opening = None if self._opening is None else self._opening.matcher
        return filter(None, (self._matcher, opening))

    @property
    def is_broken(self) -> bool:
        """True if the grammar became too complex."""
        return self._matcher is not None and self._matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """True if the text matches the grammar as it is."""
        return self._matcher is not None and self._matcher.is_accepting()

    def early_ends(self, end_ids: Iterable[int]) -> list[int]:
        """Return those of the end tokens after which the text would not match the grammar.

        Only a grammar that names end tokens allows them before its end.
        """
        return [token_id for token_id in end_ids if not self._is_end(token_id)]

    def take(self, token_ids: Sequence[int]) -> None:
        """Follow the next tokens of the sample."""
        for token_id in token_ids:
            self.num_taken += 1
            if self.error is not None or self.has_ended:
                continue
            if token_id in self.ends:
                self.has_ended = True
            elif self.is_free:
                self._look_for_marker(self._vocabulary.token_bytes(token_id))
            elif self._opening is not None:
                self._take_opening(self._opening, token_id)
            else:
                self._match([token_id])

    def fail(self) -> None:
        """Copy the matcher's error."""
        error = "" if self._matcher is None else self._matcher.get_error()
        self.error = error or "No token can go on to match the grammar."

    def _is_end(self, token_id: int) -> bool:
        if self.is_complete:
            return True
        copy = None if self._matcher is None else self._matcher.deep_copy()
        return copy is not None and copy.consume_token(token_id) and copy.is_accepting()

    def _match(self, token_ids: list[int]) -> None:
        if self._matcher is None or not self._matcher.consume_tokens(token_ids):
            self.fail()

    def _take_opening(self, opening: _Opening, token_id: int) -> None:
        """Follow a token that may be free text's start, the grammar's, or both."""
        if not opening.matcher.try_consume_tokens([token_id]):
            self._opening = None
            self._match([token_id])
            return
        opening.text += self._vocabulary.token_bytes(token_id)
        if self._matcher is not None and not self._matcher.try_consume_tokens([token_id]):
            self._matcher = None
        start = next(filter(opening.text.startswith, opening.starts), None)
        if start is None:
            return
        self._opening = None
        self.is_free = True
        self._matcher = opening.grammar
        self._look_for_marker(opening.text[len(start) :])

    def _look_for_marker(self, text: bytes) -> None:
        """Begin the grammar once the marker is complete; tokens may cut it anywhere."""
        self._tail += text
        place = self._tail.find(self._marker)
        if place < 0:
            self._tail = self._tail[max(len(self._tail) - len(self._marker) + 1, 0) :]
            return
        self.is_free = False
        # The rest of this token belongs to the grammar, except leading white space.
        rest = self._tail[place + len(self._marker) :].lstrip()
        if rest:
            self._match(self._vocabulary.tokens_of(rest))


@dataclass(slots=True)
class _Opening:
    """The texts that free a sample if the sample begins with one of them.

    Attributes:
        starts: the texts.
        matcher: follows the sample while it may be one of the texts.
        grammar: a matcher for what follows the free text.
        text: what was generated of it.
    """

    starts: tuple[bytes, ...]
    matcher: LLMatcher
    grammar: LLMatcher
    text: bytes = b""

    @classmethod
    def of(
        cls, starts: Sequence[str], grammar: LLMatcher, compiler: GrammarCompiler
    ) -> _Opening | None:
        if not starts:
            return None
        texts = tuple(start.encode() for start in starts)
        return cls(texts, compiler.any_text_after(starts), grammar.deep_copy())
