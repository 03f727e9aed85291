"""The costs of a step and of computing inputs, learned from ended steps.

Pure arithmetic: times are arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mlx_parallm.numerics.fits import OnlineFit, PrefillFit
from mlx_parallm.types.shape_buckets import coarse, padded_tokens, unpadded_tokens

# MIN_CHUNK: rows of fewer tokens are computed token by token and cost what decode rows cost.
MIN_CHUNK = 16
# FIRST_CHUNK: prefill tokens of the first step, before any cost is measured.
FIRST_CHUNK = 64
# GROWTH: a step may have this many times the prefill tokens of recent steps; predictions beyond
# that are not trusted. NEAR_GROWTH is the limit if recent steps took nearly as long as they may:
# while the host is slower than the device, steps take equally long for any prefill, so their times
# do not show where the device becomes the slower one.
GROWTH, NEAR_GROWTH = 1.5, 1.25
# CONTEXT_GROWTH: a step's prompts may read this many times the positions that those of recent steps
# read. A prompt's second chunk reads up to 5.25 times those of its first one, and what took too
# little of a step to be measured stays little.
CONTEXT_GROWTH = 6.0
# RECENT_MEMORY: each step with fewer prefill tokens lowers the recent number to this share of it.
# The positions that prompts read are remembered so, too.
RECENT_MEMORY = 0.75
# MOST_JOINED: a sample consists of at most so many steps: one, and its neighbours.
MOST_JOINED = 3
# LIKE: steps are alike if neither has more than this many times the prefill tokens of the other.
LIKE = 1.25
# LEAST_SHARE: if no prefill fits the bound, a step still gets tokens that cost this share of
# prefill's fixed cost. Each such step then does more, so that fewer steps exceed the bound.
LEAST_SHARE = 0.25
# STAGE_GROWTH: a step may have this many times the tokens of recent ones; predictions beyond that
# are not trusted.
STAGE_GROWTH = 2.0
# STAGE_MEMORY: each step with fewer tokens lowers the recent number to this share of it.
STAGE_MEMORY = 0.75


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step.

    Attributes:
        decode_tokens: tokens of short rows.
        decode_context: positions that they attend to, all together.
        prefill_tokens: tokens of longer rows.
        prefill_context: positions that they attend to, all together.
    """

    decode_tokens: int
    decode_context: float
    prefill_tokens: int
    prefill_context: float

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> StepWork:
        """Return the work of rows of ``(first position, tokens)``."""
        decode = prefill = 0
        read = attended = 0.0
        for start, count in rows:
            if count < MIN_CHUNK:
                decode += count
                read += count * (start + count / 2)
            else:
                prefill += count
                attended += count * (start + count / 2)
        return cls(decode, read, prefill, attended)

    def is_like(self, other: StepWork) -> bool:
        """Return True if the steps have about as many prefill tokens."""
        fewer, more = sorted((self.prefill_tokens, other.prefill_tokens))
        return more <= LIKE * fewer


