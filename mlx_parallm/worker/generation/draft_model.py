"""A smaller model that proposes tokens, with KV pools that use the same block tables.

A block id means the same tokens in both models, so prefix reuse, forks and preemption work for the
draft model too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import PENDING_TOKEN, SampleSpec, ScheduledBatch, ScheduledSequence
from mlx_parallm.worker.generation.paged_cache import KVPools
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.step_rows import single_rows, token_array
from mlx_parallm.worker.sampling.sampler import Sampler

# FEW_TOKENS: if no sequence has more known tokens, they run as decode rows. After a draft that was
# right there are two.
FEW_TOKENS = 4


class DraftModel:
    """Computes a step's proposals, as part of the steps of the target model.

    The target model is the served model, for which the draft model proposes tokens.
    """

    def __init__(
        self,
        path: ForwardPath,
        sampler: Sampler,
        *,
        vocab_size: int,
        runs_ahead: bool,
        weight_bytes: int,
    ) -> None:
        """Prepare.

        Args:
            path: runs the model's forward.
            sampler: draws its tokens.
            vocab_size: the number of rows of its embedding table.
            runs_ahead: True if nothing waits for the device between two forwards.
            weight_bytes: the size of its weights, in bytes.
        """
        self._path = path
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._runs_ahead = runs_ahead
        self.weight_bytes = weight_bytes

    @property
    def pools(self) -> KVPools | None:
        """See ``ForwardPath.pools``."""
        return self._path.pools

    def arrays(self) -> list[mx.array]:
        """Return the arrays that the step wrote; they must be evaluated with its outputs."""
        return self._path.arrays()

    def begin_step(self) -> None:
        """See ``ForwardPath.begin_step``."""
        self._path.begin_step()

    def forget_writes(self) -> None:
        """See ``ForwardPath.forget_writes``."""
        self._path.forget_writes()

    def release_kv(self) -> None:
        """See ``ForwardPath.release_kv``."""
        self._path.release_kv()

    def restore_kv(self, num_blocks: int | None = None) -> None:
        """See ``ForwardPath.restore_kv``."""
        self._path.restore_kv(num_blocks)

    def propose(self, batch: ScheduledBatch, vocab_size: int) -> mx.array | None:
        """Compute known tokens, then the proposals that the batch leaves to a draft model.

        Each proposal is drawn with the parameters and the random key with which the target model
        will draw the token in its place. So the two agree as often as the two models do.

        Args:
            batch: the step; its block copies are performed here too.
            vocab_size: the vocabulary size of the target model.

        Returns:
            The proposals in the order of the batch, int32 ``[proposals]``; None if there are none.
        """
        self._path.copy_blocks(batch.block_copies)
        inputs = [sequence for sequence in batch.sequences if sequence.draft is not None]
        if not inputs:
            return None
        logits = self._compute_known(inputs)
        # Sort by the number of proposals: those with more to come are then always the first rows.
        drafting = [i for i, sequence in enumerate(inputs) if PENDING_TOKEN in sequence.proposals]
        drafting.sort(key=lambda i: -len(inputs[i].verify))
        if not drafting:
            return None
        logits = logits[mx.array(drafting)]
        columns = self._draft([inputs[i] for i in drafting], logits, vocab_size)
        return _in_order(columns, [len(inputs[i].verify) for i in drafting], drafting)

    def _compute_known(self, inputs: Sequence[ScheduledSequence]) -> mx.array:
        """Run the known tokens; return each sequence's last logits, ``[inputs, vocab]``."""
        known = [known_tokens(sequence) for sequence in inputs]
        lengths = np.array([len(sequence.token_ids) for sequence in known])
        # The target model may have ids beyond this model's table, for padding.
        token_ids = mx.minimum(token_array(known), self._vocab_size - 1)
        last = np.cumsum(lengths) - 1
        if lengths.max() <= FEW_TOKENS:
            rows = [row for sequence in known for row in single_rows(sequence)]
            logits = self._path.logits(rows, token_ids, range(len(rows)))[mx.array(last)]
        else:
            logits = self._path.logits(known, token_ids, last.tolist())
        self._finish(logits)
        return logits

    def _draft(
        self, sequences: Sequence[ScheduledSequence], logits: mx.array, vocab_size: int
    ) -> list[mx.array]:
        """Return the proposals by column: all first ones, then the second ones, and so on.

        The sequences are sorted by their number of proposals, descending.
        """
        columns: list[mx.array] = []
        active = list(sequences)
        while True:
            index = len(columns)
            specs = [_spec(sequence, index) for sequence in active]
            tokens = self._sampler.choose(_resized(logits, vocab_size), specs).astype(mx.int32)
            columns.append(tokens)
            active = [sequence for sequence in active if len(sequence.verify) > index + 1]
            if not active:
                return columns
            self._finish(tokens)
            rows = [
                drafted(sequence, _num_known(sequence) + index, (PENDING_TOKEN,))
                for sequence in active
            ]
            logits = self._path.logits(rows, tokens[: len(active)], range(len(active)))

    def _finish(self, output: mx.array) -> None:
        """Evaluate a forward before the next is built, unless the backend runs ahead.

        MLX would otherwise copy the pool for the next write.
        """
        if not self._runs_ahead:
            mx.eval(self._path.arrays(), output)


def known_tokens(sequence: ScheduledSequence) -> ScheduledSequence:
    """Return a sequence's known tokens as a chunk for the draft model."""
    assert sequence.draft is not None
    return drafted(sequence, sequence.draft.start, sequence.draft.token_ids)


def drafted(
    sequence: ScheduledSequence, start: int, token_ids: tuple[int, ...]
) -> ScheduledSequence:
    """Return tokens of a sequence for the draft model, which has no adapters."""
    return replace(sequence.with_span(start, token_ids), adapter_slot=0)


def _num_known(sequence: ScheduledSequence) -> int:
    """Return the position of a sequence's first proposal."""
    return sequence.start + len(sequence.token_ids) - len(sequence.verify)


def _spec(sequence: ScheduledSequence, index: int) -> SampleSpec:
    """Return how the target model chooses the token that the proposal with this index guesses."""
    assert sequence.sample is not None
    return (sequence.sample, *sequence.verify)[index]


def _resized(logits: mx.array, vocab_size: int) -> mx.array:
    """Return logits of the target model's vocabulary size, because models' padding differs."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    return logits[:, :vocab_size]


def _in_order(
    columns: Sequence[mx.array], counts: Sequence[int], owners: Sequence[int]
) -> mx.array:
    """Return columns of proposals as one array, sequence by sequence.

    Args:
        columns: column j has the j-th proposals of the first sequences, which have so many.
        counts: the number of proposals of each sequence, descending.
        owners: the index in the batch of each sequence, by which the result is ordered.
    """
    firsts = np.cumsum([0, *(column.shape[0] for column in columns)])
    order = [
        int(firsts[j]) + row
        for row in sorted(range(len(counts)), key=lambda row: owners[row])
        for j in range(counts[row])
    ]
    return mx.concatenate(list(columns))[mx.array(order)]
