"""Groups the rows of a step that want log-probabilities, and collects their results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import ALL_TOKENS, PROCESSED_LOGPROBS, SamplingParams
from mlx_parallm.types.step import TokenLogprob
from mlx_parallm.worker.sampling.kernel_sampling import MAX_TOP
from mlx_parallm.worker.sampling.logprobs import NamedLogprobs, TargetLogprobs


class LogprobRows:
    """Rows whose log-probabilities are computed together.

    Attributes:
        is_processed: True if they are those of the distribution that tokens were drawn from, not
            the model's.
        rows: indices in the batch, ascending.
        places: indices of these rows in the logits: raw logits are those of the whole batch,
            processed ones are made for these rows alone.
        counts: for each row, how many of the likeliest tokens it wants.
        top: the largest of ``counts``.
        named: token ids that a row wants by id, by place.
        entropy: indices into ``rows`` of rows that want the entropy.
    """

    def __init__(
        self, rows: Sequence[int], params: Sequence[SamplingParams], *, processed: bool
    ) -> None:
        self.is_processed = processed
        self.rows = list(rows)
        self.places = list(range(len(rows))) if processed else self.rows
        self.counts = [_count(params[row]) for row in rows]
        self.top = max(self.counts)
        self.named = {
            place: params[row].logprob_token_ids
            for place, row in zip(self.places, rows, strict=True)
            if params[row].logprob_token_ids
        }
        self.entropy = [index for index, row in enumerate(rows) if params[row].entropy]

    @functools.cached_property
    def wanted(self) -> mx.array:
        """Return the argument of ``SamplingKernels.logprobs``, int32 ``[n, 2]``."""
        return mx.array(np.array([(place, self.top) for place in self.places], dtype=np.int32))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Lazy results for ``rows``.

    Attributes:
        rows: the rows.
        targets: log-probabilities of the chosen and the likeliest tokens, one entry per row.
        named: log-probabilities of tokens wanted by id; None if no row wants any.
        entropies: float32, of the rows in ``rows.entropy``; None if there are none.
    """

    rows: LogprobRows
    targets: TargetLogprobs
    named: NamedLogprobs | None
    entropies: mx.array | None

    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate before ``to_python``."""
        further = (self.named.values if self.named else None, self.entropies)
        return self.targets.arrays() + [array for array in further if array is not None]

    def to_python(self) -> dict[int, TokenLogprob]:
        """Return the entries by the row's index in the batch."""
        entries = list(self.targets.to_python(self.rows.counts))
        if self.named is not None:
            named = self.named.to_python()
            for index, place in enumerate(self.rows.places):
                if place in named:
                    entries[index] = replace(entries[index], top=named[place])
        if self.entropies is not None:
            values: list[float] = np.array(self.entropies).tolist()
            for index, value in zip(self.rows.entropy, values, strict=True):
                entries[index] = replace(entries[index], entropy=value)
        return dict(zip(self.rows.rows, entries, strict=True))


def logprob_groups(params: Sequence[SamplingParams], mode: str) -> list[LogprobRows]:
    """Return the rows that want log-probabilities, in groups that are computed alike.

    Rows that want more than ``MAX_TOP`` tokens are apart, because they need a sort.

    Args:
        params: parameters of every row of the batch.
        mode: the logprobs mode of rows that name none.
    """
    groups: dict[tuple[bool, bool], list[int]] = {}
    for row, row_params in enumerate(params):
        if row_params.num_logprobs is not None:
            is_processed = (row_params.logprobs_mode or mode) == PROCESSED_LOGPROBS
            groups.setdefault((is_processed, _count(row_params) > MAX_TOP), []).append(row)
    return [
        LogprobRows(rows, params, processed=processed) for (processed, _), rows in groups.items()
    ]


def _count(params: SamplingParams) -> int:
    count = params.num_logprobs
    return sys.maxsize if count == ALL_TOKENS else count or 0