class StepCost:
    """Predicts the seconds of a step: so much by decode row, prefill token and position read.

    The host sees a step's end only when it waits for the step's results. A step may have ended
    before that, while the host submitted the next one; how much of the time then counts as the
    earlier step's differs by device. So two such neighbours are learned from together.
    """

    def __init__(self, *, pads: bool = False) -> None:
        """Begin without samples; ``pads``: see ``Scheduler``."""
        self.pads = pads
        self._decode = OnlineFit(3)
        self._prefill = PrefillFit(self._decode)
        self._recent_prefill = self._recent_s = self._recent_context = 0.0
        self._run: list[tuple[StepWork, float]] = []

    def most_prefill(self, bound_s: float, *, in_proportion: bool = False) -> int:
        """Return the most prefill tokens for which a prediction can be trusted.

        With x times the tokens a step takes at most x times as long, whatever a token costs, if its
        tokens read no more positions each; see ``most_context``.

        Args:
            bound_s: seconds that the step may take.
            in_proportion: True to assume that a step's time grows as its tokens do. Steps then stop
                growing at the bound. False to let steps near the bound grow by ``NEAR_GROWTH``, to
                learn whether more tokens take longer.
        """
        known = bound_s / self._recent_s if self._recent_s else GROWTH
        growth = min(GROWTH, known)
        if not in_proportion:
            growth = max(growth, NEAR_GROWTH) if known >= 1 else 1.0
        return max(FIRST_CHUNK, int(growth * self._recent_prefill))

    def most_context(self, tokens: int) -> float:
        """Return the most positions that prefill may read for a prediction to be trusted.

        Until attention at far positions was measured, it may cost any number of seconds. A new
        prompt of ``tokens`` tokens, as many as are trusted, is trusted whole.
        """
        return max(CONTEXT_GROWTH * self._recent_context, tokens * tokens / 2)

    def observe(self, work: StepWork, seconds: float, *, is_end_known: bool = True) -> None:
        """Learn from a step that has ended.

        Args:
            work: that of the step.
            seconds: that it took.
            is_end_known: False if it may have ended earlier, see the class; it may count only
                after the next step then.
        """
        if self.pads and work.prefill_tokens:
            rows = work.decode_tokens
            tokens = padded_tokens(rows + work.prefill_tokens) - rows
            work = replace(work, prefill_tokens=tokens)
        if not self.joins(work):
            self.end_run()
        self._run.append((work, seconds))
        if is_end_known:
            self.end_run()
        if work.prefill_tokens:
            self._recent_prefill *= RECENT_MEMORY
            if work.prefill_tokens >= self._recent_prefill:
                self._recent_prefill, self._recent_s = work.prefill_tokens, seconds
            context = RECENT_MEMORY * self._recent_context
            self._recent_context = max(context, work.prefill_context)

    def joins(self, work: StepWork) -> bool:
        """Return True if this work, as that of the next step, is learned with the steps before."""
        run = self._run
        return bool(run) and len(run) < MOST_JOINED and not run[-1][0].is_like(work)

    def end_run(self) -> None:
        """Learn from the steps that may have ended earlier; a step like the last one follows."""
        if self._run:
            self._learn(self._run)
            self.skip()

    def skip(self) -> None:
        """Forget the steps that may have ended earlier; the next one cannot be learned from."""
        self._run.clear()

    def _learn(self, run: Sequence[tuple[StepWork, float]]) -> None:
        """Learn from the sums of some steps; those of a linear cost are linear."""
        decode = _sums(_decode_features(work) for work, _ in run)
        prefill = _sums(_prefill_features(work) for work, _ in run)
        seconds = sum(taken for _, taken in run)
        most = max(work.prefill_tokens for work, _ in run)
        if most:
            self._prefill.learn(prefill, decode, most.bit_length(), seconds)
        else:
            self._decode.learn(decode, seconds)

    def predict(self, work: StepWork) -> float:
        """Return the seconds that a step will take; 0 for work of a kind that was never seen."""
        decode = self._decode.predict(_decode_features(work))
        return decode + self._prefill.predict(_prefill_features(work))

    @property
    def prefill_s(self) -> float:
        """Return the seconds that any prefill at all adds to a step."""
        return self._prefill.coefficients[0]

    def chunk_s(self, start: int, count: int) -> float:
        """Return the seconds that prompt tokens from ``start`` on cost beyond ``prefill_s``."""
        work = StepWork.of(((start, count),))
        fixed = self.prefill_s if work.prefill_tokens else 0.0
        return self.predict(work) - self.predict(StepWork.of(())) - fixed

    def chunk_within(self, start: int, seconds: float, most: int) -> int:
        """Return how many prompt tokens from ``start`` on cost ``seconds`` beyond ``prefill_s``.

        No more than ``most``.
        """
        _, per_token, per_position = self._prefill.coefficients
        if seconds <= 0:
            return 0
        return _largest_chunk(per_token + start * per_position, per_position, seconds, most)


