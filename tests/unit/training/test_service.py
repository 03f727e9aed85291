"""Sessions: their steps, what is left of them after a crash, and what they refuse."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Mode, Status
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import ASLEEP, MAX_ABORTED, MAX_LOST, TrainingService
from mlx_parallm.training.session import Session
from mlx_parallm.training.session_files import LOG, STEPS, SessionFiles, encoded
from mlx_parallm.training.session_store import SessionLimits
from mlx_parallm.training.settings import AS_SET, PAPER, MezoSettings, Sides, StepChanges
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    NotFoundError,
    PausedError,
    RequestAbortedError,
    RequestLostError,
    SessionLostError,
    StorageError,
    StorageInUseError,
)
from mlx_parallm.types.training import FirstFactors, PairResult
from mlx_parallm.worker.training.input_directions import InputDirections
from mlx_parallm.worker.training_ops import (
    CloseTraining,
    Materialise,
    MeasureInputs,
    OpenTraining,
    PairForward,
)
from tests.encoder_folders import golden_arrays, read_golden, write_encoder
from tests.unit.training.worker_sessions import CONFIG, EXAMPLES, WorkerTrain, config_of, mezo

Open = Callable[..., TrainingService]


@pytest.fixture
def train(tmp_path: Path) -> WorkerTrain:
    return WorkerTrain(tmp_path / "model")


@pytest.fixture
async def opened(tmp_path: Path, train: WorkerTrain) -> AsyncIterator[Open]:
    """Open the sessions of one folder, as a new process does."""
    services: list[TrainingService] = []

    def open_service(limits: SessionLimits | None = None) -> TrainingService:
        services.append(TrainingService(tmp_path / "sessions", train, limits))
        services[-1].start()
        return services[-1]

    yield open_service
    for service in services:
        await service.stop()


async def begin(service: TrainingService, **changes: Any) -> Session:
    return await service.create(config_of(**changes), EXAMPLES)


async def digest(session: Session, step: int | None = None) -> str:
    return (await session.weights(step)).digest


def other_weights(folder: Path) -> Path:
    """Write the model with one tensor that differs."""
    golden = read_golden("bert_masked_lm")
    weights = golden_arrays(golden)
    name = min(weights)
    return write_encoder(folder, golden["config"], weights | {name: weights[name] + 1e-3})


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


async def test_a_later_process_goes_on_as_if_nothing_had_happened(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    for _ in range(7):
        await session.step()
        await other.step()
    expected = [await digest(session, step) for step in range(8)]
    await service.stop()
    train.load(train.folder)
    again = opened().get(session.config.id)
    assert [await digest(again, step) for step in range(8)] == expected
    more = [(await again.step()).record for _ in range(3)]
    # The other session was never interrupted, but for its process.
    assert len({mezo(record).seed for record in more}) == 3
    assert again.num_steps == 10


async def test_a_rerun_has_the_same_log_whatever_was_lost_meanwhile(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session, again = await begin(service), await begin(service)
    for number in range(12):
        await session.step()
        if number % 3 == 0:
            train.load(train.folder)
    for _ in range(12):
        await again.step()
    assert session.files.log() == again.files.log()
    assert len(session.files.log()) == 12 * (8 + 4)
    assert await digest(session) == await digest(again)


@pytest.mark.parametrize("lost", [PausedError(), EngineDeadError("dead")])
async def test_a_step_that_was_not_run_changes_nothing(
    opened: Open, train: WorkerTrain, lost: Exception
) -> None:
    service = opened()
    session, again = await begin(service), await begin(service)
    for number in range(6):
        if number in (2, 4):
            train.fail = lost
            with pytest.raises(type(lost)):
                await session.step()
        await session.step()
        await again.step()
    assert session.files.log() == again.files.log()
    assert await digest(session) == await digest(again)


@pytest.mark.parametrize(("name", "cut"), [(LOG, 5), (STEPS, 20)])
async def test_a_log_that_was_cut_ends_at_its_last_whole_record(
    opened: Open, tmp_path: Path, name: str, cut: int
) -> None:
    service = opened()
    session = await begin(service)
    for _ in range(4):
        await session.step()
    expected = await digest(session, 3)
    await service.stop()
    path = tmp_path / "sessions" / session.config.id / name
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened().get(session.config.id)
    assert again.num_steps == 3
    assert await digest(again) == expected
    assert (await again.step()).record.step == 4


async def test_measured_factors_are_kept_for_later_processes(
    opened: Open, train: WorkerTrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    spec = replace(CONFIG.trainable, init=FirstFactors.ACTIVATIONS)
    session, drawn = await begin(service, trainable=spec), await begin(service)
    for _ in range(5):
        await session.step()
    assert await digest(session, 0) != await digest(drawn, 0)
    assert session.files.num_bytes > drawn.files.num_bytes
    expected = [await digest(session, step) for step in range(6)]
    await service.stop()
    train.load(train.folder)
    train.requests.clear()
    # Another device has other bits, and perhaps other signs.
    measured = InputDirections.wait
    monkeypatch.setattr(
        InputDirections, "wait", lambda self: {k: -v for k, v in measured(self).items()}
    )
    again = opened().get(session.config.id)
    assert [await digest(again, step) for step in range(6)] == expected
    assert not any(isinstance(op, MeasureInputs) for each in train.requests for op in each.ops)


async def test_factors_that_were_not_saved_leave_no_session(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("full")

    monkeypatch.setattr(SessionFiles, "save_start", full)
    service = opened()
    with pytest.raises(StorageError):
        await begin(service, trainable=replace(CONFIG.trainable, init=FirstFactors.ACTIVATIONS))
    assert service.all() == []
    assert [path.name for path in (tmp_path / "sessions").iterdir()] == ["lock"]


async def test_weights_of_other_content_are_refused(
    opened: Open, train: WorkerTrain, tmp_path: Path
) -> None:
    service = opened()
    session = await begin(service)
    await session.step()
    train.load(other_weights(tmp_path / "other"))
    with pytest.raises(ConflictError, match="other weights"):
        await service.step(session.config.id, 1, None)
    assert session.state.status is Status.PAUSED
    assert session.state.base is not None
    assert session.state.base[:16] in (session.state.reason or "")
    train.load(train.folder)
    service.resume(session.config.id)
    assert (await session.step()).record.step == 2


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


async def test_a_full_disk_makes_no_step(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    service = opened()
    session, again = await begin(service), await begin(service)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for number in range(4):
        if number == 2:
            with monkeypatch.context() as patch:
                patch.setattr("mlx_parallm.storage.disk.write_all", full)
                with pytest.raises(StorageError):
                    await session.step()
        await session.step()
        await again.step()
    assert session.files.log() == again.files.log()
    losses = [
        [
            (record.step, record.loss_plus, record.mean_square)
            for record in map(mezo, each.files.records())
        ]
        for each in (session, again)
    ]
    assert losses[0] == losses[1]


async def test_a_run_goes_on_in_the_background_and_in_the_next_process(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 40)
    with pytest.raises(ConflictError, match="running"):
        service.run(session.config.id, 1)
    with pytest.raises(ConflictError, match="running"):
        await service.step(session.config.id, 1, None)
    train.fail = EngineDeadError("dead")
    await session.wait_for_steps(3)
    await service.stop()
    assert 3 < session.files.num_steps < 40
    later = opened()
    records = [record async for record in later.follow(session.config.id, 2)]
    assert [record.step for record in records] == list(range(3, 41))
    assert later.get(session.config.id).state.status is Status.READY


async def test_a_pause_ends_a_run_until_it_is_resumed(opened: Open) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 30)
    await session.wait_for_steps(2)
    await service.pause(session.config.id)
    num_steps = session.num_steps
    followed = [record.step async for record in service.follow(session.config.id, 0)]
    with pytest.raises(ConflictError, match="paused"):
        await service.step(session.config.id, 1, None)
    assert session.num_steps == num_steps == len(followed), "no step is in flight after a pause"
    service.resume(session.config.id)
    records = [record.step async for record in service.follow(session.config.id, len(followed))]
    assert followed + records == list(range(1, 31))


async def test_a_deleted_session_leaves_nothing(
    opened: Open, tmp_path: Path, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 1000)
    await session.wait_for_steps(1)
    await service.delete(session.config.id)
    with pytest.raises(NotFoundError):
        service.get(session.config.id)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []
    assert service.all() == []


async def test_deleted_sessions_leave_no_files_open(opened: Open) -> None:
    service = opened()
    counts: list[int] = []
    for _ in range(30):
        session = await begin(service)
        await service.step(session.config.id, 1, None)
        counts.append(len(os.listdir("/dev/fd")))
        await service.delete(session.config.id)
    assert max(counts) == min(counts)


async def test_who_waits_for_steps_of_a_deleted_session_is_told(opened: Open) -> None:
    service = opened()
    session = await begin(service)
    # The session says that it runs, so that its follower waits for a step which never comes.
    session.save(status=Status.RUNNING, until=10)
    follower = service.follow(session.config.id, 0)
    step = asyncio.ensure_future(anext(follower, None))
    await asyncio.sleep(0)
    assert not step.done()
    await service.delete(session.config.id)
    assert await step is None


async def test_what_cannot_be_trained_leaves_nothing(opened: Open, tmp_path: Path) -> None:
    service = opened()
    spec = config_of()("", 0).trainable
    with pytest.raises(InvalidRequestError):
        await begin(service, trainable=replace(spec, targets=("nothing",)))
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_sessions_and_their_logs_are_bounded(opened: Open) -> None:
    num_bytes = len(encoded(EXAMPLES)) + 300
    service = opened(SessionLimits(max_sessions=2, max_session_bytes=num_bytes))
    session = await begin(service)
    await begin(service)
    with pytest.raises(ConflictError, match="2 training sessions"):
        await begin(service)
    with pytest.raises(ConflictError, match=r"full.*--max-data-bytes"):
        await service.step(session.config.id, 5, None)
    assert 1 <= session.num_steps < 5
    assert session.state.status is Status.PAUSED


async def test_data_that_no_session_may_have_is_refused(opened: Open, tmp_path: Path) -> None:
    service = opened(SessionLimits(max_session_bytes=len(encoded(EXAMPLES))))
    with pytest.raises(
        InvalidRequestError, match=r"a session may have.*--max-data-bytes"
    ) as refusal:
        await begin(service)
    assert refusal.value.param == "data"
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_all_sessions_together_are_bounded(opened: Open) -> None:
    num_bytes = len(encoded(EXAMPLES))
    service = opened(SessionLimits(max_bytes=2 * num_bytes + 300))
    first, second = await begin(service), await begin(service)
    with pytest.raises(ConflictError, match="--max-data-bytes"):
        await begin(service)
    service.run(first.config.id, 100)
    [_ async for _ in service.follow(first.config.id, 0)]
    assert 1 <= first.num_steps < 100
    assert "--max-data-bytes" in (first.state.reason or "")
    await service.delete(second.config.id)
    service.resume(first.config.id)
    await first.wait_for_steps(first.num_steps)


async def test_many_sessions_are_refused_before_anything_is_kept(
    opened: Open, tmp_path: Path
) -> None:
    service = opened(SessionLimits(max_sessions=3))
    refused = 0
    for _ in range(1_000):
        try:
            await begin(service)
        except ConflictError:
            refused += 1
    assert (len(service.all()), refused) == (3, 997)
    assert len(list((tmp_path / "sessions").glob("mezo_*"))) == 3


async def test_a_full_disk_pauses_a_session_and_nothing_else(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    await service.step(session.config.id, 2, None)
    before = await digest(session)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_parallm.storage.disk.write_all", full)
        with pytest.raises(StorageError, match="No space left"):
            await service.step(session.config.id, 1, None)
        with pytest.raises(StorageError):
            await begin(service)
    assert (session.num_steps, await digest(session)) == (2, before)
    with pytest.raises(ConflictError, match="No space left"):
        await service.step(session.config.id, 1, None)
    assert len(await service.step(other.config.id, 2, None)) == 2
    service.resume(session.config.id)
    await service.step(session.config.id, 1, None)
    assert len(service.all()) == 2


async def test_a_run_that_meets_a_full_disk_is_paused(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 50)
    await session.wait_for_steps(3)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mlx_parallm.storage.disk.write_all", full)
        steps = [record.step async for record in service.follow(session.config.id, 0)]
    assert session.state.status is Status.PAUSED
    assert "No space left" in (session.state.reason or "")
    assert len(steps) == session.num_steps < 50
    service.resume(session.config.id)
    more = [record.step async for record in service.follow(session.config.id, len(steps))]
    assert steps + more == list(range(1, 51))


async def test_a_sleep_pauses_sessions_until_the_server_is_awake(opened: Open) -> None:
    service = opened()
    running, ready, paused = [await begin(service) for _ in range(3)]
    await service.pause(paused.config.id)
    service.run(running.config.id, 30)
    await running.wait_for_steps(2)
    service.on_sleep()
    await running.settle()
    num_steps = running.num_steps
    for session in (running, ready):
        assert (session.state.status, session.state.reason) == (Status.PAUSED, ASLEEP)
    with pytest.raises(ConflictError, match="asleep"):
        await service.step(ready.config.id, 1, None)
    assert running.num_steps == num_steps < 30
    service.on_wake()
    [_ async for _ in service.follow(running.config.id, 0)]
    assert running.num_steps == 30
    statuses = [session.state.status for session in (running, ready, paused)]
    assert statuses == [Status.READY, Status.READY, Status.PAUSED]


async def test_a_sleep_ends_with_its_process(opened: Open) -> None:
    service = opened()
    session = await begin(service)
    service.on_sleep()
    await service.stop()
    assert opened().get(session.config.id).state.status is Status.READY


@pytest.mark.parametrize("is_running", [False, True])
async def test_new_weights_pause_sessions_with_both_digests(
    opened: Open, train: WorkerTrain, tmp_path: Path, is_running: bool
) -> None:
    service = opened()
    session = await begin(service)
    before = session.state.base
    if is_running:
        service.run(session.config.id, 10_000)
        await session.wait_for_steps(2)
    train.load(other_weights(tmp_path / "other"))
    service.on_weights("unknown")
    service.on_weights(session.config.model)
    while session.state.status is not Status.PAUSED:
        await session.wait_for_steps(session.num_steps)
    digests = re.findall(r"\b[0-9a-f]{16}\b", session.state.reason or "")
    assert len(set(digests)) == 2
    assert (before or "")[:16] in digests
    assert session.num_steps < 10_000


async def test_a_model_that_is_unloaded_pauses_its_sessions(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session, other = await begin(service), await begin(service)
    service.on_unload(session.config.model)
    assert session.state.reason == "model was unloaded."
    service.resume(other.config.id)
    train.fail = ModelNotFoundError("model")
    with pytest.raises(ModelNotFoundError):
        await service.step(other.config.id, 1, None)
    assert "does not exist" in (other.state.reason or "")


async def test_a_session_that_is_deleted_amid_a_step_is_gone(
    opened: Open, tmp_path: Path, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service)
    steps = [asyncio.ensure_future(service.step(session.config.id, 5, None)) for _ in range(3)]
    await asyncio.sleep(0)
    await service.delete(session.config.id)
    for result in await asyncio.gather(*steps, return_exceptions=True):
        assert isinstance(result, NotFoundError)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []
    assert not isinstance(train.requests[-1].ops[0], OpenTraining)


class LoadingTrain(WorkerTrain):
    """Its model can be loading: sessions that are opened wait, and none can be closed.

    Attributes:
        loaded: unset while the model is loaded.
        is_waiting: set once a session waits.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loaded = asyncio.Event()
        self.is_waiting = asyncio.Event()

    async def __call__(self, request: TrainingRequest) -> tuple[Any, ...]:
        if not self.loaded.is_set():
            if isinstance(request.ops[0], CloseTraining):
                raise ModelLoadingError(request.model)
            if isinstance(request.ops[0], OpenTraining):
                self.is_waiting.set()
                await self.loaded.wait()
        return await super().__call__(request)

    def has(self, session_id: str) -> bool:
        """True if the engine has a part of the session."""
        try:
            self.execute(Materialise(model=CONFIG.model, session=session_id))
        except SessionLostError:
            return False
        return True


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[tuple[TrainingService, LoadingTrain]]:
    train = LoadingTrain(tmp_path / "model")
    service = TrainingService(tmp_path / "sessions", train)
    service.start()
    yield service, train
    await service.stop()


