"""The batches of a server: it runs one at a time per owner, and all owners concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.batch_jobs.files import FileLimits, FileStore
from mlx_parallm.batch_jobs.records import (
    BATCH_PREFIX,
    COMPLETION_WINDOW_S,
    BatchRecord,
    State,
)
from mlx_parallm.batch_jobs.run import BatchRun, RunContext, Send, end, growing_delay
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.batch_jobs.uploads import UploadStore
from mlx_parallm.fairness import SharedBudget
from mlx_parallm.storage.disk import finished, in_thread
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    ShuttingDownError,
    StorageError,
)

logger = logging.getLogger(__name__)
# RETRY_S: seconds until a folder in use by another process, or a full disk, is tried again.
RETRY_S = 5.0
MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of the service.

    Attributes:
        files: limits of stored files.
        max_line_bytes: most bytes of a line of a batch file.
        max_samples: most samples of all batches in the engine at once.
    """

    files: FileLimits
    max_line_bytes: int
    max_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrder:
    """A client's settings of a new batch.

    Attributes:
        input_file_id: the file of its lines.
        endpoint: the path of every line.
        prefix: of its id.
        total: the number of its lines, if that is known before the file is checked.
        metadata: kept with the batch.
        output_expires_after_s: when its output expires; None: never.
    """

    input_file_id: str
    endpoint: str
    prefix: str = BATCH_PREFIX
    total: int = 0
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None


