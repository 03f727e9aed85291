"""Follows one sample through its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.types.request import SamplingParams


class SampleMatcher:
    """Matches the tokens of one sample.

    Attributes:
        num_taken: tokens followed so far.
        matcher: the grammar's matcher.
        ends: tokens that end the sample.
        stop_ids: those of ``ends`` that the caller named.
        free_start: a token that frees the sample if it comes first; None after the first token.
        is_free: True until the text that begins the grammar was generated.
        has_ended: True after a token that ends the sample.
        error: why no further token can be chosen; None while one can.
    """

    def __init__(
        self, matcher: LLMatcher, vocabulary: GrammarVocabulary, params: SamplingParams
    ) -> None:
        assert params.grammar is not None, "only constrained samples have a matcher"
        self._vocabulary = vocabulary
        grammar = params.grammar
        self._marker = (grammar.begins_after or "").encode()
        self._tail = b""
        start = grammar.free_start
        self.free_start = None if start is None else vocabulary.specials.get(start)
        self.ends = vocabulary.eos_ids | set(params.stop_token_ids)
        self.stop_ids = params.stop_token_ids
        self.matcher = matcher
        self.num_taken = 0
        self.is_free = bool(self._marker) and start is None
        self.has_ended = False
        self.error: str | None = matcher.get_error() or None

    def take(self, token_ids: Sequence[int]) -> None:
        """Follow the next tokens of the sample."""
        for token_id in token_ids:
            self.num_taken += 1
            if self.error is not None or self.has_ended:
                continue
            frees, self.free_start = token_id == self.free_start, None
            if frees:
                self.is_free = True
            elif token_id in self.ends:
                self.has_ended = True
            elif self.is_free:
                self._look_for_marker(token_id)
            elif not self.matcher.consume_token(token_id):
                self.fail()

    def fail(self) -> None:
        """Copy the matcher's error."""
        self.error = self.matcher.get_error() or "No token can go on to match the grammar."

    def _look_for_marker(self, token_id: int) -> None:
        """Begin the grammar once the marker is complete; tokens may cut it anywhere."""
        self._tail += self._vocabulary.token_bytes(token_id)
        place = self._tail.find(self._marker)
        if place < 0:
            self._tail = self._tail[max(len(self._tail) - len(self._marker) + 1, 0) :]
            return
        self.is_free = False
        # The rest of this token belongs to the grammar, except leading white space.
        rest = self._tail[place + len(self._marker) :].lstrip()
        if rest and not self.matcher.consume_tokens(self._vocabulary.tokens_of(rest)):
            self.fail()
