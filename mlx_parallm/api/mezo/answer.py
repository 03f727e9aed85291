"""Answers about training sessions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mlx_parallm.api.mezo.answer_schema import (
    Asked,
    GradientStepAnswer,
    PerturbedCopy,
    SessionAnswer,
    StepAnswer,
    Totals,
)
from mlx_parallm.training.records import GradientRecord, StepRecord
from mlx_parallm.training.session import Session
from mlx_parallm.training.step_forwards import StepLosses


def step_answer(
    record: StepRecord, losses: StepLosses | None = None
) -> StepAnswer | GradientStepAnswer:
    """Return the description of a step, with the losses of its examples if they are given."""
    kind = GradientStepAnswer if isinstance(record, GradientRecord) else StepAnswer
    return kind.model_validate(
        {
            **asdict(record),
            "forward_time": record.seconds,
            "losses": None if losses is None else losses.rows,
        }
    )


def session_answer(session: Session) -> SessionAnswer:
    """Return the description of a session."""
    config, state, info = session.config, session.state, session.info
    return SessionAnswer(
        id=config.id,
        model=config.model,
        status=state.status,
        reason=state.reason,
        created_at=config.created_at,
        step=session.num_steps,
        until=state.until,
        num_examples=session.num_examples,
        num_parameters=info and info.num_parameters,
        trained_layers=None if info is None else list(info.paths),
        first_layer=info and info.first_layer,
        prefix_cache=None if info is None else _availability(is_kept=info.keeps_prefix),
        base=state.base,
        published=list(state.published),
        pending=[copy.name for copy in session.pending],
        gradient_form=info and info.gradients,
        checkpoints=session.kept,
        best=session.best,
        warning=session.state.notice or _warning(session),
        totals=_totals(session),
        last=None if session.last is None else step_answer(session.last),
        config=_settings(session),
    )


def ask_answer(session: Session) -> Asked:
    """Return the description of the copies whose losses a session asks for."""
    copies = [PerturbedCopy.model_validate(asdict(copy)) for copy in session.pending]
    return Asked(session_id=session.config.id, step=session.num_steps + 1, data=copies)


def _availability(*, is_kept: bool) -> str:
    return "available" if is_kept else "unavailable"


def _warning(session: Session) -> str | None:
    """Return a warning if more than half of the steps have changed nothing."""
    count, num_zero = session.num_steps, session.num_zero
    if 2 * num_zero <= count or session.kept is not None:
        return None
    return (
        f"{num_zero} of {count} steps changed nothing, because their losses were equal: use a "
        "larger estimator.epsilon, or larger batches."
    )


def _settings(session: Session) -> dict[str, Any]:
    settings = asdict(session.config)
    return {name: value for name, value in settings.items() if name not in ("id", "created_at")}


def _totals(session: Session) -> Totals:
    costs = asdict(session.costs)
    return Totals.model_validate(
        {
            **costs,
            "forward_time": session.costs.seconds,
            "zero_gradient_steps": session.num_zero,
        }
    )
