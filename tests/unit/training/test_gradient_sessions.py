"""Sessions that take gradients: their steps, and that what was lost is made again bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.training.records import Example, GradientRecord, SessionConfig, Status, StepRecord
from mlx_parallm.training.requests import TrainingRequest
from mlx_parallm.training.service import TrainingService
from mlx_parallm.training.session import Session
from mlx_parallm.training.session_files import STEPS
from mlx_parallm.training.settings import AS_SET, GradientSettings, StepChanges
from mlx_parallm.types.errors import (
    ConflictError,
    EngineDeadError,
    InvalidRequestError,
    RequestAbortedError,
    RequestLostError,
    SessionLostError,
    StorageError,
)
from mlx_parallm.types.gradients import LossKind, LossSpec, OptimiserKind, TrainingArrays
from mlx_parallm.worker.training_ops import (
    ApplyGradient,
    ForgetTraining,
    GradientForward,
    ReadTraining,
)
from tests.unit.training.worker_sessions import CONFIG, EXAMPLES, MODEL, WorkerTrain, config_of

SETTINGS = GradientSettings(
    optimizer=OptimiserKind.ADAMW,
    learning_rate=0.01,
    weight_decay=0.01,
    warmup_steps=2,
    decay_steps=40,
    checkpoint_every=4,
)
LOSS = LossSpec(kind=LossKind.CROSS_ENTROPY)
NUM_STEPS = 14

Open = Callable[[], TrainingService]


def settings_of(**changes: Any) -> Callable[[str, int], SessionConfig]:
    """Return what makes a session that takes gradients; two micro-batches make a step."""
    return config_of(
        estimator=replace(SETTINGS, **changes),
        loss=LOSS,
        max_tokens=12,
        trainable=replace(CONFIG.trainable, trains_first=True),
    )


@pytest.fixture
def train(tmp_path: Path) -> WorkerTrain:
    return WorkerTrain(tmp_path / "model")


@pytest.fixture
async def opened(tmp_path: Path, train: WorkerTrain) -> AsyncIterator[Open]:
    """Open the sessions of one folder, as a new process does."""
    services: list[TrainingService] = []

    def open_service() -> TrainingService:
        services.append(TrainingService(tmp_path / "sessions", train))
        services[-1].start()
        return services[-1]

    yield open_service
    for service in services:
        await service.stop()


async def begin(service: TrainingService, **changes: Any) -> Session:
    return await service.create(settings_of(**changes), EXAMPLES)


async def digest(session: Session) -> str:
    """Return the SHA-256 of the parameters and moments that a session has."""
    await session.open()
    (arrays,) = await session.ask(ReadTraining(model=MODEL, session=session.config.id))
    assert isinstance(arrays, TrainingArrays)
    parts = (arrays.theta, arrays.first_moment, arrays.second_moment)
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def numbers(session: Session) -> list[tuple[float, ...]]:
    """Return what an undisturbed session records too."""
    records = list(map(gradient, session.files.records()))
    return [(each.step, each.loss, each.norm, each.learning_rate, each.tokens) for each in records]


def gradient(record: StepRecord) -> GradientRecord:
    assert isinstance(record, GradientRecord)
    return record


@pytest.fixture
async def undisturbed(tmp_path: Path, train: WorkerTrain) -> tuple[str, list[tuple[float, ...]]]:
    service = TrainingService(tmp_path / "undisturbed", train)
    session = await begin(service)
    for _ in range(NUM_STEPS):
        await session.step()
    result = await digest(session), numbers(session)
    await service.stop()
    return result


async def test_steps_reduce_the_loss(opened: Open) -> None:
    session = await begin(opened(), decay_steps=None)
    before = await session.evaluate(EXAMPLES)
    records = [gradient((await session.step()).record) for _ in range(40)]
    after = await session.evaluate(EXAMPLES)
    assert after.loss < 0.5 * before.loss
    assert records[0].norm > 0
    assert [record.learning_rate for record in records[:3]] == [0.005, 0.01, 0.01]
    assert session.costs.hits == session.costs.lookups - len(EXAMPLES)


async def test_a_step_is_its_micro_batches_in_their_order(opened: Open, train: WorkerTrain) -> None:
    session = await begin(opened())
    await session.step()
    ops = train.requests[-1].ops
    forwards = [op for op in ops if isinstance(op, GradientForward)]
    assert len(forwards) > 1
    assert sum(len(op.inputs) for op in forwards) == CONFIG.batch_size
    assert {op.divisor for op in forwards} == {CONFIG.batch_size}
    assert isinstance(ops[-1], ApplyGradient)


@pytest.mark.parametrize(
    "moment", [6, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (0, 1, 4, 9, 13))]
)
async def test_a_killed_process_changes_no_bit(
    opened: Open, train: WorkerTrain, undisturbed: tuple[str, Any], moment: int
) -> None:
    service = opened()
    session = await begin(service)
    for _ in range(moment):
        await session.step()
    await service.stop()
    # The next process finds the folder as it is, and another engine.
    train.load(train.folder)
    again = opened().get(session.config.id)
    for _ in range(NUM_STEPS - moment):
        await again.step()
    assert (await digest(again), numbers(again)) == undisturbed
    assert again.state.notice is None


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
async def test_lost_engines_change_no_bit(
    train: WorkerTrain, undisturbed: tuple[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lose engines before, amid and after requests, also while steps are made again."""
    monkeypatch.setattr("mlx_parallm.training.service.RETRY_S", 0)
    monkeypatch.setattr("mlx_parallm.training.service.MAX_LOST", 1000)
    draw = random.Random(seed)
    dying = Dying(train, draw)
    service = TrainingService(train.folder.parent / "dying", dying)
    service.start()
    session = await begin(service)
    service.run(session.config.id, NUM_STEPS)
    dying.is_deadly = True
    records = [record async for record in service.follow(session.config.id, 0)]
    dying.is_deadly = False
    assert len(records) == NUM_STEPS
    assert dying.num_losses
    assert session.state.status is Status.READY
    assert (await digest(session), numbers(session)) == undisturbed
    await service.stop()


