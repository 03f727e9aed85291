"""The client of ``/v1/training`` and ``/v1/mezo``: training sessions inside the server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import zipfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import quote

from mlx_parallm.client.errors import (
    RequestFailedError,
    ServerUnreachableError,
    UnexpectedAnswerError,
)
from mlx_parallm.client.results import AdapterInfo, adapter_of, expected
from mlx_parallm.client.training import (
    Checkpoint,
    Evaluation,
    GradientStep,
    PerturbedAdapter,
    TrainingSession,
    TrainingStep,
    checkpoint_of,
    evaluation_of,
    gradient_step_of,
    perturbed_adapter_of,
    session_of,
    step_of,
)
from mlx_parallm.client.transport import Transport

StepT = TypeVar("StepT", TrainingStep, GradientStep)

_RETRY_S = 0.5
# _RETURNING: statuses of servers that start or stop, and of proxies before them.
_RETURNING = frozenset({502, 503, 504})
#: ``Row``: ``{"text": …, "label": …}``, or ``token_ids`` or ``messages`` in place of the text.
Row = Mapping[str, Any]
#: ``Data``: rows, or the id of an uploaded file of purpose fine-tune.
Data = Sequence[Row] | str


def token_averaged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return samples as rows whose loss is the mean over all their tokens.

    A session averages rows, so that each token of a row counts rows / tokens.
    """
    share = len(rows) / sum(len(row["completion_ids"]) for row in rows)
    return [{**row, "weights": [share] * len(row["completion_ids"])} for row in rows]


class SessionOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/training/sessions``; the API reference describes them."""

    adapter: str
    trainable: Mapping[str, Any]
    estimator: Mapping[str, Any]
    validation: Data
    eval_every: int
    batch_size: int
    batches: Literal["random", "by_length"]
    mode: Literal["paired", "naive"]
    max_batch_tokens: int
    seed: int


class PublishOptions(TypedDict, total=False):
    """Options of ``SessionsClient.publish``.

    Attributes:
        version: the label of its answers; by default the server counts versions.
        expected_version: the adapter is refused unless the current version is this one.
        step: the adapter as it was after so many steps; default: as it is.
    """

    version: str
    expected_version: str
    step: int


class SessionsClient(Generic[StepT]):
    """The training sessions of a server, whatever their estimator is."""

    def __init__(
        self, transport: Transport, prefix: str, step_of: Callable[[Mapping[str, Any]], StepT]
    ) -> None:
        """Prepare.

        Args:
            transport: asks the server.
            prefix: of the paths of the routes.
            step_of: returns a step in an answer.
        """
        self._transport = transport
        self._prefix = prefix
        self._step_of = step_of

    async def create(
        self,
        model: str,
        objective: Mapping[str, Any],
        data: Data | None = None,
        **options: Unpack[SessionOptions],
    ) -> TrainingSession:
        """Begin a session, whose adapter changes nothing yet.

        Args:
            model: the name of a masked language model, a classifier or a model that generates.
            objective: of the kind "label_words", "labels", "candidates", "completion", "pairs",
                "policy", "reward", or "caller", whose losses ``ask`` and ``tell`` exchange; see
                docs/training.md.
            data: rows, or the id of a file; None for the kind caller, and for policy if each step
                brings its rows.
            **options: see ``SessionOptions``.
        """
        body = _present({"model": model, "objective": objective, "data": data, **options})
        return await self._session("POST", self._path(), json=body)

    async def sessions(self) -> list[TrainingSession]:
        """Return all sessions, oldest first."""
        answer = await self._transport.ask("GET", self._path())
        with expected("The list of sessions"):
            return [session_of(item) for item in answer["data"]]

    async def get(self, session_id: str) -> TrainingSession:
        """Return a session."""
        return await self._session("GET", self._path(session_id))

    async def delete(self, session_id: str) -> None:
        """Delete a session and its log; adapters that it has published stay."""
        await self._transport.ask("DELETE", self._path(session_id))

    async def step(
        self,
        session_id: str,
        steps: int = 1,
        *,
        batch: Sequence[Row] | None = None,
        seed: int | None = None,
        epsilon: float | None = None,
        learning_rate: float | None = None,
        return_losses: bool = False,
    ) -> list[StepT]:
        """Make steps and return them once all are made.

        Args:
            session_id: the session, which must be ready.
            steps: how many.
            batch: rows in place of the session's data.
            seed: draws the directions of a single step.
            epsilon: the size of the perturbation, in place of the session's.
            learning_rate: in place of the session's.
            return_losses: True to return the loss of each example too.
        """
        changes = {"seed": seed, "epsilon": epsilon, "learning_rate": learning_rate}
        body = _present(
            {"steps": steps, "batch": batch, **changes, "return_losses": return_losses or None}
        )
        return await self._steps(self._path(session_id, "step"), body)

    async def train_step(
        self,
        session_id: str,
        steps: int = 1,
        *,
        batch: Sequence[Row] | None = None,
        seed: int | None = None,
        epsilon: float | None = None,
        learning_rate: float | None = None,
        return_losses: bool = False,
    ) -> list[StepT]:
        """Make steps by ``POST …/train_step``, which does the same as ``step``."""
        body = _present(
            {
                "session_id": session_id,
                "steps": steps,
                "batch": batch,
                "seed": seed,
                "epsilon": epsilon,
                "learning_rate": learning_rate,
                "return_losses": return_losses or None,
            }
        )
        return await self._steps(f"{self._prefix}/train_step", body)

    async def run(self, session_id: str, steps: int) -> TrainingSession:
        """Begin to make steps in the background; ``events`` yields them."""
        return await self._session("POST", self._path(session_id, "run"), json={"steps": steps})

    async def events(
        self, session_id: str, *, after: int = 0, reconnect_s: float = 30.0
    ) -> AsyncGenerator[StepT]:
        """Yield each step after a step, until no more are made in the background.

        If the connection breaks, or the server restarts, the iterator connects again and
        continues after the last step, so that none is missed and none comes twice.

        Args:
            session_id: the session.
            after: the number of the last step that is known already.
            reconnect_s: seconds from a break, with no step since, until it gives up; 0: at once.

        Raises:
            ServerUnreachableError: the server was not there for so long.
        """
        loop = asyncio.get_running_loop()
        lost_s: float | None = None
        while True:
            try:
                async with contextlib.aclosing(self._steps_after(session_id, after)) as steps:
                    async for step in steps:
                        after = step.step
                        lost_s = None
                        yield step
            except (ServerUnreachableError, RequestFailedError) as error:
                lost_s = loop.time() if lost_s is None else lost_s
                if not _may_return(error) or loop.time() - lost_s >= reconnect_s:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def pause(self, session_id: str) -> TrainingSession:
        """Make no more steps until ``resume``."""
        return await self._session("POST", self._path(session_id, "pause"))

    async def resume(self, session_id: str) -> TrainingSession:
        """Continue after a pause, whatever its reason."""
        return await self._session("POST", self._path(session_id, "resume"))

    async def evaluate(self, session_id: str, data: Data) -> Evaluation:
        """Return loss, accuracy and macro F1 of the adapter as it is."""
        path = self._path(session_id, "evaluate")
        answer = await self._transport.ask("POST", path, json={"data": data})
        with expected("The evaluation"):
            return evaluation_of(answer)

    async def checkpoint(self, session_id: str) -> Checkpoint:
        """Return the number of steps, to which ``publish`` and ``adapter`` can return."""
        answer = await self._transport.ask("POST", self._path(session_id, "checkpoint"))
        with expected("The checkpoint"):
            return checkpoint_of(answer)

    async def publish(
        self, session_id: str, name: str, **options: Unpack[PublishOptions]
    ) -> AdapterInfo:
        """Serve the adapter under a name from the next request on.

        Raises:
            RequestFailedError: the name is taken, or the current version is not the expected one
                (status 412).
        """
        body = {"name": name, **options}
        answer = await self._transport.ask("POST", self._path(session_id, "publish"), json=body)
        with expected("The adapter"):
            return adapter_of(answer)

    async def adapter(
        self,
        session_id: str,
        *,
        form: Literal["peft", "mlx"] = "peft",
        step: int | None = None,
    ) -> bytes:
        """Return the adapter as a zip archive.

        Args:
            session_id: the session.
            form: whose names and shapes the files have, PEFT's or mlx-lm's.
            step: the adapter as it was after so many steps; default: as it is.
        """
        query = _present({"format": form, "step": step})
        return await self._transport.content("GET", self._path(session_id, "adapter"), params=query)

    async def save_adapter(
        self,
        session_id: str,
        folder: str | Path,
        *,
        form: Literal["peft", "mlx"] = "peft",
        step: int | None = None,
    ) -> list[Path]:
        """Write the adapter's files into a folder, which is created; return their paths.

        See ``adapter``.
        """
        archive = await self.adapter(session_id, form=form, step=step)
        return await asyncio.to_thread(_unpack, archive, Path(folder))

    async def _session(self, method: str, path: str, **request: Any) -> TrainingSession:
        answer = await self._transport.ask(method, path, **request)
        with expected("The session"):
            return session_of(answer)

    async def _steps(self, path: str, body: Mapping[str, Any]) -> list[StepT]:
        answer = await self._transport.ask("POST", path, json=body)
        with expected("The steps"):
            return [self._step_of(item) for item in answer["data"]]

    async def _steps_after(self, session_id: str, after: int) -> AsyncGenerator[StepT]:
        path = self._path(session_id, "events")
        stream = self._transport.whole_stream(path, {"after": after})
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                with expected("A step"):
                    step = self._step_of(event)
                yield step

    def _path(self, *parts: str) -> str:
        """Return the path of sessions, or of a session and what is below it."""
        return "/".join((self._prefix, "sessions", *(quote(part, safe="") for part in parts)))


class MezoClient(SessionsClient[TrainingStep]):
    """The training sessions of a server: ``RLClient.mezo``. All methods need the admin key.

    Example:
        >>> async with RLClient("http://127.0.0.1:8000") as client:
        ...     objective = {"kind": "label_words", "label_words": {"good": "cat", "bad": "dog"}}
        ...     rows = [{"text": "a joyful film", "label": "good"}]
        ...     session = await client.mezo.create("demo:mlm", objective, rows, batch_size=1)
        ...     await client.mezo.run(session.id, 100)
        ...     async for step in client.mezo.events(session.id):
        ...         print(step.step, step.loss_plus)
        ...     await client.mezo.publish(session.id, "films")
    """

    def __init__(self, transport: Transport) -> None:
        """Prepare; see ``SessionsClient``."""
        super().__init__(transport, "/v1/mezo", step_of)

    async def ask(self, session_id: str) -> list[PerturbedAdapter]:
        """Return the perturbed adapters of the next step, which are served until ``tell``.

        Asking again returns the same ones, also after a restart of the server.

        Example:
            >>> adapters = await client.mezo.ask(session.id)
            >>> losses = {adapter.name: await play(adapter.name) for adapter in adapters}
            >>> step = await client.mezo.tell(session.id, losses)
        """
        answer = await self._transport.ask("POST", self._path(session_id, "ask"))
        with expected("The adapters"):
            return [perturbed_adapter_of(item) for item in answer["data"]]

    async def tell(
        self, session_id: str, losses: Mapping[str, float] | Sequence[float]
    ) -> TrainingStep:
        """Make the step from the losses of the adapters of ``ask``, and return it.

        Args:
            session_id: the session.
            losses: by the adapters' names, or in their order.
        """
        values = dict(losses) if isinstance(losses, Mapping) else list(losses)
        (step,) = await self._steps(self._path(session_id, "tell"), {"losses": values})
        return step

    async def log(self, session_id: str) -> bytes:
        """Return the log: for each step its seed, uint64, and its coefficients, float32."""
        return await self._transport.content("GET", self._path(session_id, "log"))


class TrainingClient(SessionsClient[GradientStep]):
    """The sessions that take gradients: ``RLClient.training``. All methods need the admin key.

    Example:
        >>> async with RLClient("http://127.0.0.1:8000") as client:
        ...     session = await client.training.create(
        ...         "demo:mlm", objective, rows, batch_size=1, estimator={"kind": "gradient"}
        ...     )
        ...     await client.training.run(session.id, 50)
        ...     async for step in client.training.events(session.id):
        ...         print(step.step, step.loss, step.norm)
    """

    def __init__(self, transport: Transport) -> None:
        """Prepare; see ``SessionsClient``."""
        super().__init__(transport, "/v1/training", gradient_step_of)


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _may_return(error: ServerUnreachableError | RequestFailedError) -> bool:
    """True if the server may answer soon."""
    return isinstance(error, ServerUnreachableError) or error.status in _RETURNING


def _unpack(archive: bytes, folder: Path) -> list[Path]:
    """Write the files of a zip archive into a folder.

    Raises:
        UnexpectedAnswerError: it is no zip archive, or a file of it would lie elsewhere.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            contents = {name: files.read(name) for name in files.namelist()}
    except zipfile.BadZipFile as error:
        raise UnexpectedAnswerError(f"The adapter is no zip archive: {error}") from None
    for name in contents:
        if name in ("", "..") or PurePosixPath(name).name != name or "\\" in name:
            raise UnexpectedAnswerError(f"The adapter has a file of the name {name[:100]!r}.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]
