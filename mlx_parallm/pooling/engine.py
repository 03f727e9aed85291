"""The engine of one pooling model: runs batches of inputs and answers requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.models import ServedEngine
from mlx_parallm.engine.turns import SHORT_S, TurnClass
from mlx_parallm.numerics.fits import OnlineFit
from mlx_parallm.pooling.adapters import EncoderAdapterSet
from mlx_parallm.pooling.metrics import PoolingMetrics
from mlx_parallm.pooling.queue import PoolingQueue, WaitingInput
from mlx_parallm.pooling.result_cache import ResultCache
from mlx_parallm.types.errors import OverloadedError, ParallmError, RequestAbortedError, StepError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.pooling import (
    PoolingEvent,
    PoolingInput,
    PoolingJob,
    PoolingResults,
    PoolingRunner,
    PoolRequest,
)

logger = logging.getLogger(__name__)
# FIRST_TOKENS: padded tokens of the first batch, before any cost is measured.
FIRST_TOKENS = 64
# GROWTH: a batch may have this many times the tokens of the largest so far; predictions beyond
# that are not trusted.
GROWTH = 2


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet.

    Attributes:
        results: the results so far, by index of the input.
        hits: indices of the inputs whose results came from the cache.
    """

    request: PoolRequest
    results: dict[int, np.ndarray]
    hits: frozenset[int]
    arrival_s: float

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.request.inputs)

    def answer(self) -> PoolingEvent:
        places = range(len(self.request.inputs))
        hits = (place in self.hits for place in places)
        results = PoolingResults((self.results[place] for place in places), hits)
        return PoolingEvent(request_id=self.request.request_id, results=results)


@dataclass(slots=True)
class _Running:
    """A batch in flight, and the seconds spent on it so far.

    ``is_alone``: False if it began behind steps in flight of others, so that its seconds are
    partly theirs.
    """

    by_input: dict[PoolingInput, WaitingInput]
    is_alone: bool
    job: PoolingJob | None = None
    seconds: float = 0.0


