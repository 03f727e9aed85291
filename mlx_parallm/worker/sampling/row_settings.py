"""The sampler's view of a batch's rows, reused while the same sequences decode.

It names the rows that return log-probabilities, and the keys of random numbers.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_parallm.types.request import ALL_TOKENS, RAW_LOGPROBS, SamplingParams
from mlx_parallm.types.step import SampleSpec, TokenLogprob
from mlx_parallm.worker.sampling.kernel_sampling import MAX_TOP
from mlx_parallm.worker.sampling.logprobs import NamedLogprobs, TargetLogprobs
from mlx_parallm.worker.sampling.truncation import always_adjusts, settings_in_use


class LogprobRows:
    """Rows whose log-probabilities are computed together.

    Attributes:
        mode: the logprobs mode of all of them.
        rows: indices in the batch, ascending.
        places: indices of these rows in the logits: raw logits are those of the whole batch,
            others are made for these rows alone.
        counts: for each row, how many of the likeliest tokens it wants.
        top: the largest of ``counts``.
        named: token ids that a row wants by id, by place.
        entropy: indices into ``rows`` of rows that want the entropy.
    """

    def __init__(self, rows: Sequence[int], params: Sequence[SamplingParams], mode: str) -> None:
        self.mode = mode
        self.rows = list(rows)
        self.places = self.rows if mode == RAW_LOGPROBS else list(range(len(rows)))
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

    def shifted(self, shifts: mx.array) -> RowLogprobs:
        """Return results whose log-probabilities are larger by ``shifts``, float32 ``[rows]``.

        There must be none of tokens by id.
        """
        assert self.named is None, "log-probabilities by id have rows of their own"
        return replace(self, targets=self.targets.shifted(shifts))

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
    groups: dict[tuple[str, bool], list[int]] = {}
    for row, row_params in enumerate(params):
        if row_params.num_logprobs is not None:
            key = (row_params.logprobs_mode or mode, _count(row_params) > MAX_TOP)
            groups.setdefault(key, []).append(row)
    return [LogprobRows(rows, params, row_mode) for (row_mode, _), rows in groups.items()]


def _count(params: SamplingParams) -> int:
    count = params.num_logprobs
    return sys.maxsize if count == ALL_TOKENS else count or 0


# GREEDY_TEMPERATURE is vLLM's limit: below it, scaled logits could overflow.
GREEDY_TEMPERATURE = 1e-5
# _MOST_TOP_K is more than any vocabulary that kernels take, and exact in float32.
_MOST_TOP_K = 1 << 24
_GREEDY = (0.0, 0.0, 1.0, -math.inf)
#: ``WORD``: positions are taken modulo this.
WORD = 1 << 32
_MASK_64 = (1 << 64) - 1


class RowSettings:
    """The parameters of a batch's rows, and the arrays made from them.

    Attributes:
        drawn: indices of rows that are not greedy.
        logprobs: rows that want log-probabilities, in groups.
        always_adjusted: the rows that are adjusted at every step, not only by banned tokens.
    """

    def __init__(self, specs: Sequence[SampleSpec], logprobs_mode: str = RAW_LOGPROBS) -> None:
        """``logprobs_mode`` is for rows that name none."""
        self._params = [spec.params for spec in specs]
        self._seeds = [spec.seed for spec in specs]
        self.always_adjusted = {
            row for row, params in enumerate(self._params) if always_adjusts(params)
        }
        self.drawn = [
            row
            for row, params in enumerate(self._params)
            if params.temperature >= GREEDY_TEMPERATURE
        ]
        self.logprobs = logprob_groups(self._params, logprobs_mode)

    def are_of(self, specs: Sequence[SampleSpec]) -> bool:
        """True if these rows have the same parameters and seeds."""
        # Lists compare identity first, and parameters usually are the same objects.
        return [spec.params for spec in specs] == self._params and [
            spec.seed for spec in specs
        ] == self._seeds

    def adjusted(self, specs: Sequence[SampleSpec]) -> list[int]:
        """Return the rows whose logits ``adjust_logits`` changes at this step."""
        always = self.always_adjusted
        return [row for row, spec in enumerate(specs) if spec.banned_ids or row in always]

    @functools.cached_property
    def in_use(self) -> frozenset[str]:
        """Return the settings that change what the drawn rows are drawn from."""
        return settings_in_use(self._params[row] for row in self.drawn)

    @functools.cached_property
    def settings(self) -> mx.array:
        """Return the argument of ``SamplingKernels.draw``, float32 ``[rows, 4]``."""
        rows = [_GREEDY] * len(self._params)
        for row in self.drawn:
            rows[row] = _row_settings(self._params[row])
        return mx.array(np.array(rows, dtype=np.float32))

    def keys(self, specs: Sequence[SampleSpec]) -> mx.array:
        """Return the same keys as ``random_keys``; seeds are folded only once."""
        self._words[:, 1] = [spec.position % WORD for spec in specs]
        return mx.array(self._words)

    @functools.cached_property
    def _words(self) -> np.ndarray:
        words = np.zeros((len(self._seeds), 2), dtype=np.uint32)
        words[:, 0] = [seed_word(seed) for seed in self._seeds]
        return words


def _row_settings(params: SamplingParams) -> tuple[float, float, float, float]:
    top_k = min(params.top_k, _MOST_TOP_K) if params.top_k > 0 else 0
    log_min_p = float(np.log(np.float32(params.min_p))) if params.min_p > 0 else -math.inf
    return params.temperature, top_k, params.top_p, log_min_p


def seed_word(seed: int) -> int:
    """Return a seed folded into 32 bits.

    Seeds below 2**32 stay the same, so they never collide. Others go through the finaliser of
    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
    """
    if 0 <= seed < WORD:
        return seed
    word = seed & _MASK_64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (word ^ (word >> 31)) >> 32


def random_keys(specs: Sequence[SampleSpec]) -> mx.array:
    """Return the keys of the rows' next tokens, uint32 ``[rows, 2]``."""
    words = [(seed_word(spec.seed), spec.position % WORD) for spec in specs]
    return mx.array(np.array(words, dtype=np.uint32))
