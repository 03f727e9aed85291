"""Requests of training sessions to the engine, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.work import Ends, RequestWork
from mlx_parallm.worker.ops import (
    ReadAdapter,
)
from mlx_parallm.worker.training_ops import (
    ApplySteps,
    CloseTraining,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
)

TrainingOp = (
    OpenTraining
    | MeasureInputs
    | PairForward
    | ApplySteps
    | Materialise
    | ReadAdapter
    | CloseTraining
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """Ops of one session, which are run one after the other.

    Attributes:
        request_id: chosen by the caller, unique among those in flight.
        model: the model's first name; the ops name it too.
        session: the session; all of its requests go to one engine.
        ops: at least one. If one fails, those after it are not run.
        adapter: None; see ``Request``.
    """

    request_id: str
    model: str
    session: str
    ops: tuple[TrainingOp, ...]
    adapter: str | None = None

    def work(self) -> RequestWork:
        """Return what the request asks of an engine."""
        forwards = [op for op in self.ops if isinstance(op, PairForward)]
        num_tokens = sum(
            len(op.inputs[row].token_ids)
            for op in forwards
            for segment in op.segments
            for row in segment.rows
        )
        return RequestWork(num_tokens=num_tokens, sticky=("training", self.session))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEvent:
    """The only event of a request that did not fail: the result of each of its ops."""

    request_id: str
    results: tuple[Any, ...]

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens in it: none."""
        return 0

    @property
    def ends(self) -> Ends:
        """Return what ends with it."""
        return Ends.REQUEST