class PoolingEngine(ServedEngine):
    """Steps one pooling model. All calls must come from the engine thread."""

    turn_class = TurnClass.BATCHES

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        encoder: PoolingRunner,
        *,
        max_tokens: int,
        max_waiting: int,
        metrics: PoolingMetrics,
        max_wait_s: float = 0.0,
        cache_bytes: int = 0,
        joins_lengths: bool = False,
        adapters: EncoderAdapterSet | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create an engine without requests.

        Args:
            encoder: runs the model.
            max_tokens: most tokens of a batch, padding included.
            max_waiting: most distinct inputs that wait.
            metrics: records requests and batches.
            max_wait_s: how long an input may wait for others to fill its batch.
            cache_bytes: most memory of cached results.
            joins_lengths: True if inputs of other lengths join a batch where measured costs say
                that one batch is cheaper than two.
            adapters: the model's adapters; None if it takes none.
            clock: returns seconds since any fixed moment.
        """
        self._encoder = encoder
        #: The model's adapters, which stay when it is evicted.
        self.adapters = adapters or EncoderAdapterSet("", None, EngineConfig())
        self.policies = self.adapters.policies
        self._queue = PoolingQueue()
        self._cache = ResultCache(cache_bytes)
        self._cost = BatchCost()
        self._num_stages = 1
        self._open: dict[str, _Open] = {}
        self._running: _Running | None = None
        self._max_tokens = max_tokens
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._joins_lengths = joins_lengths
        self._metrics = metrics
        self._clock = clock

    def submit(
        self, request: PoolRequest, *, arrival_s: float | None = None
    ) -> Sequence[PoolingEvent]:
        """Queue a request; return its answer if all results are cached. See ``ServedEngine``.

        ``arrival_s`` is ignored: latencies are measured by this engine's clock.
        """
        request = self.adapters.begin(request.with_scoped_inputs())
        cached = ((place, self._cache.get(item)) for place, item in enumerate(request.inputs))
        known = {place: result for place, result in cached if result is not None}
        num_missing = len(request.inputs) - len(known)
        if num_missing and self._open and len(self._queue) + num_missing > self._max_waiting:
            self.adapters.end(request)
            raise OverloadedError("Too many inputs wait for this model; try again later.")
        self._metrics.on_request(len(request.inputs), len(known))
        now_s = self._clock()
        state = self._open[request.request_id] = _Open(request, known, frozenset(known), now_s)
        self._queue.add(request, {*known, *self._join_running(request)}, arrival_s=now_s)
        self._metrics.on_waiting(len(self._queue))
        return [self._answer(state)] if state.is_complete else []

    @override
    def abort(self, request_id: str) -> bool:
        return self._forget(request_id)

    @override
    def cancel(self, request_id: str) -> Sequence[ErrorEvent]:
        return self._refuse(request_id, RequestAbortedError("The request was cancelled."))

    def _refuse(self, request_id: str, error: ParallmError) -> list[ErrorEvent]:
        if not self._forget(request_id):
            return []
        return [ErrorEvent(request_id=request_id, error=error)]

    def _forget(self, request_id: str) -> bool:
        state = self._open.pop(request_id, None)
        if state is None:
            return False
        self.adapters.end(state.request)
        self._queue.remove(state.request)
        self._metrics.on_waiting(len(self._queue))
        return True

    @property
    @override
    def num_requests(self) -> int:
        return len(self._open)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of cached results; it may be read from any thread."""
        return self._cache.num_bytes

    def has_work(self) -> bool:
        """True if an input or batch is left to compute, even if it may still wait for others."""
        if self.is_paused:
            return False
        return self._running is not None or len(self._queue) > 0

    @property
    @override
    def settles_others(self) -> bool:
        """False if all that waits is known to be one short batch."""
        if self._running is not None:
            return True
        return self._cost.seconds(len(self._queue), self._queue.longest) > SHORT_S

    @property
    def waiting_since_s(self) -> float:
        """Return when the longest-waiting input arrived; call it only with work."""
        return -math.inf if self._running is not None else self._queue.oldest.arrival_s

    def ready_in_s(self) -> float:
        """Return how long the next batch may still wait for more inputs; call it only with work."""
        if self._running is not None or self._queue.num_tokens >= self._max_tokens:
            return 0.0
        return max(0.0, self._queue.oldest.arrival_s + self._max_wait_s - self._clock())

    def step(self, within_s: float | None = None) -> list[PoolingEvent | ErrorEvent] | None:
        """Run one batch, or some layers of it; return the answers that it completes.

        ``within_s``: the seconds that the step may take, by measured costs, because streams wait
        for it; None if none do. At least one layer is computed.
        """
        is_alone = within_s is None or self.settles_others
        running = self._running or self._take(within_s, is_alone=is_alone)
        if running is None:
            return None
        self._running = running
        if not is_alone:
            # It is short. A break would be decided by the time of the step that it waits for.
            within_s = None
        begin_s = self._clock()
        try:
            if running.job is None:
                running.job = self._begin(list(running.by_input))
                self._num_stages = running.job.num_stages
            results = self._advance(running.job, within_s, begin_s)
        except Exception as cause:
            logger.exception("a batch of %d inputs failed", len(running.by_input))
            self._running = None
            return self._fail(running.by_input.values(), f"{type(cause).__name__}: {cause}")
        running.seconds += self._clock() - begin_s
        if results is None:
            return []
        self._running = None
        return self._end(running, results)

    def release(self) -> None:
        """Free the model's memory; nothing may be waiting, and it runs no more."""
        self.adapters.release()
        self._encoder.release()

    def _join_running(self, request: PoolRequest) -> set[int]:
        """Let a request share the batch in flight; return the indices of the inputs in it."""
        by_input = {} if self._running is None else self._running.by_input
        places = {place for place, item in enumerate(request.inputs) if item in by_input}
        for place in places:
            by_input[request.inputs[place]].askers.append((request.request_id, place))
        return places

    def _take(self, within_s: float | None, *, is_alone: bool) -> _Running | None:
        """Return the next batch; None if uploads hold every slot that it could use."""
        num_adapters = self.adapters.adapters.num_movable
        joins = self._joins_lengths and within_s is None
        batch = self._queue.take(
            self._budget(within_s),
            max_adapters=num_adapters,
            seconds=self._cost.seconds if joins else None,
        )
        return _Running({waiting.input: waiting for waiting in batch}, is_alone) if batch else None

    def _begin(self, inputs: Sequence[PoolingInput]) -> PoolingJob:
        contents = {item.adapter for item in inputs if item.adapter is not None}
        with self.adapters.placed(contents) as slots:
            return self._encoder.begin(inputs, slots)

    def _budget(self, within_s: float | None) -> int:
        """Return the token budget of the next batch: what one turn computes.

        If not even the oldest input can be computed in a turn, the budget is what a turn computes
        one layer of.
        """
        if within_s is None:
            return self._max_tokens
        length = len(self._queue.oldest.input.token_ids)
        tokens = self._cost.tokens_within(within_s, length)
        if tokens < length:
            tokens = self._cost.tokens_within(within_s * self._num_stages, length)
        return min(self._max_tokens, tokens)

    def _advance(
        self, job: PoolingJob, within_s: float | None, begin_s: float
    ) -> list[np.ndarray] | None:
        """Compute stages for up to ``within_s``; return the results, or None if stages are left."""
        last_s = begin_s
        while within_s is not None and job.num_stages > 1:
            job.advance()
            now_s = self._clock()
            if now_s - begin_s + (now_s - last_s) > within_s:
                return None
            last_s = now_s
        return job.wait()

    def _end(self, running: _Running, results: list[np.ndarray]) -> list[PoolingEvent | ErrorEvent]:
        lengths = [len(item.token_ids) for item in running.by_input]
        if running.is_alone:
            self._cost.observe(len(lengths), max(lengths), running.seconds)
        self._metrics.on_batch(lengths, running.seconds)
        self._metrics.on_waiting(len(self._queue))
        pairs = list(zip(running.by_input.values(), results, strict=True))
        wrong = [waiting for waiting, result in pairs if not np.isfinite(result).all()]
        events = self._fail(wrong, "The model's result has NaN or infinite values.")
        for waiting, result in pairs:
            if waiting not in wrong:
                events += self._give(waiting, result)
        return events

    def _give(self, waiting: WaitingInput, result: np.ndarray) -> list[PoolingEvent]:
        # Several requests share the result, and later ones get it from the cache.
        result.setflags(write=False)
        self._cache.put(waiting.input, result)
        events: list[PoolingEvent] = []
        for request_id, place in waiting.askers:
            state = self._open.get(request_id)
            if state is None:
                continue
            state.results[place] = result
            if state.is_complete:
                events.append(self._answer(state))
        return events

    def _answer(self, state: _Open) -> PoolingEvent:
        del self._open[state.request.request_id]
        self.adapters.end(state.request)
        self._metrics.on_answer(self._clock() - state.arrival_s)
        return state.answer()

    def _fail(self, batch: Iterable[WaitingInput], why: str) -> list[PoolingEvent | ErrorEvent]:
        """Refuse the requests that wait for any of these inputs; return their errors."""
        askers = {asker for waiting in batch for asker, _ in waiting.askers}
        return [event for asker in askers for event in self._refuse(asker, StepError(why))]


class BatchCost:
    """A linear model of a batch's seconds: per padded token, per pair of tokens, and per launch.

    Costs are fitted to the batches observed.
    """

    def __init__(self) -> None:
        self._fit = OnlineFit(3)
        self._most = 0

    def observe(self, count: int, length: int, seconds: float) -> None:
        """Learn that ``count`` inputs, padded to ``length`` tokens, took ``seconds``."""
        tokens = float(count * length)
        self._fit.learn((tokens, tokens * length, 1.0), seconds)
        self._most = max(self._most, count * length)

    def tokens_within(self, seconds: float, length: int) -> int:
        """Return how many padded tokens, in inputs of ``length``, take at most ``seconds``."""
        most = max(FIRST_TOKENS, GROWTH * self._most)
        per_token, per_pair, launch = self._fit.coefficients
        each = per_token + length * per_pair
        left = max(seconds - launch, 0.0)
        return most if each * most <= left else int(left / each)

    def seconds(self, count: int, length: int) -> float:
        """Return the predicted seconds of ``count`` inputs of ``length``; inf if it is unknown."""
        tokens = float(count * length)
        if tokens > GROWTH * self._most:
            return math.inf
        return self._fit.predict((tokens, tokens * length, 1.0))
