"""The engine of one net: one forward for the rows of all requests that wait."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from mlx_parallm.engine.models import ServedEngine
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.turns import SHORT_S, TurnClass
from mlx_parallm.nets.batch import BatchKey, join, key_of, split
from mlx_parallm.nets.metrics import NetMetrics
from mlx_parallm.nets.states import KeptState, SequenceStates, StateLimits
from mlx_parallm.types.errors import (
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    ParallmError,
    RequestAbortedError,
    StepError,
)
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.nets import (
    INPUTS,
    OBSERVATIONS,
    STATES,
    Arrays,
    NetEvent,
    NetRequest,
    NetResults,
    NetSignature,
)
from mlx_parallm.types.request import WEIGHTS
from mlx_parallm.worker.ops import NetOutputs, Unload
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)

#: ``MAX_ROWS``: most rows of a request, and most rows multiplied by their times of a forward that
#: joins several.
MAX_ROWS = 4096
#: ``MAX_WAITING``: most rows that wait; a request of more waits alone.
MAX_WAITING = 1 << 16
#: ``LARGE``: larger numbers of a request make it the client's fault that a net's results are not
#: finite. Smaller ones are usual, and its weights are at fault.
LARGE = 1000.0

NetEvents = list[NetEvent | ErrorEvent]


@dataclass(slots=True)
class _Waiting:
    """A request that waits.

    Attributes:
        key: which requests can be in a batch with it.
        arrival_s: by the monotonic clock.
    """

    request: NetRequest
    key: BatchKey
    arrival_s: float

    @property
    def num_times(self) -> int:
        return self.key[0] or 1


@dataclass(slots=True)
class _Row:
    """A request of the batch that is computed.

    Attributes:
        kept: the state of the sequence that it continues; None without.
    """

    request: NetRequest
    kept: KeptState | None

    @property
    def states(self) -> Arrays | None:
        return self.request.states if self.kept is None else self.kept.arrays


class NetEngine(ServedEngine):
    """Steps one net. All calls must come from the engine thread."""

    turn_class = TurnClass.FORWARD

    def __init__(
        self,
        worker: Worker,
        model: str,
        signature: NetSignature,
        *,
        policies: Policies,
        metrics: NetMetrics,
        limits: StateLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an engine without requests.

        Args:
            worker: has the net.
            model: its first name.
            signature: its tensors.
            policies: the versions of its weights; they stay when it is evicted.
            metrics: records requests and forwards.
            limits: of the states that are kept for sequences.
            clock: returns seconds since any fixed moment.
        """
        self.policies = policies
        self._worker = worker
        self._model = model
        self._signature = signature
        self._metrics = metrics
        self._clock = clock
        self._states = SequenceStates(limits or StateLimits(), clock)
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        # The rows that wait, by the key of their requests.
        self._num_rows: Counter[BatchKey] = Counter()
        self._cost = ForwardCost()

    def reset_prefix_cache(self, *, reset_running: bool) -> None:
        """See ``PrefixCache``: states stay, and say that other weights made them."""
        del reset_running

    @override
    def submit(
        self, request: NetRequest, *, arrival_s: float | None = None
    ) -> Sequence[NetEvent | ErrorEvent]:
        if self._waiting and self._num_rows.total() + request.num_rows > MAX_WAITING:
            raise OverloadedError("Too many rows wait for this net; try again later.")
        now_s = self._clock() if arrival_s is None else arrival_s
        key = key_of(self._signature.timed_input, request)
        self._waiting[request.request_id] = _Waiting(request, key, now_s)
        self._num_rows[key] += request.num_rows
        return ()

    @override
    def abort(self, request_id: str) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return False
        self._num_rows[waiting.key] -= waiting.request.num_rows
        if not self._num_rows[waiting.key]:
            del self._num_rows[waiting.key]
        return True

    @override
    def cancel(self, request_id: str) -> Sequence[ErrorEvent]:
        if not self.abort(request_id):
            return []
        error = RequestAbortedError("The request was cancelled.")
        return [ErrorEvent(request_id=request_id, error=error)]

    @property
    @override
    def num_requests(self) -> int:
        return len(self._waiting)

    @property
    @override
    def waiting_since_s(self) -> float:
        return next(iter(self._waiting.values())).arrival_s

    @override
    def has_work(self) -> bool:
        return bool(self._waiting) and not self.is_paused and not self._is_asleep

    @property
    def _is_asleep(self) -> bool:
        return self.live is not None and WEIGHTS in self.live.asleep

    @property
    @override
    def predicted_s(self) -> float:
        first = next(iter(self._waiting.values()))
        num_rows = min(self._num_rows[first.key], self._most_rows(first, None))
        return self._cost.seconds(num_rows, first.num_times)

    @property
    @override
    def settles_others(self) -> bool:
        return self.predicted_s > SHORT_S

    @override
    def step(self, within_s: float | None = None) -> NetEvents | None:
        """Run one forward for all that waits and fits it."""
        events: NetEvents = []
        rows = self._take(events, within_s)
        if not rows:
            return events
        requests = [row.request for row in rows]
        begin_s = self._clock()
        try:
            batch = join(self._model, self._signature, requests, [row.states for row in rows])
            results = self._worker.execute(batch)
        except Exception as cause:
            logger.exception("a forward of %d requests failed", len(requests))
            return events + self._fail(requests, StepError(f"{type(cause).__name__}: {cause}"))
        seconds, num_rows = self._clock() - begin_s, sum(each.num_rows for each in requests)
        num_times = key_of(self._signature.timed_input, requests[0])[0] or 1
        self._cost.observe(num_rows, num_times, seconds)
        self._metrics.on_forward(len(requests), num_rows, seconds)
        parts = split(self._signature, requests, results)
        # One look at the whole batch suffices where all of it is finite.
        is_any = self._signature.allows_non_finite or _is_finite(results)
        events += [
            self._answer(row, part, is_valid=is_any or _is_finite(part))
            for row, part in zip(rows, parts, strict=True)
        ]
        states = self._states
        self._metrics.on_states(len(states), states.num_bytes, states.num_dropped)
        return events

    def _most_rows(self, first: _Waiting, within_s: float | None) -> int:
        """Return the most rows of a forward that begins with a request, which it has in any case.

        Others join it as long as it takes no longer than ``within_s``, or than the request alone.
        """
        least, num_times = first.request.num_rows, first.num_times
        most = MAX_ROWS // num_times
        if within_s is not None:
            within_s = max(within_s, self._cost.seconds(least, num_times))
            while most > least and self._cost.seconds(most, num_times) > within_s:
                most //= 2
        return max(least, most)

    def _take(self, events: NetEvents, within_s: float | None) -> list[_Row]:
        """Take the requests of the next forward out of the queue, and refuse those that cannot run.

        A request waits for the one before it in its sequence.
        """
        rows: list[_Row] = []
        waiting = list(self._waiting.values())
        num_rows, most = 0, self._most_rows(waiting[0], within_s)
        taken: set[tuple[str, str]] = set()
        for each in waiting:
            if num_rows >= most:
                break
            request, use = each.request, each.request.sequence
            sequence = None if use is None else (use.owner, use.sequence_id)
            is_next = sequence is None or sequence not in taken
            if sequence is not None:
                # Later requests of the sequence wait even if this one does.
                taken.add(sequence)
            is_alike = each.key == waiting[0].key
            if not is_alike or not is_next or num_rows + request.num_rows > most:
                continue
            self.abort(request.request_id)
            try:
                kept = None if use is None else self._states.get(use, request.num_rows)
            except ConflictError as refusal:
                events.append(ErrorEvent(request_id=request.request_id, error=refusal))
                continue
            num_rows += request.num_rows
            rows.append(_Row(request, kept))
        return rows

    def _answer(self, row: _Row, part: NetOutputs, *, is_valid: bool) -> NetEvent | ErrorEvent:
        request, use = row.request, row.request.sequence
        if not is_valid:
            return ErrorEvent(request_id=request.request_id, error=_overflow(request))
        version = self.policies.base.version.label
        kept = row.kept
        is_other = kept is not None and (kept.has_other_weights or kept.version != version)
        if use is not None:
            state = KeptState(
                arrays={name: array.copy() for name, array in part.states.items()},
                num_rows=request.num_rows,
                version=version,
                has_other_weights=is_other,
                used_s=self._clock(),
            )
            self._states.put(use, state)
        results = NetResults(
            outputs=part.outputs, states=part.states, version=version, has_other_weights=is_other
        )
        return NetEvent(request_id=request.request_id, results=results)

    def _fail(self, requests: Sequence[NetRequest], error: ParallmError) -> NetEvents:
        return [ErrorEvent(request_id=each.request_id, error=error) for each in requests]

    @override
    def release(self) -> None:
        self._states.clear()
        self._worker.execute(Unload(model=self._model))


