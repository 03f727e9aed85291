"""Requests of training sessions to the engine, and their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.work import Ends, RequestWork
from mlx_parallm.worker.ops import (
    ReadAdapter,
)
from mlx_parallm.worker.training_ops import (
    ApplyGradient,
    ApplySteps,
    CloseTraining,
    DropGradient,
    GradientForward,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
    ReadTraining,
)

TrainingOp = (
    OpenTraining
    | MeasureInputs
    | PairForward
    | ApplySteps
    | GradientForward
    | ApplyGradient
    | DropGradient
    | ReadTraining
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
        num_tokens = sum(map(_num_tokens, self.ops))
        return RequestWork(num_tokens=num_tokens, sticky=("training", self.session))


def _num_tokens(op: TrainingOp) -> int:
    """Return how many tokens an op computes."""
    if isinstance(op, GradientForward):
        return sum(len(item.token_ids) for item in op.inputs)
    if isinstance(op, PairForward):
        rows = (row for segment in op.segments for row in segment.rows)
        return sum(len(op.inputs[row].token_ids) for row in rows)
    return 0


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
