"""A training session of ``LLM``: the server's session, one call at a time, without HTTP."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self, TypeVar

from mlx_parallm.adapters.writing import Format, adapter_files
from mlx_parallm.api.http.uploads import validated
from mlx_parallm.api.mezo.request import (
    DATA,
    NOT_TRAINED,
    OBJECTIVES,
    VALIDATION,
    check_size,
    check_template,
    config_maker,
    examples_of,
    parsed_rows,
    task_of,
    with_score,
)
from mlx_parallm.api.mezo.rows import AnyRow
from mlx_parallm.api.mezo.schema import (
    Caller,
    CreateSession,
    Evaluate,
    MakeSteps,
    Measured,
    OfPrompts,
    Pairs,
    Policy,
    Reward,
)
from mlx_parallm.api.mezo.warm_start import warm_start
from mlx_parallm.api.turns.prelude import refuse_sources
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.pooling.client import check_tasks
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.storage import disk
from mlx_parallm.storage.ids import IdMaker
from mlx_parallm.training.objectives import Scores
from mlx_parallm.training.records import Costs, Example, SessionState, StepRecord
from mlx_parallm.training.requests import TrainingOp, TrainingRequest
from mlx_parallm.training.service import Train
from mlx_parallm.training.session import Session
from mlx_parallm.training.session_files import CONFIG, SessionFiles, encoded
from mlx_parallm.training.session_store import ID_PREFIX
from mlx_parallm.training.settings import StepChanges
from mlx_parallm.types.errors import InvalidRequestError, ParallmError
from mlx_parallm.types.training import TrainableInfo

T = TypeVar("T")

#: ``Rows``: rows as the routes take them, or a file with one as JSON in each line.
Rows = Sequence[Mapping[str, Any]] | str | Path


class Folder:
    """The folder of a session, which is deleted with it if it is temporary.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: str | Path | None) -> None:
        """None makes a temporary folder."""
        self._temporary = TemporaryDirectory(prefix=ID_PREFIX) if path is None else None
        self.path = Path(self._temporary.name if self._temporary else path or "")

    def release(self) -> None:
        """Delete it if it is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()


class OfflineSession:
    """A training session of an ``LLM``; see docs/training.md.

    Its folder has its settings, data and log.
    """

    def __init__(
        self, engine: Callable[[], OfflineEngine], folder: Folder, cache_bytes: int
    ) -> None:
        """Open the session of a folder; see ``OpenTraining`` for ``cache_bytes``.

        ``engine`` returns the engine of the ``LLM``, or raises if it is closed.
        """
        self._engine = engine
        self._folder = folder
        self._numbers = count()
        self._train: Train | None = None
        self._is_closed = False
        self._lock = disk.FolderLock(folder.path)
        try:
            self._session = Session(SessionFiles.open(folder.path), self._send, cache_bytes)
        except BaseException:
            self._lock.release()
            raise

    @property
    def path(self) -> Path:
        """Its folder; a temporary one is deleted by ``close``."""
        return self._folder.path

    @property
    def num_steps(self) -> int:
        """Number of steps made."""
        return self._session.num_steps

    @property
    def best(self) -> int | None:
        """The step with the least validation loss; None if none was evaluated."""
        return self._session.best

    @property
    def info(self) -> TrainableInfo:
        """Facts about its adapter."""
        return self._session.info or self._do(self._session.open)

    @property
    def costs(self) -> Costs:
        """The costs of all steps together."""
        return self._session.costs

    def step(
        self,
        batch: Sequence[Mapping[str, Any]] | None = None,
        *,
        seed: int | None = None,
        epsilon: float | None = None,
        learning_rate: float | None = None,
    ) -> StepRecord:
        """Make a step, on the next batch or on these rows.

        Args:
            batch: rows; None: the next batch of the data.
            seed: draws its directions; None: the session's seed does.
            epsilon: the size of its perturbation; None: the session's.
            learning_rate: of this step; None: the session's.

        Raises:
            InvalidRequestError: the rows cannot be read.
            ConflictError: a loss is not finite, so that no step was made.
        """
        fields = {"seed": seed, "epsilon": epsilon, "learning_rate": learning_rate}
        body = validated(MakeSteps, {**fields, "batch": None if batch is None else list(batch)})
        rows, changes = body.batch, StepChanges(body.seed, body.epsilon, body.learning_rate)

        async def work() -> StepRecord:
            examples = None if rows is None else await self._examples(rows, "batch")
            return (await self._session.step(examples, changes)).record

        return self._do(work)

    def run(
        self, steps: int, on_step: Callable[[StepRecord], None] | None = None
    ) -> list[StepRecord]:
        """Make steps; ``on_step`` is called with each, on a thread of its own."""

        async def work() -> list[StepRecord]:
            records: list[StepRecord] = []
            # The end of a run is evaluated.
            self._session.save(until=self._session.num_steps + steps)
            for _ in range(steps):
                records.append((await self._session.step()).record)
                if on_step is not None:
                    on_step(records[-1])
            await self._session.keep()
            return records

        return self._do(work)

    def evaluate(self, data: Rows) -> Scores:
        """Return loss, accuracy and F1 of the adapter as it is."""
        rows = _rows(data)

        async def work() -> Scores:
            return await self._session.evaluate(await self._examples(rows, "data"))

        return self._do(work)

    def records(self, after: int = 0) -> Sequence[StepRecord]:
        """Return the steps after this one."""
        return self._session.files.records(after)

    def log(self) -> bytes:
        """Return the log: for each step its seed, uint64, and its coefficients, float32."""
        return self._session.log()

    def publish(
        self, name: str, *, version: str | None = None, step: int | None = None
    ) -> AdapterInfo:
        """Serve the adapter under a name, as ``LLM.load_adapter`` does.

        Args:
            name: the name for ``adapter`` of the methods of ``LLM``.
            version: a label; None counts from 1.
            step: as it was after so many steps; None: as it is.
        """
        engine = self._engine()
        if name in engine.model.names:
            raise InvalidRequestError(f"{name!r} is the name of the model.", param="name")
        weights = self._do(lambda: self._session.weights(step))
        upload = AdapterUpload(name=name, weights=weights, version=version, replaces=True)
        return engine.call(lambda client: client.control.load_adapter(upload))

    def save(self, folder: str | Path, *, format: Format = "peft", step: int | None = None) -> Path:  # noqa: A002 - the name in the route's query
        """Write the adapter as PEFT or mlx-lm reads it; return its folder."""
        of_checkpoint = format == "peft"
        weights = self._do(lambda: self._session.weights(step, of_checkpoint=of_checkpoint))
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, content in adapter_files(weights, format).items():
            (target / name).write_bytes(content)
        return target

    def close(self) -> None:
        """Free its memory. A folder of the caller keeps the session, for a later ``LLM.mezo``."""
        if self._is_closed:
            return
        # An LLM that is closed has nothing of the session.
        with contextlib.suppress(ParallmError):
            self._do(self._session.keep)
            self._do(self._session.close)
        self._is_closed = True
        self._session.files.close()
        self._lock.release()
        self._folder.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def _examples(self, rows: Sequence[AnyRow], param: str) -> list[Example]:
        objective = OBJECTIVES.validate_python(self._session.config.objective)
        assert not isinstance(objective, Caller | Reward), "these need a server"
        makes_head = self._session.config.trainable.makes_head
        model = model_for(self._engine(), objective, makes_head=makes_head)
        return await examples_of(rows, objective, model, param)

    async def _send(self, model: str, session: str, ops: tuple[TrainingOp, ...]) -> tuple[Any, ...]:
        assert self._train is not None, "a call is being made"
        request_id = f"{session}-{next(self._numbers)}"
        return await self._train(
            TrainingRequest(request_id=request_id, model=model, session=session, ops=ops)
        )

    def _do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._is_closed:
            raise InvalidRequestError("This training session is closed.")

        async def run(client: AsyncEngine) -> T:
            self._train = client.train
            return await work()

        return self._engine().call(run)


def open_session(
    engine: Callable[[], OfflineEngine],
    path: str | Path | None,
    fields: Mapping[str, Any],
    *,
    cache_bytes: int,
    max_rank: int,
) -> OfflineSession:
    """Return a new session, or the one that a folder has.

    Args:
        engine: see ``OfflineSession``.
        path: the folder; None makes a temporary one.
        fields: those of the route that makes sessions, but for the model; none for a session that
            the folder has.
        cache_bytes: see ``OpenTraining``.
        max_rank: the largest rank of an adapter.

    Raises:
        InvalidRequestError: a field is wrong, or the folder has a session already.
        StorageInUseError: another process uses the folder.
    """
    folder = Folder(path)
    is_new = not (folder.path / CONFIG).is_file()
    if is_new:
        try:
            _create(engine(), folder.path, fields, max_rank)
        except BaseException:
            folder.release()
            raise
    elif fields:
        raise InvalidRequestError(
            f"{path} has a session already; name the folder alone to go on with it.", param="path"
        )
    session = OfflineSession(engine, folder, cache_bytes)
    try:
        _ = session.info
    except BaseException:
        session.close()
        if is_new:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return session


def _create(engine: OfflineEngine, folder: Path, fields: Mapping[str, Any], max_rank: int) -> None:
    """Write the settings and the data of a new session."""
    for name in (DATA, VALIDATION):
        data = fields.get(name)
        if isinstance(data, str | Path):
            fields = {**fields, name: _rows_of_file(Path(data), name)}
    body = validated(CreateSession, {**fields, "model": engine.model.names[0]})
    assert not isinstance(body.data, str), "a file was read"
    assert not isinstance(body.validation, str), "a file was read"
    rows, judged, objective = body.data, body.validation, body.objective
    if isinstance(objective, Caller | Reward):
        raise InvalidRequestError(
            f"The objective {objective.kind} needs a server.", param="objective"
        )
    if rows is None:
        if not isinstance(objective, Policy):
            raise InvalidRequestError("data is missing.", param="data")
        rows = []
    model = model_for(engine, objective, makes_head=body.makes_head)
    check_template(objective, model)
    settings, adapters = body, engine.client.control.adapters()
    body, start = engine.call(
        lambda client: warm_start(settings, model.names[0], adapters, client.train)
    )
    check_size(body, len(rows), max_rank)
    examples = engine.call(lambda _: examples_of(rows, objective, model))
    validation: list[Example] = []
    if judged is not None:
        validation = engine.call(lambda _: examples_of(judged, objective, model, VALIDATION))
    has_score = isinstance(model, PoolingModel)
    make = config_maker(body, model.names[0], start, has_score=has_score)
    config = make(IdMaker().make(ID_PREFIX), int(time.time()))
    data = encoded(examples), start, encoded(validation)
    SessionFiles.create(folder, config, SessionState(), *data).close()


def model_for(
    engine: OfflineEngine, objective: Measured, *, makes_head: bool
) -> PoolingModel | GenerationModel:
    """Return the model of a session; raise InvalidRequestError if it cannot do what is learnt.

    ``makes_head``: see ``TrainableSpec``.
    """
    model = engine.model
    if isinstance(objective, Pairs) and isinstance(model, PoolingModel):
        return with_score(model, makes_head=makes_head)
    if isinstance(objective, OfPrompts | Pairs | Policy):
        if not isinstance(model, GenerationModel):
            raise InvalidRequestError(f"{model.names[0]} cannot generate.", param="objective")
        return refuse_sources(model, model.names[0], NOT_TRAINED)
    task = task_of(objective)
    if not isinstance(model, PoolingModel):
        raise InvalidRequestError(f"{model.names[0]} cannot {task}.", param="objective")
    return check_tasks(model, model.names[0], (task,))


def _rows(data: Rows) -> Sequence[AnyRow]:
    """Return the rows of an evaluation."""
    if isinstance(data, str | Path):
        return _rows_of_file(Path(data))
    rows = validated(Evaluate, {"data": list(data)}).data
    assert not isinstance(rows, str), "it is a list"
    return rows


def _rows_of_file(path: Path, param: str = DATA) -> list[AnyRow]:
    try:
        return parsed_rows(path, param)
    except OSError as problem:
        raise InvalidRequestError(
            f"{path} cannot be read: {problem.strerror}.", param=param
        ) from None