class BatchService:
    """The files and batches of a folder. Its methods belong to one event loop.

    After ``stop``, those that need the folder raise ShuttingDownError.
    """

    def __init__(
        self,
        folder: Path,
        limits: BatchLimits,
        send: Send,
        *,
        now: Callable[[], float] = time.time,
        delay: Callable[[int], float] = growing_delay,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._send = send
        self._now = now
        self._delay = delay
        self._places = SharedBudget(limits.max_samples)
        # The opening of the folder, which all callers await; None: not begun, or it failed.
        self._opening: asyncio.Task[Storage] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}

    async def files(self) -> FileStore:
        """Return the stored files; the first call creates the folder if needed.

        Raises:
            StorageInUseError: another process uses the folder.
            StorageError: the folder cannot be used.
        """
        return (await self._storage()).files

    async def uploads(self) -> UploadStore:
        """Return the uploads in parts; see ``files``."""
        return (await self._storage()).uploads

    def start(self) -> None:
        """Lock the folder, creating it if needed, and resume batches of an earlier process.

        The folder is locked at start and not by the first request, so that the log shows at once
        whether another server uses it.
        """
        self._starting = asyncio.ensure_future(self._open_when_free())

    async def stop(self) -> None:
        """End all work; another process may resume it from the disk."""
        self._is_stopping = True
        if self._starting is not None:
            await end(self._starting)
        opening, self._opening = self._opening, None
        outcomes = await asyncio.gather(*([opening] if opening else []), return_exceptions=True)
        await end(*self._drivers.values())
        self._runs.clear()
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                await in_thread(outcome.close)

    async def create(self, owner: str, order: BatchOrder) -> BatchRecord:
        """Begin a batch.

        Raises:
            InvalidRequestError: the owner has no such file, or its purpose is not "batch".
            OverloadedError: too many of the owner's batches have not ended.
            StorageError: the disk refused it.
        """
        storage = await self._storage()
        await _check_input(storage.files, order.input_file_id, owner)
        created_at = int(self._now())
        record = BatchRecord(
            id=storage.batches.new_id(order.prefix),
            owner=owner,
            endpoint=order.endpoint,
            input_file_id=order.input_file_id,
            total=order.total,
            created_at=created_at,
            expires_at=created_at + COMPLETION_WINDOW_S,
            metadata=order.metadata,
            output_expires_after_s=order.output_expires_after_s,
        )
        # A client that goes meanwhile does not leave a batch that nothing runs.
        await finished(self._begin(storage, record))
        return record

    async def get(self, batch_id: str, owner: str, prefix: str = BATCH_PREFIX) -> BatchRecord:
        """Return a batch of this owner, with current counts.

        Raises:
            NotFoundError: the owner has no batch of this id.
        """
        return await (await self._storage()).batches.get(batch_id, owner, prefix)

    async def list(
        self,
        owner: str,
        *,
        prefix: str = BATCH_PREFIX,
        after: str | None = None,
        before: str | None = None,
        limit: int,
    ) -> tuple[list[BatchRecord], bool]:
        """Return a page of an owner's batches; see ``BatchStore.list``."""
        batches = (await self._storage()).batches
        return await batches.list(owner, prefix=prefix, after=after, before=before, limit=limit)

    async def delete(self, batch_id: str, owner: str, prefix: str = BATCH_PREFIX) -> None:
        """Delete a batch that has ended, with its files.

        Raises:
            NotFoundError: the owner has no batch of this id.
            InvalidRequestError: it has not ended.
        """
        storage = await self._storage()
        record = await storage.batches.get(batch_id, owner, prefix)
        if not record.has_ended:
            raise InvalidRequestError(
                f"A batch that is {record.status} cannot be deleted; cancel it first.",
                param="batch_id",
            )
        for file_id in (record.output_file_id, record.error_file_id, record.input_file_id):
            with contextlib.suppress(NotFoundError):
                await storage.files.delete(file_id or "", owner)
        await storage.batches.delete(record)

    async def cancel(self, batch_id: str, owner: str, prefix: str = BATCH_PREFIX) -> BatchRecord:
        """Cancel a batch: pending lines are skipped, and those in the engine are aborted.

        Raises:
            NotFoundError: the owner has no batch of this id.
            InvalidRequestError: the batch has ended, or is about to.
        """
        storage = await self._storage()
        record = await storage.batches.get(batch_id, owner, prefix)
        if not record.has_ended:
            self._drive(storage, owner)
            await self._run_of(storage, record).cancel()
            if record.has_ended:
                self._runs.pop(record.id, None)
            if record.status in (State.CANCELLING, State.CANCELLED):
                return record
        raise InvalidRequestError(
            f"A batch that is {record.status} cannot be cancelled.",
            param="batch_id",
            code="batch_not_cancellable",
        )

    async def _begin(self, storage: Storage, record: BatchRecord) -> None:
        await storage.batches.add(record)
        self._drive(storage, record.owner)

    async def _storage(self) -> Storage:
        """Return what the folder has. A caller that is cancelled does not end its opening."""
        if self._is_stopping:
            raise ShuttingDownError("The server is shutting down.")
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Storage:
        try:
            storage = await in_thread(Storage, self._folder, self._limits.files, self._now)
        except BaseException:
            self._opening = None
            raise
        for record in storage.batches.unfinished():
            self._drive(storage, record.owner)
        return storage

    async def _open_when_free(self) -> None:
        was_logged = False
        while True:
            try:
                await self._storage()
                break
            except StorageError as problem:
                if not was_logged:
                    logger.warning(
                        "files and batches of %s are not available: %s", self._folder, problem
                    )
                was_logged = True
                await asyncio.sleep(RETRY_S)
        if was_logged:
            logger.info("files and batches are served from %s", self._folder)

    def _drive(self, storage: Storage, owner: str) -> None:
        if owner not in self._drivers and not self._is_stopping:
            driver = asyncio.ensure_future(self._run_batches_of(storage, owner))
            self._drivers[owner] = driver

    async def _run_batches_of(self, storage: Storage, owner: str) -> None:
        """Run an owner's batches one after the other until none is left."""
        num_troubles = 0
        try:
            while left := storage.batches.unfinished(owner):
                try:
                    await self._run(storage, left[0])
                    num_troubles = 0
                except StorageError as problem:
                    logger.error("batch %s waits: %s", left[0].id, problem)  # noqa: TRY400
                    num_troubles += 1
                    await asyncio.sleep(min(MAX_RETRY_S, RETRY_S * num_troubles))
        except ShuttingDownError:
            logger.info("batches stop, because the server is shutting down")
        finally:
            del self._drivers[owner]

    def _run_of(self, storage: Storage, record: BatchRecord) -> BatchRun:
        """Return the run of a batch, which stays the same until the batch has ended."""
        if record.id in self._runs:
            return self._runs[record.id]
        context = RunContext(
            batches=storage.batches,
            files=storage.files,
            places=self._places,
            send=self._send,
            max_line_bytes=self._limits.max_line_bytes,
            now=self._now,
            delay=self._delay,
        )
        run = self._runs[record.id] = BatchRun(record, context)
        return run

    async def _run(self, storage: Storage, record: BatchRecord) -> None:
        run = self._run_of(storage, record)
        try:
            await run.run()
        except (StorageError, ShuttingDownError):
            raise
        except Exception:
            logger.exception("batch %s failed", record.id)
            await run.fail("server_error", "The server failed; its log says why.")
        self._runs.pop(record.id, None)
        logger.info("batch %s has the status %s", record.id, record.status)


async def _check_input(files: FileStore, file_id: str, owner: str) -> None:
    try:
        purpose = (await files.get(file_id, owner)).purpose
    except NotFoundError as missing:
        raise InvalidRequestError(
            str(missing), param="input_file_id", code="file_not_found"
        ) from None
    if purpose != "batch":
        raise InvalidRequestError(
            f"The file's purpose must be batch, not {purpose}.", param="input_file_id"
        )
