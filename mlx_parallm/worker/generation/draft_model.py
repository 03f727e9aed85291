"""A smaller model that proposes tokens, over pools addressed by the same block tables.

A block id means the same tokens in both models: prefix reuse, forks and preemption carry over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.step import PENDING_TOKEN, SampleSpec, ScheduledBatch, ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.generation.cache_layout import CacheLayout
from mlx_parallm.worker.generation.memory import config_value
from mlx_parallm.worker.generation.path_choice import choose_path
from mlx_parallm.worker.generation.plan import DecoderChoices
from mlx_parallm.worker.generation.row_selection import embedding_rows
from mlx_parallm.worker.generation.step_rows import single_rows, token_array
from mlx_parallm.worker.sampling.check import choose_sampling
from mlx_parallm.worker.sampling.sampler import Sampler
from mlx_parallm.worker.weights.loader import DTYPES, LoadedModel

# Up to so many known tokens of each sequence run as decode rows: two follow a draft that was right.
FEW_TOKENS = 4


class DraftModel:
    """Runs what the scheduler asks of the draft model, within the steps of the model it serves."""

    def __init__(
        self,
        loaded: LoadedModel,
        layouts: tuple[CacheLayout, ...],
        backend: AttentionBackend,
        *,
        num_blocks: int,
        block_size: int,
        choices: DecoderChoices | None = None,
    ) -> None:
        """Choose the draft model's path, as far as ``choices`` of an earlier load do not say it.

        Raises:
            ConfigError: it keeps a state, which cannot be taken back.
            ModelLoadError: it has no embedding.
        """
        vocab_size = embedding_rows(loaded.model, config_value(loaded.config, "vocab_size"))
        if vocab_size is None:
            raise ModelLoadError(f"{loaded.path} has no embedding table.")
        made = choices or DecoderChoices(is_cast=loaded.is_cast, attention=backend.name)
        choice = choose_path(
            loaded.model,
            layouts,
            backend,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=loaded.dtype,
            chosen=made.path,
        )
        self._path = choice.path
        if self._path.has_state:
            raise ConfigError(f"{loaded.path} keeps a state and cannot be a draft model.")
        dtype = DTYPES.get(loaded.dtype, mx.float32)
        kernels, _ = choose_sampling(vocab_size, dtype, made.samples_by_kernel)
        self._sampler = Sampler(kernels)
        #: What was chosen, here or by the load whose ``choices`` these are.
        self.choices = replace(made, path=choice.name, samples_by_kernel=kernels is not None)
        self._vocab_size = vocab_size
        self._runs_ahead = backend.runs_ahead
        self.weight_bytes = loaded.weight_bytes

    def arrays(self) -> list[mx.array]:
        """What the latest step wrote; to be evaluated with its outputs."""
        return self._path.arrays()

    def forget_writes(self) -> None:
        """Depend no more on KV writes of a step that failed; nothing may be in flight."""
        self._path.forget_writes()

    def release_kv(self) -> None:
        """See ``ForwardPath.release_kv``."""
        self._path.release_kv()

    def restore_kv(self) -> None:
        """See ``ForwardPath.restore_kv``."""
        self._path.restore_kv()

    def propose(self, batch: ScheduledBatch, vocab_size: int) -> mx.array | None:
        """Compute known tokens, then the proposals that the batch leaves to a draft model.

        Each is drawn as the model that is served will draw the token in its place: by the same
        parameters and random key, so that they agree as often as the two models do.

        Args:
            batch: block copies included.
            vocab_size: of the model that is served.

        Returns:
            The proposals in the order of the batch, int32 ``[proposals]``; None if there are none.
        """
        self._path.copy_blocks(batch.block_copies)
        inputs = [one for one in batch.sequences if one.draft is not None]
        if not inputs:
            return None
        logits = self._compute_known(inputs)
        # Those with most proposals first: who goes on is a leading part.
        drafting = [i for i, one in enumerate(inputs) if PENDING_TOKEN in one.proposals]
        drafting.sort(key=lambda i: -len(inputs[i].verify))
        if not drafting:
            return None
        logits = logits[mx.array(drafting)]
        columns = self._draft([inputs[i] for i in drafting], logits, vocab_size)
        return _in_order(columns, [len(inputs[i].verify) for i in drafting], drafting)

    def _compute_known(self, inputs: Sequence[ScheduledSequence]) -> mx.array:
        """Run the known tokens; logits after the last of each sequence, ``[inputs, vocab]``."""
        known = [_known_tokens(one) for one in inputs]
        lengths = np.array([len(one.token_ids) for one in known])
        # The served model may have ids beyond this table, for padding.
        token_ids = mx.minimum(token_array(known), self._vocab_size - 1)
        last = np.cumsum(lengths) - 1
        if lengths.max() <= FEW_TOKENS:
            rows = [row for one in known for row in single_rows(one)]
            logits = self._path.logits(rows, token_ids, range(len(rows)))[mx.array(last)]
        else:
            logits = self._path.logits(known, token_ids, last.tolist())
        self._finish(logits)
        return logits

    def _draft(
        self, sequences: Sequence[ScheduledSequence], logits: mx.array, vocab_size: int
    ) -> list[mx.array]:
        """The first proposals of all sequences, then the second of those that have one, ..."""
        columns: list[mx.array] = []
        active = list(sequences)
        while True:
            place = len(columns)
            specs = [_spec(one, place) for one in active]
            tokens = self._sampler.choose(_resized(logits, vocab_size), specs).astype(mx.int32)
            columns.append(tokens)
            active = [one for one in active if len(one.verify) > place + 1]
            if not active:
                return columns
            self._finish(tokens)
            rows = [_single_row(one, one.start + 1 + place) for one in active]
            logits = self._path.logits(rows, tokens[: len(active)], range(len(active)))

    def _finish(self, output: mx.array) -> None:
        """Evaluate a forward before the next is built, where a pool is else copied by a write."""
        if not self._runs_ahead:
            mx.eval(self._path.arrays(), output)


def _known_tokens(one: ScheduledSequence) -> ScheduledSequence:
    assert one.draft is not None
    return ScheduledSequence(
        seq_id=one.seq_id,
        slot=one.slot,
        start=one.draft.start,
        token_ids=one.draft.token_ids,
        block_table=one.block_table,
    )


def _single_row(one: ScheduledSequence, position: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id=one.seq_id,
        slot=one.slot,
        start=position,
        token_ids=(PENDING_TOKEN,),
        block_table=one.block_table,
    )


def _spec(one: ScheduledSequence, place: int) -> SampleSpec:
    """What chooses the token that the proposal at this place stands for."""
    assert one.sample is not None
    return (one.sample, *one.verify)[place]


def _resized(logits: mx.array, vocab_size: int) -> mx.array:
    """Logits of as many tokens as the served model has: padding differs among models."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, [(0, 0), (0, missing)], constant_values=-mx.inf)
    return logits[:, :vocab_size]


def _in_order(
    columns: Sequence[mx.array], counts: Sequence[int], owners: Sequence[int]
) -> mx.array:
    """Columns of proposals as one array, sequence by sequence.

    Args:
        columns: column j has the j-th proposal of the leading sequences that have one.
        counts: proposals of each sequence, descending.
        owners: where each sequence comes in the result.
    """
    firsts = np.cumsum([0, *(column.shape[0] for column in columns)])
    places = [
        int(firsts[j]) + row
        for row in sorted(range(len(counts)), key=lambda row: owners[row])
        for j in range(counts[row])
    ]
    return mx.concatenate(list(columns))[mx.array(places)]