class Dying:
    """Runs ops on a worker that is lost now and then.

    Attributes:
        is_deadly: True if it loses them.
        num_losses: how often sessions were lost.
    """

    def __init__(self, train: WorkerTrain, draw: random.Random) -> None:
        self._train, self._draw = train, draw
        self.is_deadly, self.num_losses = False, 0

    async def __call__(self, request: TrainingRequest) -> tuple[Any, ...]:
        moment = self._draw.random() if self.is_deadly else 1.0
        if moment < 0.1:
            self._train.execute(ForgetTraining(model=MODEL))
            self.num_losses += 1
        elif moment < 0.15:
            self._train.load(self._train.folder)
            self.num_losses += 1
            raise EngineDeadError("It died.")
        elif moment < 0.25:
            # All ops but the last one are made; or all, and the answer is lost.
            count = len(request.ops) - self._draw.randrange(2)
            if count:
                await self._train(replace(request, ops=request.ops[:count]))
            self._train.load(self._train.folder)
            self.num_losses += 1
            raise RequestLostError("It died.")
        return await self._train(request)


@pytest.mark.parametrize(
    "failure",
    [
        SessionLostError("It is gone."),
        RequestLostError("It died."),
        RequestAbortedError("It was cancelled."),
    ],
)
async def test_a_step_was_made_although_its_checkpoint_could_not_be_read(
    train: WorkerTrain, undisturbed: tuple[str, Any], failure: Exception
) -> None:
    failures = [failure]

    async def read_once(request: TrainingRequest) -> tuple[Any, ...]:
        if failures and isinstance(request.ops[0], ReadTraining):
            train.load(train.folder)
            raise failures.pop()
        return await train(request)

    service = TrainingService(train.folder.parent / "unread", read_once)
    session = await begin(service)
    (*_, made) = await service.step(session.config.id, NUM_STEPS, None)
    assert made.record.step == NUM_STEPS
    # It was made again, from the records, for the step after it.
    assert session.kept == [4, 8, 12]
    assert (await digest(session), numbers(session)) == undisturbed
    await service.stop()


async def test_kept_steps_can_be_returned_to_and_others_cannot(opened: Open) -> None:
    session = await begin(opened(), checkpoint_every=2)
    digests: dict[int, str] = {0: (await session.weights()).digest}
    for _ in range(9):
        step = (await session.step()).record.step
        digests[step] = (await session.weights()).digest
    assert session.kept == [4, 6, 8]
    for step in (0, 4, 6, 8, 9):
        assert (await session.weights(step)).digest == digests[step]
    for step in (1, 2, 5, 10):
        with pytest.raises(InvalidRequestError, match=r"are not kept; .* 0, 4, 6, 8, 9 are"):
            await session.weights(step)
    # What is read beside changes nothing.
    assert (await session.weights()).digest == digests[9]
    assert len(list(session.files.folder.glob("checkpoint-*"))) == 3
    assert session.files.num_bytes > sum(session.files.checkpoint_bytes.values())


async def test_the_end_of_a_run_is_on_disk(opened: Open, train: WorkerTrain) -> None:
    service = opened()
    session = await begin(service, checkpoint_every=None)
    service.run(session.config.id, 3)
    _ = [record async for record in service.follow(session.config.id, 0)]
    await service.pause(session.config.id)
    assert session.kept == [3]


