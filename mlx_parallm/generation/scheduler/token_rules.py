"""The rules for the next token of a sample that depend on the tokens before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.generation.scheduler.ngram_bans import NgramBans
from mlx_parallm.generation.scheduler.thinking import ThinkingTracker
from mlx_parallm.types.request import SamplingParams


class TokenRules:
    """Least length, end of reasoning, repeated runs and the forced last token of one sample."""

    def __init__(
        self, params: SamplingParams, end_ids: frozenset[int], prompt_ids: Sequence[int]
    ) -> None:
        """Begin before the first token.

        Args:
            params: of the sample's rows.
            end_ids: the model's own end tokens.
            prompt_ids: the prompt's tokens, without rows of inputs.
        """
        self._params = params
        self._end_ids = end_ids
        self._prompt_ids = prompt_ids
        # What is banned does not change with the tokens, and is sorted once.
        self._ends = tuple(sorted(end_ids)) if params.ignore_eos else ()
        # From this many tokens on every token has the same rule; infinite if that never is so.
        self._num_varying: float = max(params.min_tokens, 1)
        if (
            params.thinking_budget is not None
            or params.no_repeat_ngram_size
            or params.forced_eos_id is not None
        ):
            self._num_varying = math.inf
        self._same = (params, self._ends)
        budget = params.thinking_budget
        self._thinking = None if budget is None else ThinkingTracker(budget)
        # Made when the first token is chosen: most samples of a long prompt wait before.
        self._bans: NgramBans | None = None

    def take(self, token_id: int) -> None:
        """Note the next token."""
        if self._thinking is not None:
            self._thinking.take([token_id])
        if self._bans is not None:
            self._bans.take([token_id])

    def copy(self) -> TokenRules:
        """Return the rules of a beam that has the same tokens so far."""
        assert self._thinking is None, "beams have no budget"
        rules = TokenRules(self._params, self._end_ids, self._prompt_ids)
        rules._bans = None if self._bans is None else self._bans.copy()
        return rules

    def next(self, num_before: int, *, has_pending: bool) -> tuple[SamplingParams, tuple[int, ...]]:
        """Return the parameters of the token behind ``num_before`` others, and what is banned.

        ``has_pending``: a token that is not known comes before it.
        """
        if num_before >= self._num_varying:
            return self._same
        params = self._params
        banned: tuple[int, ...] = ()
        if num_before < params.min_tokens:
            banned = tuple(sorted(self._end_ids.union(params.stop_token_ids)))
        else:
            # Where ends are ignored, a sample ends by itself only where its grammar is complete.
            banned = self._ends
        if num_before == 0:
            banned += params.begin_banned_ids
        if self._thinking is not None:
            rule = self._thinking.rule(has_pending=has_pending)
            banned += rule.banned
            if rule.forced is not None:
                # A grammar applies after the reasoning, so it does not constrain this token.
                params = replace(params, allowed_token_ids=(rule.forced,), grammar=None)
        if params.no_repeat_ngram_size:
            banned += self._repeating()
        if self.forces_end(num_before):
            assert params.forced_eos_id is not None
            params = replace(params, allowed_token_ids=(params.forced_eos_id,), grammar=None)
        return params, banned

    def forces_end(self, num_before: int) -> bool:
        """Return True if the token behind ``num_before`` others is the last, and is forced."""
        params = self._params
        return params.forced_eos_id is not None and num_before + 1 == params.max_tokens

    def _repeating(self) -> tuple[int, ...]:
        """Return the tokens that would repeat a run of tokens."""
        if self._bans is None:
            self._bans = NgramBans(self._params.no_repeat_ngram_size, self._prompt_ids)
        return self._bans.banned
