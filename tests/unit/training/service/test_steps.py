"""Sessions make steps: what these compute and count, and which are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Mode, Status
from mlx_parallm.training.settings import AS_SET, PAPER, MezoSettings, Sides, StepChanges
from mlx_parallm.types.errors import ConflictError, InvalidRequestError
from mlx_parallm.types.training import PairResult
from mlx_parallm.worker.training_ops import PairForward
from tests.unit.training.worker_sessions import EXAMPLES, Open, WorkerTrain, begin, digest, mezo


async def test_steps_reduce_the_loss(opened: Open) -> None:
    session = await begin(opened())
    before = await session.evaluate(EXAMPLES)
    for _ in range(150):
        await session.step()
    after = await session.evaluate(EXAMPLES)
    assert after.loss < 0.8 * before.loss


@pytest.mark.parametrize("estimator", [MezoSettings(), PAPER])
async def test_paired_losses_are_those_of_separate_forwards(
    opened: Open, estimator: MezoSettings
) -> None:
    service = opened()
    paired = await begin(service, estimator=estimator)
    naive = await begin(service, estimator=estimator, mode=Mode.NAIVE)
    for _ in range(20):
        record, other = mezo((await paired.step()).record), mezo((await naive.step()).record)
        assert record.loss_plus == pytest.approx(other.loss_plus, abs=1e-5)
        assert record.loss_minus == pytest.approx(other.loss_minus, abs=1e-5)
        assert record.layer_tokens < other.layer_tokens == other.naive_layer_tokens


async def test_a_learning_rate_of_0_changes_nothing(opened: Open) -> None:
    session = await begin(opened(), estimator=MezoSettings(learning_rate=0.0))
    before = await digest(session)
    for _ in range(3):
        await session.step()
    assert await digest(session) == before


async def test_the_sum_of_the_hits_is_the_formula(opened: Open) -> None:
    session = await begin(opened())
    for _ in range(50):
        await session.step()
    hits, lookups = session.costs.hits, session.costs.lookups
    assert (lookups, hits) == (50 * 4, 50 * 4 - len(EXAMPLES))


async def test_an_evaluation_is_one_after_all_steps(opened: Open) -> None:
    session = await begin(opened(), estimator=MezoSettings(learning_rate=1.0))
    before = await session.evaluate(EXAMPLES)
    await session.step()
    after = await session.evaluate(EXAMPLES)
    assert after != before
    await session.weights()
    assert await session.evaluate(EXAMPLES) == after


async def test_an_evaluation_keeps_no_states(opened: Open) -> None:
    session = await begin(opened(), estimator=MezoSettings(learning_rate=0.0))
    before = await session.evaluate(EXAMPLES)
    await session.step()
    assert (session.costs.lookups, session.costs.hits) == (4, 0)
    # Kept states give the same bits as computed ones.
    await session.step(EXAMPLES)
    assert await session.evaluate(EXAMPLES) == before


async def test_a_loss_that_is_not_finite_makes_no_step(
    opened: Open, monkeypatch: pytest.MonkeyPatch, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    await session.step()
    before = await digest(session)
    run = WorkerTrain.__call__

    async def broken(self: WorkerTrain, request: Any) -> tuple[Any, ...]:
        results = await run(self, request)
        return tuple(
            PairResult([np.full_like(row, np.nan) for row in each.results])
            if isinstance(each, PairResult)
            else each
            for each in results
        )

    with monkeypatch.context() as patch:
        patch.setattr(WorkerTrain, "__call__", broken)
        with pytest.raises(ConflictError, match="not finite"):
            await service.step(session.config.id, 1, None)
    assert session.state.status is Status.PAUSED
    assert "not finite" in (session.state.reason or "")
    assert (session.num_steps, await digest(session)) == (1, before)


@pytest.mark.parametrize("rate", [1e45, 1e308])
async def test_a_step_that_is_not_finite_is_refused(opened: Open, rate: float) -> None:
    estimator = MezoSettings(learning_rate=rate, normalises=False)
    service = opened()
    session = await begin(service, estimator=estimator)
    before = await digest(session)
    with pytest.raises(ConflictError, match="not finite"):
        await service.step(session.config.id, 1, None)
    assert (session.num_steps, await digest(session)) == (0, before)
    assert "not finite" in (session.state.reason or "")


async def test_metrics_count_sessions_and_steps(opened: Open) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    await service.step(session.config.id, 3, None)
    await service.pause(other.config.id)
    costs = session.costs
    samples = dict(
        line.rsplit(" ", 1)
        for line in service.metrics().decode().splitlines()
        if not line.startswith("#")
    )
    prefix = "mlx_parallm:mezo_"
    for name, expected in {
        'sessions{status="ready"}': 1,
        'sessions{status="paused"}': 1,
        'sessions{status="running"}': 0,
        "steps_total": 3,
        "zero_gradient_steps_total": 0,
        "layer_tokens_total": costs.layer_tokens,
        "naive_layer_tokens_total": costs.naive_layer_tokens,
        "step_seconds_total": costs.seconds,
        "stored_bytes": session.files.num_bytes + other.files.num_bytes,
    }.items():
        assert float(samples[prefix + name]) == pytest.approx(expected), name


@pytest.mark.parametrize("step", [-1, 2])
async def test_steps_that_were_not_made_cannot_be_returned_to(opened: Open, step: int) -> None:
    service = opened()
    session = await begin(service)
    await session.step()
    with pytest.raises(InvalidRequestError, match="from 0 to 1"):
        await session.weights(step)
    with pytest.raises(InvalidRequestError, match="from 0 to 1"):
        service.follow(session.config.id, step)


async def test_counted_errors_report_steps_without_a_gradient(opened: Open) -> None:
    estimator = MezoSettings(epsilon=1e-6)
    session = await begin(opened(), estimator=estimator, measure=Measure.ERROR)
    before = await digest(session)
    for _ in range(3):
        assert (await session.step()).record.is_zero
    assert session.num_zero == 3
    assert await digest(session) == before


async def test_a_batch_of_the_caller_must_suit_the_directions(opened: Open) -> None:
    estimator = MezoSettings(num_directions=2, splits_batch=True, sides=Sides.ONE_SIDED)
    session = await begin(opened(), estimator=estimator)
    record = mezo((await session.step(EXAMPLES[:6])).record)
    assert len(record.gradients) == 2
    with pytest.raises(InvalidRequestError, match="divided"):
        await session.step(EXAMPLES[:5])


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (5, AS_SET),
        (4, StepChanges(learning_rate=1e308)),
        (None, StepChanges(learning_rate=1e308)),
        (None, StepChanges(epsilon=1e300)),
    ],
)
async def test_the_fault_of_one_request_pauses_no_session(
    opened: Open, rows: int | None, changes: StepChanges
) -> None:
    service = opened()
    estimator = MezoSettings(num_directions=2, splits_batch=True, normalises=False)
    session = await begin(service, estimator=estimator)
    examples = None if rows is None else EXAMPLES[:rows]
    with pytest.raises(InvalidRequestError):
        await service.step(session.config.id, 1, examples, changes)
    assert (session.state.status, session.num_steps) == (Status.READY, 0)
    await service.step(session.config.id, 1, None)
    assert session.num_steps == 1


async def test_sessions_run_side_by_side(opened: Open) -> None:
    service = opened()
    sessions = [await begin(service, seed=seed) for seed in range(3)]
    for session in sessions:
        service.run(session.config.id, 10)
    await asyncio.gather(*(session.wait_for_steps(9) for session in sessions))
    assert len({session.files.log() for session in sessions}) == 3


async def test_f1_is_that_of_the_whole_batch_however_it_is_cut(opened: Open) -> None:
    service = opened()
    settings = MezoSettings(epsilon=1.0, learning_rate=0.5)
    sessions = [
        await begin(service, measure=Measure.F1, estimator=settings, batch_size=8, **changes)
        for changes in ({}, {"max_tokens": 8}, {"mode": Mode.NAIVE})
    ]
    whole, cut, naive = [[mezo((await each.step()).record) for _ in range(5)] for each in sessions]
    losses = [
        [(step.loss_plus, step.loss_minus) for step in steps] for steps in (whole, cut, naive)
    ]
    assert losses[0] == losses[1] == losses[2]
    assert all(0.0 <= loss <= 1.0 for pair in losses[0] for loss in pair)
    assert len({loss for pair in losses[0] for loss in pair}) > 1


async def test_an_evaluation_keeps_to_the_budget_of_a_forward(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    whole, cut = await begin(service), await begin(service, max_tokens=12)
    expected = await whole.evaluate(EXAMPLES)
    train.requests.clear()
    scores = await cut.evaluate(EXAMPLES)
    sizes = [
        len(op.inputs) * max(len(item.token_ids) for item in op.inputs)
        for request in train.requests
        for op in request.ops
        if isinstance(op, PairForward)
    ]
    assert len(sizes) > 1
    assert max(sizes) <= 12
    assert scores.loss == pytest.approx(expected.loss, abs=1e-6)
    assert (scores.accuracy, scores.f1) == (expected.accuracy, expected.f1)
