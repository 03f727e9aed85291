"""The beams of one request as sequences: which run, and whose blocks each continues."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, takewhile

from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.beam_search import BeamSearch, BeamToken, Hypothesis
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.types.events import FinishReason
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import SampledToken, TokenLogprob


class BeamGroup:
    """A request's search and its sequences, as many as there may be beams.

    A sequence continues one beam after another: of the beams that continue one parent the first
    stays the parent's sequence, and the others get forks of its blocks before the next step.

    Attributes:
        group: the request.
        live: the sequences of the live beams, in the order of the search.
        forks: by live sequence that has no blocks of its tokens: the one whose blocks it forks.
        fork_at: the number of tokens that a fork shares.
    """

    def __init__(self, group: RequestGroup) -> None:
        """Begin with one beam, which computes the prompt."""
        params = group.request.params
        assert params.beams is not None, "a request without beams"
        assert params.max_tokens is not None, "a search without an end"
        self.group = group
        self._search = BeamSearch(
            params.beams,
            group.stop_ids,
            params.max_tokens,
            forces_end=params.forced_eos_id is not None,
        )
        first, *self._idle = group.sequences.values()
        self.live: list[Sequence] = [first]
        self.forks: dict[Sequence, Sequence] = {}
        self.fork_at = 0
        # The likeliest tokens after the live beams whose last token a step has computed.
        self._rows: dict[Sequence, list[BeamToken]] = {}

    @property
    def leader(self) -> Sequence:
        """Return the sequence that waits and starts for all; the others are forks of it."""
        return self.live[0]

    @property
    def running(self) -> list[Sequence]:
        """Return the sequences that hold a slot."""
        return [each for each in (*self.live, *self._idle) if each.slot is not None]

    @property
    def unneeded(self) -> list[Sequence]:
        """Return the sequences that hold a slot for a beam that has not been continued."""
        return [each for each in self._idle if each.slot is not None]

    @property
    def is_due(self) -> bool:
        """Return True if sequences are to be forked or stopped, and nothing is missing for it."""
        if not self.forks:
            return bool(self.unneeded)
        return all(
            parent.slot is not None
            and parent.num_computed == self.fork_at
            and not parent.arrived
            # A row of it may still be in flight, from before it was preempted.
            and not sequence.num_pending
            for sequence, parent in self.forks.items()
        )

    def count_fork_blocks(self, kv: KVCacheManager) -> int:
        """Return how many blocks the beams need besides the leader's, to start or for one step."""
        own = kv.blocks_for(len(self.leader.token_ids)) - self.fork_at // kv.block_size
        num_others = len(self.group.sequences) - 1
        return len(self.forks) * own + num_others - len(self.forks)

    def report(self, sequence: Sequence, entry: TokenLogprob, version: str) -> list[SequenceUpdate]:
        """Take the likeliest tokens after a live beam; advance once all beams have reported.

        Args:
            sequence: the beam's.
            entry: has these tokens as alternatives.
            version: label of the weights that computed them.

        Returns:
            The event of the prompt with the first report, and the results with the last.
        """
        self._rows[sequence] = self._candidates(sequence, entry, version)
        updates: list[SequenceUpdate] = []
        if not self.group.is_reported:
            updates.append(
                SequenceUpdate(
                    request_id=self.group.request.request_id,
                    index=0,
                    prompt=self.group.take_prompt_event(),
                )
            )
        if len(self._rows) == len(self.live):
            updates += self._advance()
        return updates

    def _candidates(self, sequence: Sequence, entry: TokenLogprob, version: str) -> list[BeamToken]:
        shown = self.group.request.params.logprobs
        top = entry.top if shown == ALL_TOKENS else entry.top[: shown or 0]
        # As in transformers, a token that is forced costs nothing.
        is_forced = sequence.is_end_forced
        return [
            BeamToken(TokenLogprob(token_id, 0.0 if is_forced else logprob, top), version)
            for token_id, logprob in entry.top
        ]

    def _advance(self) -> list[SequenceUpdate]:
        former = self.live
        parents = self._search.advance([self._rows[sequence] for sequence in former])
        self._rows.clear()
        if self._search.is_done:
            return list(self._results())
        self._continue([former[parent] for parent in parents])
        return []

    def _continue(self, parents: list[Sequence]) -> None:
        """Let sequences have the tokens of the new live beams, given the parent of each."""
        kept = dict.fromkeys(parents)
        free = [each for each in self.live if each not in kept] + self._idle
        self.fork_at = len(parents[0].token_ids)
        self.live, self.forks = [], {}
        for parent in parents:
            sequence = parent
            if parent in kept:
                del kept[parent]
            else:
                sequence = free.pop(0)
                sequence.copy_tokens(parent)
                self.forks[sequence] = parent
            self.live.append(sequence)
        self._idle = free
        for sequence, beam in zip(self.live, self._search.beams, strict=True):
            sequence.append_token(beam.tokens[-1].entry.token_id)

    def restart(self) -> None:
        """Note that no sequence runs: the leader starts again, and the others as forks of it."""
        self._rows.clear()
        leader, *others = self.live
        self.forks = dict.fromkeys(others, leader)
        self.fork_at = _common_length(each.token_ids for each in self.live) if others else 0
        leader.fork_at = self.fork_at

    def end_forks(self) -> None:
        """Note that all live sequences have the blocks of their tokens."""
        self.forks.clear()
        self.leader.fork_at = 0

    def _results(self) -> Iterator[SequenceUpdate]:
        """Yield the tokens of every result, best first; those that are missing end without any."""
        count = self.group.request.params.n
        hypotheses = self._search.results(count)
        for index, hypothesis in enumerate(hypotheses):
            yield from self._result(index, hypothesis)
        for index in range(len(hypotheses), count):
            yield SequenceUpdate(
                request_id=self.group.request.request_id,
                index=index,
                finish_reason=FinishReason.LENGTH,
            )

    def _result(self, index: int, hypothesis: Hypothesis) -> Iterator[SequenceUpdate]:
        """Yield a result's tokens, those of each version of the weights together."""
        parts = [list(part) for _, part in groupby(hypothesis.tokens, lambda each: each.version)]
        updates = [self._part(index, part) for part in parts]
        yield from updates[:-1]
        last = updates[-1]
        if not hypothesis.is_stopped:
            is_forced = self.group.has_end(last.token)
            yield replace(last, finish_reason=FinishReason.LENGTH, is_forced_end=is_forced)
        else:
            token_id = hypothesis.tokens[-1].entry.token_id
            own_end = token_id in self.group.end_ids
            yield replace(
                last,
                finish_reason=FinishReason.STOP,
                stop_reason=None if own_end else token_id,
            )

    def _part(self, index: int, tokens: list[BeamToken]) -> SequenceUpdate:
        *earlier, last = [self._sampled(token) for token in tokens]
        return SequenceUpdate(
            request_id=self.group.request.request_id,
            index=index,
            earlier=tuple(earlier),
            token=last,
            version=tokens[0].version,
        )

    def _sampled(self, token: BeamToken) -> SampledToken:
        has_logprobs = self.group.request.params.logprobs is not None
        return SampledToken(
            seq_id=self.leader.seq_id,
            token_id=token.entry.token_id,
            logprob=token.entry if has_logprobs else None,
        )


def _common_length(texts: Iterable[list[int]]) -> int:
    """Return how many leading tokens texts of one length have in common."""
    columns = zip(*texts, strict=True)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