class ForwardCost:
    """Predicts the seconds of a forward by its rows and times: the least of late ones.

    A forward that others delayed, or that compiled, says little about the next one.
    """

    #: GROWTH: a prediction grows by it with each forward that took longer, so that a device that
    #: stays slower is known after some forwards.
    GROWTH = 1.05

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}

    def seconds(self, num_rows: int, num_times: int) -> float:
        """Return the most seconds for so many rows of so many times; inf before any forward.

        Sizes that were not seen take as long as larger ones at most, and in proportion to smaller
        ones at most.
        """
        rows, times = num_rows.bit_length(), num_times.bit_length()
        own = self._seconds.get((rows, times))
        if own is not None:
            return own
        bounds = (
            seconds * 2.0 ** (max(0, rows - seen_rows) + max(0, times - seen_times))
            for (seen_rows, seen_times), seconds in self._seconds.items()
        )
        return min(bounds, default=math.inf)

    def observe(self, num_rows: int, num_times: int, seconds: float) -> None:
        """Learn from a forward."""
        size = num_rows.bit_length(), num_times.bit_length()
        before = self._seconds.get(size, math.inf)
        self._seconds[size] = min(seconds, before * self.GROWTH)


def _overflow(request: NetRequest) -> ParallmError:
    """Return the error of a request whose results are not finite.

    It is the client's fault if it sent large numbers, and else that of the net's weights.
    """
    field = INPUTS if request.act is None else OBSERVATIONS
    arrays = {f"{field}.{name}": array for name, array in request.inputs.items()}
    arrays |= {f"{STATES}.{name}": array for name, array in (request.states or {}).items()}
    sizes = {name: float(np.abs(array).max()) for name, array in arrays.items() if array.size}
    where = max(sizes, key=lambda name: sizes[name], default="")
    is_large = sizes.get(where, 0.0) > LARGE
    if not is_large:
        return StepError("The net's results have NaN or infinite values.")
    return InvalidRequestError(
        f"{where} has numbers up to {sizes[where]:.3g}, which are too large for this net: its "
        "results are not finite.",
        param=where.partition(".")[0],
    )


def _is_finite(part: NetOutputs) -> bool:
    arrays = (*part.outputs.values(), *part.states.values())
    return all(array.dtype.kind not in "fc" or np.isfinite(array).all() for array in arrays)
