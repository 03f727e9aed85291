"""Applies what a step has computed and chosen to the sequences of its rows."""

from __future__ import annotations

from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.beams.live import LiveBeams
from mlx_parallm.generation.scheduler.endings import Endings
from mlx_parallm.generation.scheduler.sequence import RowInFlight, Sequence
from mlx_parallm.generation.scheduler.snapshotting import Snapshotter
from mlx_parallm.generation.scheduler.speculating import Speculator
from mlx_parallm.generation.scheduler.updates import SequenceUpdate
from mlx_parallm.types.events import FinishReason
from mlx_parallm.types.step import SampledToken, ScheduledSequence


class RowResults:
    """Applies the rows of steps that have succeeded."""

    def __init__(
        self,
        kv: KVCacheManager,
        speculator: Speculator | None,
        snapshotter: Snapshotter,
        beams: LiveBeams,
        endings: Endings,
        *,
        max_len: int,
    ) -> None:
        """``max_len`` is the length of the longest sequence."""
        self._kv = kv
        self._speculator = speculator
        self._snapshotter = snapshotter
        self._beams = beams
        self._endings = endings
        self._max_len = max_len

    def apply(
        self,
        sequence: Sequence,
        row: ScheduledSequence,
        begun: RowInFlight,
        tokens: tuple[SampledToken, ...],
    ) -> list[SequenceUpdate]:
        """Apply one sequence's row of a step that succeeded."""
        is_beam = sequence.request.params.beams is not None
        if self._speculator is None and len(tokens) == 1 and not is_beam:
            return self._take_token(sequence, row, begun, tokens[0])
        end = row.start + len(row.token_ids) - len(row.verify)
        # What runs again is written again, so nothing may find it before.
        if self._speculator is None or not self._speculator.replays(row, len(tokens) - 1):
            self._commit(sequence, begun, end)
        # The sequence may have been preempted, and even restarted, while the step was in flight.
        if row.draft is not None and sequence.table is begun.table:
            # Proposals do not count, whether they are accepted or not.
            self._kv.mark_drafted(sequence.blocks, row.draft.end)
        if end < len(sequence.token_ids):
            return []
        if row.sample is None:
            updates = [self._update(sequence, row, None, FinishReason.LENGTH)]
        elif not tokens:
            return self._endings.fail(sequence.group, "The step gave no token.")
        elif is_beam:
            updates = self._report_beam(sequence, row, begun, tokens[0])
        else:
            updates = self._take_tokens(sequence, row, tokens)
            self._settle(sequence, row, begun, num_accepted=len(updates) - 1)
        if updates and updates[-1].finish_reason is not None:
            self._endings.end(sequence)
        return updates

    def _take_token(
        self, sequence: Sequence, row: ScheduledSequence, begun: RowInFlight, token: SampledToken
    ) -> list[SequenceUpdate]:
        """Apply a row without proposals that sampled a token: ``apply``, in short."""
        end = row.start + len(row.token_ids)
        self._commit(sequence, begun, end)
        if end < len(sequence.token_ids):
            return []
        reason = sequence.add_token(token, self._max_len)
        sequence.settle(0)
        update = self._update(sequence, row, token, reason)
        if reason is not None:
            self._endings.end(sequence)
        return [update]

    def _report_beam(
        self, sequence: Sequence, row: ScheduledSequence, begun: RowInFlight, token: SampledToken
    ) -> list[SequenceUpdate]:
        """Report the candidates of a beam, unless it was preempted and will compute them anew."""
        sequence.settle(0)
        beams = self._beams.of(sequence)
        if beams is None or sequence.table is not begun.table or token.logprob is None:
            return []
        return beams.report(sequence, token.logprob, row.version)

    def _take_tokens(
        self, sequence: Sequence, row: ScheduledSequence, tokens: tuple[SampledToken, ...]
    ) -> list[SequenceUpdate]:
        """Append tokens up to the one that ends the sample."""
        updates: list[SequenceUpdate] = []
        for token in tokens:
            reason = sequence.add_token(token, self._max_len)
            updates.append(self._update(sequence, row, token, reason))
            if reason is not None:
                break
        return updates

    def _settle(
        self, sequence: Sequence, row: ScheduledSequence, begun: RowInFlight, num_accepted: int
    ) -> None:
        """Note how many of a row's proposals were accepted."""
        sequence.settle(num_accepted)
        if self._speculator is not None and row.verify:
            self._speculator.record(sequence, row, num_accepted)
            self._speculator.take_back(sequence, row, num_accepted)
        if num_accepted:
            end = row.start + len(row.token_ids) - len(row.verify) + num_accepted
            self._commit(sequence, begun, min(end, sequence.num_computed))

    def _commit(self, sequence: Sequence, begun: RowInFlight, num_computed: int) -> None:
        table, block_size = begun.table, self._kv.block_size
        if sequence.table is not table:
            return
        if len(table.hashes) < num_computed // block_size:
            num_new = self._kv.commit(table, sequence.token_ids, num_computed)
            if not sequence.group.is_reported:
                sequence.group.num_newly_cached_tokens += num_new
        if sequence.held is not None:
            sequence.held.note_use()
        if self._snapshotter.cuts and num_computed % block_size == 0:
            self._snapshotter.resolve(sequence, num_computed)

    def _update(
        self,
        sequence: Sequence,
        row: ScheduledSequence,
        token: SampledToken | None,
        reason: FinishReason | None,
    ) -> SequenceUpdate:
        if reason is None and sequence.group.is_reported:
            # Most tokens: what is not named takes no time.
            return SequenceUpdate(
                request_id=sequence.request.request_id,
                index=sequence.index,
                token=token,
                version=row.version,
            )
        return SequenceUpdate(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token=token,
            finish_reason=reason,
            stop_reason=None if reason is None else sequence.stop_reason(token, reason),
            is_forced_end=reason is FinishReason.LENGTH and sequence.group.has_end(token),
            prompt=None if sequence.group.is_reported else sequence.group.take_prompt_event(),
            version=row.version,
        )


def by_sequence(tokens: tuple[SampledToken, ...]) -> dict[int, tuple[SampledToken, ...]]:
    """Return the tokens of each sequence, in order."""
    by_id: dict[int, tuple[SampledToken, ...]] = {token.seq_id: (token,) for token in tokens}
    if len(by_id) < len(tokens):
        by_id = dict.fromkeys(by_id, ())
        for token in tokens:
            by_id[token.seq_id] += (token,)
    return by_id