async def test_a_step_of_given_rows_is_kept_at_once(opened: Open, train: WorkerTrain) -> None:
    service = opened()
    session = await begin(service, checkpoint_every=None)
    await session.step()
    record = gradient((await session.step(EXAMPLES[:3], StepChanges(learning_rate=0.5))).record)
    assert (record.is_given, record.learning_rate) == (True, 0.5)
    await session.step()
    before = await digest(session)
    assert session.kept == [2]
    await service.stop()
    train.load(train.folder)
    again = opened().get(session.config.id)
    assert await digest(again) == before


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_step_that_the_disk_refuses_was_not_made(
    opened: Open, is_given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await begin(opened())
    await session.step()
    before = await digest(session)

    def full(*args: Any) -> None:
        raise StorageError("The data folder cannot be used: No space left on device.")

    with monkeypatch.context() as patched:
        patched.setattr(session.files, "append", full)
        with pytest.raises(StorageError):
            await session.step(EXAMPLES[:4] if is_given else None)
    assert session.num_steps == 1
    assert await digest(session) == before
    assert session.kept == []


async def test_a_damaged_checkpoint_is_made_again(
    opened: Open, train: WorkerTrain, undisturbed: tuple[str, Any]
) -> None:
    service = opened()
    session = await begin(service)
    for _ in range(NUM_STEPS):
        await session.step()
    await service.stop()
    last = max(session.files.folder.glob("checkpoint-*"))
    last.write_bytes(last.read_bytes()[:100])
    train.load(train.folder)
    again = opened().get(session.config.id)
    assert (await digest(again), numbers(again)) == undisturbed


async def test_a_given_step_without_its_checkpoint_is_refused(
    opened: Open, train: WorkerTrain
) -> None:
    service = opened()
    session = await begin(service, checkpoint_every=None)
    await session.step(EXAMPLES[:4])
    await service.stop()
    (checkpoint,) = session.files.folder.glob("checkpoint-*")
    checkpoint.unlink()
    train.load(train.folder)
    with pytest.raises(ConflictError, match="cannot be made again"):
        await opened().get(session.config.id).step()


async def test_a_checkpoint_without_its_record_was_never_made(
    opened: Open, undisturbed: tuple[str, Any]
) -> None:
    service = opened()
    session = await begin(service)
    for _ in range(8):
        await session.step()
    await service.stop()
    lines = (session.files.folder / STEPS).read_bytes().splitlines(keepends=True)
    (session.files.folder / STEPS).write_bytes(b"".join(lines[:6]))
    (session.files.folder / "checkpoint-00000009.part").write_bytes(b"half")
    again = opened().get(session.config.id)
    assert again.kept == [4]
    assert not list(session.files.folder.glob("*.part"))
    for _ in range(NUM_STEPS - 6):
        await again.step()
    assert (await digest(again), numbers(again)) == undisturbed


async def test_other_arithmetic_is_said(opened: Open, train: WorkerTrain) -> None:
    service = opened()
    session = await begin(service)
    await session.step()
    await service.stop()
    path = session.files.folder / STEPS
    path.write_text(path.read_text().replace("OpenBLAS", "OtherBLAS").replace("MLX ", "MLX 9"))
    train.load(train.folder)
    again = opened().get(session.config.id)
    await again.step()
    assert again.state.notice is not None
    assert again.state.notice.startswith("Steps from 1 on were made again")


@pytest.mark.parametrize("field", ["seed", "epsilon"])
async def test_settings_of_perturbations_are_refused(opened: Open, field: str) -> None:
    session = await begin(opened())
    with pytest.raises(InvalidRequestError, match=f"{field} is one of perturbations"):
        await session.step(changes=StepChanges(**{field: 1}))


#: ``OWN_FAULTS``: steps that fail by what their request says; the field, if it is one alone.
OWN_FAULTS: list[tuple[Sequence[Example] | None, StepChanges, str | None]] = [
    (None, AS_SET, "batch"),
    (EXAMPLES[:4], StepChanges(seed=1), "seed"),
    (EXAMPLES[:4], StepChanges(epsilon=0.1), "epsilon"),
    (EXAMPLES[:4], StepChanges(learning_rate=101.0), "learning_rate"),
    (EXAMPLES[:4], StepChanges(learning_rate=1e300), None),
]


@pytest.mark.parametrize(("examples", "changes", "param"), OWN_FAULTS)
async def test_the_fault_of_one_request_pauses_no_session(
    opened: Open, examples: Sequence[Example] | None, changes: StepChanges, param: str | None
) -> None:
    service, decay = opened(), 0.01 if param is not None else 0.0
    session = await service.create(settings_of(weight_decay=decay), [])
    with pytest.raises(InvalidRequestError) as refused:
        await service.step(session.config.id, 1, examples, changes)
    assert refused.value.param == param
    assert isinstance(refused.value, ConflictError) == (param is None)
    assert (session.state.status, session.num_steps) == (Status.READY, 0)
    await service.step(session.config.id, 1, EXAMPLES[:4])
    assert session.num_steps == 1


async def test_there_is_no_log_and_no_copy(opened: Open) -> None:
    session = await begin(opened())
    with pytest.raises(ConflictError, match="has no log"):
        session.log()
    with pytest.raises(ConflictError, match="no perturbed copies"):
        await session.perturbed()
    assert session.pending == []