class PrefillAllowance:
    """The prefill that one step may take beside its decode rows, within a time.

    The first chunk may always have ``MIN_CHUNK`` tokens, so that prompts end however slow the
    decode rows are. If steps are padded, prompts may always fill the smallest size that has room
    for so many tokens.
    """

    def __init__(
        self, cost: StepCost, decode: StepWork, bound_s: float, least_tokens: int = 0
    ) -> None:
        """Prepare.

        Args:
            cost: predicts what the step takes.
            decode: the work of its decode rows; those with many proposals count as prefill.
            bound_s: seconds that it may take.
            least_tokens: tokens that it may have, rows included, however long they take.
        """
        self._cost = cost
        self._least_tokens = least_tokens
        self._num_rows = decode.decode_tokens + decode.prefill_tokens
        # The rows have paid what any prefill adds if some of them count as prefill.
        least = cost.predict(decode) + (0.0 if decode.prefill_tokens else cost.prefill_s)
        self._seconds = max(bound_s - least, LEAST_SHARE * min(cost.prefill_s, bound_s))
        # Recent steps of one size do not show the cost of larger ones. None has to grow here.
        most_s = least + self._seconds
        most = cost.most_prefill(most_s, in_proportion=least_tokens > 0)
        self._tokens = max(FIRST_CHUNK, most - decode.prefill_tokens)
        self._context = max(0.0, cost.most_context(most) - decode.prefill_context)
        self._taken = 0
        self._is_fresh = True

    def room(self, start: int) -> int:
        """Return how many prompt tokens from position ``start`` on may still be added.

        A prompt that takes all of it brings the step to a bucket: to a size without padding if
        steps are padded, else to a number of prompt tokens of ``coarse``.
        """
        trusted = _largest_chunk(start, 1.0, self._context, self._tokens)
        trusted = max(trusted, FIRST_CHUNK - self._taken)
        most = self._taken + self._cost.chunk_within(start, self._seconds, trusted)
        rows, least = self._num_rows, self._least_tokens
        # Shape bucketing: MLX's CUDA backend pays once per new shape, so counts are rounded.
        if self._cost.pads:
            least = unpadded_tokens(least)
            if least < rows + MIN_CHUNK:
                # Padding takes as long as tokens do.
                least = padded_tokens(rows + MIN_CHUNK)
            most = max(unpadded_tokens(rows + most), least) - rows
        else:
            most = coarse(max(most, least - rows))
        most -= self._taken
        if self._is_fresh:
            return max(most, MIN_CHUNK)
        return most if most >= MIN_CHUNK else 0

    def take(self, start: int, count: int) -> None:
        """Note that ``count`` tokens from position ``start`` on were added."""
        self._is_fresh = self._is_fresh and count == 1
        self._tokens -= count
        self._taken += count
        self._context = max(0.0, self._context - count * (start + count / 2))
        self._seconds -= self._cost.chunk_s(start, count)


def _largest_chunk(slope: float, curve: float, total: float, most: int) -> int:
    """Return the largest count, up to ``most``, with count * (slope + curve * count / 2) <= total.

    None of the numbers is negative.
    """
    root = slope + math.sqrt(slope * slope + 2 * curve * total)
    return most if root * most <= 2 * total else int(2 * total / root)


def _sums(features: Iterable[tuple[float, ...]]) -> list[float]:
    return [sum(values) for values in zip(*features, strict=True)]


def _decode_features(work: StepWork) -> tuple[float, float, float]:
    return float(work.decode_tokens), work.decode_context, 1.0


def _prefill_features(work: StepWork) -> tuple[float, float, float]:
    return float(work.prefill_tokens > 0), float(work.prefill_tokens), work.prefill_context


class StageCost:
    """Predicts the seconds that computing inputs adds to a step, by their cost in tokens.

    A step that begins to compute an input also moves its arrays to the device.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(3)
        self._recent = 0.0

    def observe(self, tokens: float, begun: float, seconds: float, rows_s: float) -> None:
        """Learn from a step that took ``seconds``.

        Args:
            tokens: the cost of its stages.
            begun: the cost of the inputs that it began, all their stages.
            seconds: those of the whole step.
            rows_s: how many of them its rows take, by prediction.
        """
        self._fit.learn((tokens, begun, 1.0), seconds, rows_s)
        self._recent = max(tokens, STAGE_MEMORY * self._recent)

    def predict(self, tokens: float, begun: float) -> float:
        """Return the seconds of a step's stages; 0 before the first sample. See ``observe``."""
        return self._fit.predict((tokens, begun, 1.0)) if tokens else 0.0

    def tokens_within(self, seconds: float, begun: float) -> float:
        """Return for how many tokens a step may compute stages that take ``seconds``.

        0 before the first sample. ``begun`` is the cost of an input that it begins.
        """
        per_token, per_begun, fixed = self._fit.coefficients
        most = STAGE_GROWTH * self._recent
        rest = max(0.0, seconds - fixed - per_begun * begun)
        return min(rest / per_token, most) if per_token > 0 else most if rest else 0.0