async def test_a_session_that_is_deleted_while_its_model_is_loaded_leaves_nothing(
    loading: tuple[TrainingService, LoadingTrain], tmp_path: Path
) -> None:
    service, train = loading
    train.loaded.set()
    session = await begin(service)
    assert train.has(session.config.id)
    train.load(train.folder)
    train.loaded.clear()
    step = asyncio.ensure_future(session.step())
    await train.is_waiting.wait()
    deletion = asyncio.ensure_future(service.delete(session.config.id))
    await asyncio.sleep(0)
    train.loaded.set()
    await deletion
    with pytest.raises(NotFoundError):
        await step
    assert not train.has(session.config.id)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_a_session_can_be_deleted_before_it_has_begun(
    loading: tuple[TrainingService, LoadingTrain], tmp_path: Path
) -> None:
    service, train = loading
    creation = asyncio.ensure_future(begin(service))
    await train.is_waiting.wait()
    (session,) = service.all()
    deletion = asyncio.ensure_future(service.delete(session.config.id))
    await asyncio.sleep(0)
    train.loaded.set()
    await deletion
    with pytest.raises(NotFoundError):
        await creation
    assert not train.has(session.config.id)
    assert list((tmp_path / "sessions").glob("mezo_*")) == []


async def test_a_session_that_the_disk_refuses_leaves_nothing(
    loading: tuple[TrainingService, LoadingTrain], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, train = loading
    train.loaded.set()

    def refuse(*_: Any) -> None:
        raise StorageError("full")

    monkeypatch.setattr(SessionFiles, "save_state", refuse)
    with pytest.raises(StorageError):
        await begin(service)
    (opening, *_) = train.requests
    assert not train.has(opening.session)


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


async def test_a_folder_has_one_server(opened: Open) -> None:
    await begin(opened())
    other = opened()
    with pytest.raises(StorageInUseError):
        await begin(other)


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


async def test_reported_losses_without_a_finite_step_can_be_reported_anew(
    tmp_path: Path, train: WorkerTrain
) -> None:
    service = TrainingService(tmp_path / "sessions", train, adapters=FakeAdapters())
    service.start()
    session = await begin(service, measure=None, estimator=MezoSettings(normalises=False))
    await service.ask(session.config.id)
    with pytest.raises(ConflictError, match="not finite"):
        await service.tell(session.config.id, lambda copies: [1e300] + [0.0] * (len(copies) - 1))
    assert session.state.status is Status.READY
    await service.tell(session.config.id, lambda copies: [1.0] * len(copies))
    assert session.num_steps == 1
    await service.stop()


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


async def test_copies_of_a_lost_engine_are_the_same(
    tmp_path: Path, train: WorkerTrain, opened: Open
) -> None:
    session = await begin(opened(), measure=None)
    before = [copy.weights.digest for copy in await session.perturbed()]
    train.load(tmp_path / "model")
    assert [copy.weights.digest for copy in await session.perturbed()] == before
    record = mezo(await session.learn([1.0, 0.5]))
    assert (record.step, record.loss_plus, record.loss_minus) == (1, 1.0, 0.5)
    after = [copy.weights.digest for copy in await session.perturbed()]
    assert not set(after) & set(before)


async def test_copies_of_other_weights_are_refused(
    tmp_path: Path, train: WorkerTrain, opened: Open
) -> None:
    session = await begin(opened(), measure=None)
    await session.perturbed()
    train.load(other_weights(tmp_path / "other"))
    with pytest.raises(ConflictError, match="other weights"):
        await session.perturbed()
    with pytest.raises(ConflictError, match="other weights"):
        await session.learn([1.0, 0.5])
    assert session.num_steps == 0


class FakeAdapters:
    """Serves adapters by name, slowly.

    Attributes:
        served: the names.
        has_begun: set once one is served.
    """

    def __init__(self) -> None:
        self.served: set[str] = set()
        self.has_begun = asyncio.Event()

    async def load_adapter(self, upload: AdapterUpload, *, model: str | None = None) -> Any:
        assert model is not None
        await asyncio.sleep(0.01)
        assert not upload.is_cached
        self.served.add(upload.name)
        self.has_begun.set()

    async def unload_adapter(self, name: str) -> Any:
        if name not in self.served:
            raise NotFoundError("It is not loaded.")
        self.served.remove(name)


async def test_a_judged_run_that_is_deleted_leaves_no_adapter(
    tmp_path: Path, train: WorkerTrain
) -> None:
    adapters, is_dropping = FakeAdapters(), asyncio.Event()
    unload = adapters.unload_adapter

    async def unload_slowly(name: str) -> Any:
        is_dropping.set()
        await asyncio.sleep(0.01)
        return await unload(name)

    async def judged(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        return [float(name.endswith("+"))] * len(examples)

    adapters.unload_adapter = unload_slowly
    service = TrainingService(tmp_path / "sessions", train, adapters=adapters, rewards=judged)
    service.start()
    session = await begin(service, measure=Measure.REWARD)
    service.run(session.config.id, 1000)
    await is_dropping.wait()
    assert len(adapters.served) == 2
    # The run is cancelled while it drops the copies of a step.
    await service.delete(session.config.id)
    assert adapters.served == set()
    await service.stop()


async def test_a_session_that_is_deleted_while_it_asks_leaves_no_adapter(
    tmp_path: Path, train: WorkerTrain
) -> None:
    adapters = FakeAdapters()
    service = TrainingService(tmp_path / "sessions", train, adapters=adapters)
    service.start()
    session = await begin(service, measure=None)
    asking = asyncio.ensure_future(service.ask(session.config.id))
    await adapters.has_begun.wait()
    await service.delete(session.config.id)
    await asyncio.gather(asking, return_exceptions=True)
    assert adapters.served == set()
    with pytest.raises(NotFoundError):
        await service.tell(session.config.id, lambda _: [1.0, 0.5])
    await service.stop()


@pytest.mark.parametrize("name", ["config.json", "state.json", "examples.jsonl"])
async def test_a_damaged_session_stops_no_other(opened: Open, tmp_path: Path, name: str) -> None:
    service = opened()
    damaged, session = await begin(service), await begin(service)
    await session.step()
    await service.stop()
    (tmp_path / "sessions" / damaged.config.id / name).write_bytes(b'{"x": 1}\n')
    again = opened()
    assert [each.config.id for each in again.all()] == [session.config.id]
    assert again.get(session.config.id).num_steps == 1
    assert (tmp_path / "sessions" / damaged.config.id / name).exists()


Judged = Callable[..., TrainingService]


@pytest.fixture
async def judged(tmp_path: Path, train: WorkerTrain) -> AsyncIterator[Judged]:
    """Open sessions whose copies are served by ``FakeAdapters``, and judged by a function."""
    services: list[TrainingService] = []

    def open_service(rewards: Any) -> TrainingService:
        service = TrainingService(
            tmp_path / "sessions", train, adapters=FakeAdapters(), rewards=rewards
        )
        services.append(service)
        service.start()
        return service

    yield open_service
    for service in services:
        await service.stop()


@pytest.mark.parametrize(
    ("failure", "num_tries"),
    [(RequestAbortedError("gone"), MAX_ABORTED), (RequestLostError("gone"), MAX_LOST)],
)
async def test_a_run_whose_samples_are_always_aborted_or_lost_is_paused(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, failure: Exception, num_tries: int
) -> None:
    monkeypatch.setattr("mlx_parallm.training.service.RETRY_S", 0.0)
    waits = [PausedError(), EngineDeadError("starting")] * 30
    outcomes = iter([*waits, None, *[failure] * 30])

    async def abort(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        outcome = None if name.endswith("-") else next(outcomes)
        if outcome is not None:
            raise outcome
        return [1.0] * len(examples)

    service = judged(abort)
    session = await begin(service, measure=Measure.REWARD)
    service.run(session.config.id, 10)
    async for _ in service.follow(session.config.id, 0):
        pass
    assert session.state.status is Status.PAUSED
    assert session.state.reason == f"The step was tried {num_tries} times: gone"
    assert session.num_steps == 1, "a pause of the server may take long"


async def test_a_pause_returns_once_a_judged_step_was_made(judged: Judged) -> None:
    asked_for, judge = asyncio.Event(), asyncio.Event()

    async def wait(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        asked_for.set()
        await judge.wait()
        return [float(name.endswith("+"))] * len(examples)

    service = judged(wait)
    session = await begin(service, measure=Measure.REWARD)
    service.run(session.config.id, 10)
    await asked_for.wait()
    pause = asyncio.ensure_future(service.pause(session.config.id))
    await asyncio.sleep(0)
    assert not pause.done()
    judge.set()
    await pause
    assert (session.num_steps, session.state.status) == (1, Status.PAUSED)


async def test_a_rollout_that_fails_ends_those_of_the_other_copies(judged: Judged) -> None:
    ended: list[str] = []

    async def fail_one(_: Any, name: str, examples: Sequence[Any], seed: int) -> list[float]:
        if name.endswith("-"):
            raise ConflictError("no reward")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)
        return []

    service = judged(fail_one)
    session = await begin(service, measure=Measure.REWARD)
    with pytest.raises(ConflictError, match="no reward"):
        await service.step(session.config.id, 1, None)
    assert [name[-1] for name in ended] == ["+"]
    assert session.state.reason == "no reward"


async def test_a_run_ends_although_the_disk_refuses_its_state(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    session = await begin(service)
    service.run(session.config.id, 3)

    def full(*_: Any) -> None:
        raise StorageError("full")

    monkeypatch.setattr(SessionFiles, "save_state", full)
    steps = [record.step async for record in service.follow(session.config.id, 0)]
    assert (steps, session.state.status) == ([1, 2, 3], Status.READY)


async def test_a_server_wakes_up_although_the_disk_refuses_states(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = opened()
    sessions = [await begin(service) for _ in range(2)]
    service.on_sleep()
    save = SessionFiles.save_state

    def refuse_one(files: SessionFiles, state: Any) -> None:
        if files.config.id == sessions[0].config.id:
            raise StorageError("full")
        save(files, state)

    monkeypatch.setattr(SessionFiles, "save_state", refuse_one)
    service.on_wake()
    assert [each.state.status for each in sessions] == [Status.PAUSED, Status.READY]
    assert sessions[0].state.reason == ASLEEP


async def test_sessions_that_are_created_at_once_are_bounded(opened: Open) -> None:
    service = opened(SessionLimits(max_sessions=2))
    made = await asyncio.gather(*(begin(service) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(each, ConflictError) for each in made) == 3
    assert len(service.all()) == 2


async def test_data_are_written_and_read_by_threads(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large data must not block the event loop, which sends the tokens of all streams."""
    threads: list[threading.Thread] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread())
            return original(*args)

        return call

    monkeypatch.setattr("mlx_parallm.training.session_store.encoded", noting(encoded))
    monkeypatch.setattr(SessionFiles, "examples", noting(SessionFiles.examples))
    await begin(opened())
    assert len(threads) == 2
    assert threading.main_thread() not in threads


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
