"""Runs the ops of training sessions between the steps of the served models."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from typing_extensions import override

from mlx_parallm.engine.models import WorkBeside
from mlx_parallm.engine.turns import TurnClass
from mlx_parallm.training.metrics import TrainingMetrics
from mlx_parallm.training.requests import TrainingEvent, TrainingRequest
from mlx_parallm.types.errors import ParallmError, RequestAbortedError, StepError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.gradients import GradientResult
from mlx_parallm.types.training import PairResult
from mlx_parallm.types.work import Event
from mlx_parallm.worker.ops import (
    Op,
    Pending,
)
from mlx_parallm.worker.training_ops import (
    CloseTraining,
    ForgetTraining,
)
from mlx_parallm.worker.worker import Worker

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A request that is not answered yet.

    Attributes:
        results: of the ops that have ended.
        pending: the op that is being run; None between two.
        seconds: the time that it took so far.
    """

    request: TrainingRequest
    arrival_s: float
    results: list[Any] = field(default_factory=list[Any])
    pending: Pending[Any] | None = None
    seconds: float = 0.0

    @property
    def op(self) -> Op[Any]:
        """The op that is run now or next."""
        return self.request.ops[len(self.results)]

    def restart(self) -> None:
        """Forget what was computed: the engine does not have the session any more."""
        self.results.clear()
        self.pending, self.seconds = None, 0.0


class TrainingEngine(WorkBeside):
    """The turn-taker of all sessions of an engine. It is not thread-safe.

    A turn is one op, such as the forward of a micro-batch, or some layers of one beside streams.
    Sessions take turns op by op, so that they share the time evenly.
    """

    turn_class = TurnClass.TRAINING

    def __init__(
        self,
        worker: Worker,
        metrics: TrainingMetrics,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare; ``clock`` returns seconds since any fixed moment."""
        self._worker = worker
        self._metrics = metrics
        self._clock = clock
        # The requests of each session, in their order; the first session has the next turn.
        self._sessions: OrderedDict[str, deque[_Open]] = OrderedDict()
        # Models of which the worker may keep sessions.
        self._models: set[str] = set()

    @override
    def takes(self, request: Any) -> TypeGuard[TrainingRequest]:
        return isinstance(request, TrainingRequest)

    @property
    @override
    def num_requests(self) -> int:
        return sum(map(len, self._sessions.values()))

    @override
    def submit(
        self, request: TrainingRequest, *, arrival_s: float | None = None
    ) -> Sequence[Event]:
        """``arrival_s`` is ignored.

        A session that is closed ends at once, with all that waits for it, even during a pause.
        """
        if isinstance(request.ops[0], CloseTraining):
            return self._close(request)
        self._models.add(request.model)
        queue = self._sessions.setdefault(request.session, deque())
        queue.append(_Open(request, self._clock()))
        return ()

    @override
    def abort(self, request_id: str) -> bool:
        for session, queue in self._sessions.items():
            for state in queue:
                if state.request.request_id == request_id:
                    queue.remove(state)
                    self._drop_if_empty(session)
                    return True
        return False

    @override
    def cancel(self, request_id: str) -> Sequence[Event]:
        if not self.abort(request_id):
            return []
        error = RequestAbortedError("The request was cancelled.")
        return [ErrorEvent(request_id=request_id, error=error)]

    @override
    def forget(self, model: str) -> None:
        """The next op of each session of the model opens it anew."""
        if model not in self._models:
            return
        self._models.discard(model)
        for queue in self._sessions.values():
            for state in queue:
                if state.request.model == model:
                    state.restart()
        self._worker.execute(ForgetTraining(model=model))

    def _close(self, request: TrainingRequest) -> list[Event]:
        waiting = self._sessions.pop(request.session, ())
        error = RequestAbortedError("The training session is closed.")
        events: list[Event] = [
            ErrorEvent(request_id=state.request.request_id, error=error) for state in waiting
        ]
        self._worker.execute(CloseTraining(model=request.model, session=request.session))
        return [*events, TrainingEvent(request_id=request.request_id, results=(None,))]

    @property
    @override
    def settles_others(self) -> bool:
        return True

    @override
    def has_work(self) -> bool:
        return not self.is_paused and bool(self._sessions)

    @property
    @override
    def waiting_since_s(self) -> float:
        return min(queue[0].arrival_s for queue in self._sessions.values())

    def step(self, within_s: float | None = None) -> Sequence[Event] | None:
        """Run the next op of the session whose turn it is, or some of its stages.

        ``within_s``: the seconds that it may take; at least one stage is computed.
        """
        session, queue = next(iter(self._sessions.items()))
        state = queue[0]
        try:
            is_complete = self._advance(state, within_s)
        except ParallmError as refusal:
            return self._end(
                session, ErrorEvent(request_id=state.request.request_id, error=refusal)
            )
        except Exception as cause:
            # An op that fails must not end the engine.
            logger.exception("an op of the training session %s failed", session)
            error = StepError(f"{type(cause).__name__}: {cause}")
            return self._end(session, ErrorEvent(request_id=state.request.request_id, error=error))
        if not is_complete:
            return []
        self._sessions.move_to_end(session)
        if len(state.results) < len(state.request.ops):
            return []
        results = tuple(state.results)
        return self._end(
            session, TrainingEvent(request_id=state.request.request_id, results=results)
        )

    def _advance(self, state: _Open, within_s: float | None) -> bool:
        """Compute stages of an op for up to ``within_s``; True if it has ended."""
        begin_s = last_s = self._clock()
        try:
            if state.pending is None:
                state.pending = self._worker.begin(state.op)
            while within_s is not None and state.pending.num_stages > 1:
                state.pending.advance()
                now_s = self._clock()
                if now_s - begin_s + (now_s - last_s) > within_s:
                    return False
                last_s = now_s
            result = state.pending.wait()
        finally:
            state.seconds += self._clock() - begin_s
        if isinstance(result, PairResult | GradientResult):
            self._metrics.on_forward(result, state.seconds)
        state.pending, state.seconds = None, 0.0
        state.results.append(result)
        return True

    def _end(self, session: str, event: Event) -> list[Event]:
        """Forget the first request of a session; return its last event."""
        self._sessions[session].popleft()
        self._drop_if_empty(session)
        return [event]

    def _drop_if_empty(self, session: str) -> None:
        if not self._sessions[session]:
            del self._sessions[session]
