"""The run of one batch, from its current state to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.batch_jobs import answers
from mlx_parallm.batch_jobs.answers import LineResponse, Usage
from mlx_parallm.batch_jobs.files import FileStore, Upload
from mlx_parallm.batch_jobs.journal import Entry, Journal
from mlx_parallm.batch_jobs.lines import (
    BatchLine,
    check_file,
    num_samples,
    numbered_lines,
    read_line,
    read_object,
)
from mlx_parallm.batch_jobs.records import BatchRecord, State, entering
from mlx_parallm.batch_jobs.results import CANCELLED, EXPIRED, Tally, write_results
from mlx_parallm.batch_jobs.store import BatchStore
from mlx_parallm.fairness import Holding, SharedBudget
from mlx_parallm.storage.disk import in_thread
from mlx_parallm.types.errors import NotFoundError, ShuttingDownError

logger = logging.getLogger(__name__)

# MAX_TRIES: attempts at a request to which the server answers with an error of its own.
MAX_TRIES = 4
MAX_DELAY_S = 60.0
# TRY_LATER: statuses of a server that is full, ending or restarting its engine; Anthropic's routes
# answer 529 instead of 503.
TRY_LATER = frozenset({429, 503, 529})
# LOST: the code of a request whose engine died. It may have killed the engine, so it counts as a
# failure of the server, although its status is one of ``TRY_LATER``.
LOST = "request_lost"
# MAX_LOST_TOGETHER: how often a request may be lost before it is sent alone.
MAX_LOST_TOGETHER = 2
NOT_IMPLEMENTED = 501
# CANCELLABLE: states of a batch that may still be cancelled.
CANCELLABLE = frozenset({State.VALIDATING, State.IN_PROGRESS})


class Send(Protocol):
    """Sends a line through the application."""

    def __call__(
        self, owner: str, url: str, body: dict[str, Any], request_id: str
    ) -> Awaitable[LineResponse]:
        """Return the answer, whatever its status.

        Raises:
            ShuttingDownError: the server admits nothing more.
        """
        ...


def growing_delay(num_tries: int) -> float:
    """Return the seconds before the next try: 1, 2, 4, … up to ``MAX_DELAY_S``."""
    return min(MAX_DELAY_S, 2.0 ** min(num_tries - 1, 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """The objects that all runs share.

    Attributes:
        batches: the store of records.
        files: the store of input and output files.
        places: those of samples in the engine.
        send: sends a line and returns its answer.
        max_line_bytes: most bytes of a line of the input.
        now: returns Unix seconds.
        delay: returns the seconds to wait after a number of tries.
    """

    batches: BatchStore
    files: FileStore
    places: SharedBudget
    send: Send
    max_line_bytes: int
    now: Callable[[], float] = time.time
    delay: Callable[[int], float] = growing_delay


class BatchRun:
    """Runs a batch from its current state; it can be abandoned and resumed at any moment.

    The batch has a state once that is saved. What the disk refused to save is remembered here, and
    the next call of ``run`` tries it again.
    """

    def __init__(self, record: BatchRecord, context: RunContext) -> None:
        self._record = record
        self._context = context
        self._source = Path()
        self._cancelled = asyncio.Event()
        # Held by each change of the state, so that the next one begins from it.
        self._moving = asyncio.Lock()
        # The fields of the final state until it is saved. That needs room for a record only: a full
        # disk may have none for the files of results a second time.
        self._end: dict[str, Any] = {}
        self._is_stopping = False
        self._usage = Usage()

    async def cancel(self) -> None:
        """Stop answering lines; a batch whose end was not saved yet ends with that instead.

        Raises:
            StorageError: the disk refused to save it; the batch is cancelled all the same, or
                has that end.
        """
        if self._end:
            await self._save_end()
            return
        self._cancelled.set()
        await self._move(State.CANCELLING, since=CANCELLABLE)

    async def run(self) -> None:
        """Run until the batch has ended.

        Raises:
            ShuttingDownError: the server ends; the next one resumes the batch.
            StorageError: the disk failed; a later call may succeed.
        """
        if self._end:
            await self._save_end()
            return
        files, record = self._context.files, self._record
        try:
            self._source = files.path(await files.get(record.input_file_id, record.owner))
            if record.status == State.VALIDATING:
                await self._validate()
            if record.status == State.IN_PROGRESS:
                await self._answer_within_time()
            if not record.has_ended:
                await self._finish()
        except (NotFoundError, FileNotFoundError):
            await self.fail("input_file_missing", "The input file does not exist any more.")

    async def fail(self, code: str, message: str) -> None:
        """End the batch with an error that is not one of a line.

        Raises:
            StorageError: the disk refused it; ``run`` tries again.
        """
        error = {"code": code, "message": message, "line": None, "param": None}
        await self._end_as(State.FAILED, errors=[error])

    async def _validate(self) -> None:
        record, limit = self._record, self._context.max_line_bytes
        report = await in_thread(check_file, self._source, record.endpoint, limit)
        if self._cancelled.is_set():
            await self._move(State.CANCELLING, since=CANCELLABLE)
        elif report.errors:
            await self._end_as(State.FAILED, errors=report.errors)
        else:
            facts = {"total": report.total, "model": report.model}
            await self._move(State.IN_PROGRESS, since={State.VALIDATING}, **facts)

    async def _answer_within_time(self) -> None:
        """Answer lines until all are done, or the batch is cancelled or expires."""
        work = asyncio.ensure_future(self._answer_lines())
        cancelled = asyncio.ensure_future(self._cancelled.wait())
        left_s = max(0.0, self._record.expires_at - self._context.now())
        try:
            await asyncio.wait({work, cancelled}, timeout=left_s, return_when="FIRST_COMPLETED")
            if work.done():
                work.result()
        finally:
            await end(work, cancelled)
        is_cancelled = self._cancelled.is_set()
        state = State.CANCELLING if is_cancelled else State.FINALIZING
        await self._move(state, since={State.IN_PROGRESS})

    async def _answer_lines(self) -> None:
        self._is_stopping = False
        path = self._context.batches.journal_path(self._record.id)
        with contextlib.closing(await in_thread(Journal, path)) as journal:
            done = await in_thread(self._take_in, journal)
            notes = _Notes(journal)
            try:
                async with asyncio.TaskGroup() as group:
                    await self._start_lines(group, notes, done)
            except ExceptionGroup as several:
                raise several.exceptions[0] from several
        if self._is_stopping:
            raise ShuttingDownError("The server is shutting down.")

    def _take_in(self, journal: Journal) -> set[int]:
        """Count the answers in the journal and return the numbers of their lines."""
        self._record.completed = self._record.failed = 0
        self._usage = Usage()
        done: set[int] = set()
        for entry in journal.entries():
            if entry.line not in done:
                done.add(entry.line)
                self._count(entry.answer)
        return done

    async def _start_lines(self, group: asyncio.TaskGroup, notes: _Notes, done: set[int]) -> None:
        places = self._context.places
        with contextlib.closing(self._lines(done)) as lines:
            for number, line in lines:
                # Only one line of a batch waits for places, so batches of owners take turns.
                held = Holding(places, None)
                await held.acquire(min(num_samples(line.body), places.amount))
                if self._is_stopping:
                    held.release()
                    return
                task = group.create_task(self._answer_line(number, line, held, notes))
                # The places are returned by a callback, not by the task, because a task that is
                # cancelled before it begins would keep them.
                task.add_done_callback(lambda _, held=held: held.release())

    def _lines(self, done: set[int]) -> Generator[tuple[int, BatchLine], None, None]:
        for number, raw in numbered_lines(self._source):
            if number not in done:
                yield number, read_line(number, read_object(number, raw))

    async def _answer_line(
        self, number: int, line: BatchLine, held: Holding, notes: _Notes
    ) -> None:
        try:
            answer = await self._answer(line, held)
        except ShuttingDownError:
            self._is_stopping = True
            return
        await notes.add(Entry(number, answer))
        self._count(answer)

    async def _answer(self, line: BatchLine, held: Holding) -> dict[str, Any]:
        """Return the answer to a line, retrying failures some times and a busy server forever.

        Args:
            line: the line.
            held: the line's places.
        """
        name = answers.new_answer_id()
        num_tries = num_failures = num_lost = 0
        while True:
            response = await self._context.send(self._record.owner, line.url, line.body, name)
            status, is_lost = response.status_code, response.error_code == LOST
            num_lost += is_lost
            if is_lost or status not in TRY_LATER:
                num_failures += status >= 500
                if status < 500 or status == NOT_IMPLEMENTED or num_failures == MAX_TRIES:
                    return answers.answered(name, line.custom_id, response)
            num_tries += 1
            await asyncio.sleep(self._context.delay(num_tries))
            if num_lost >= MAX_LOST_TOGETHER:
                await self._hold_all(held)

    async def _hold_all(self, held: Holding) -> None:
        """Wait until a line has all places, so that lines of no batch are lost with it."""
        places = self._context.places
        if held.amount < places.amount:
            # Two lines that kept theirs would wait for each other.
            held.release()
            await held.acquire(places.amount)

    def _count(self, answer: dict[str, Any]) -> None:
        is_failed = answers.is_failed(answer)
        self._record.failed += is_failed
        self._record.completed += not is_failed
        self._usage.add(answer)
        self._record.usage = self._usage.to_json()

    async def _finish(self) -> None:
        """Write the result files and enter the final state."""
        record, files = self._record, self._context.files
        if record.in_progress_at is None:  # cancelled before its lines were known
            await self._end_as(State.CANCELLED)
            return
        if record.output_file_id is None:
            # The ids are saved before the files are written, so that a retry replaces the files.
            ids = {"output_file_id": files.new_id(), "error_file_id": files.new_id()}
            await self._context.batches.change(record, **ids)
        await self._write_files()

    async def _write_files(self) -> None:
        record, files = self._record, self._context.files
        is_cancelled = record.status == State.CANCELLING
        journal = self._context.batches.journal_path(record.id)
        # Opening the journal cuts off a partial entry, and creates it if no line was ever begun.
        (await in_thread(Journal, journal)).close()
        with contextlib.ExitStack() as stack:
            output = await files.begin(is_limited=False)
            stack.callback(output.abandon)
            errors = await files.begin(is_limited=False)
            stack.callback(errors.abandon)
            reason = CANCELLED if is_cancelled else EXPIRED
            tally = await in_thread(write_results, self._source, journal, output, errors, reason)
            await self._commit(output, record.output_file_id, "output")
            await self._commit(errors, record.error_file_id, "errors")
        await self._end_with(tally, output.num_bytes > 0, errors.num_bytes > 0)

    async def _commit(self, upload: Upload, file_id: str | None, name: str) -> None:
        record = self._record
        if upload.num_bytes:
            await self._context.files.commit(
                upload,
                owner=record.owner,
                filename=f"{record.id}_{name}.jsonl",
                purpose="batch_output",
                expires_after_s=record.output_expires_after_s,
                file_id=file_id,
            )

    async def _end_with(self, tally: Tally, has_output: bool, has_errors: bool) -> None:
        record = self._record
        state = State.EXPIRED if tally.num_unanswered else State.COMPLETED
        await self._end_as(
            State.CANCELLED if record.status == State.CANCELLING else state,
            completed=tally.completed,
            failed=tally.failed,
            unanswered=tally.num_unanswered,
            usage=tally.usage.to_json(),
            output_file_id=record.output_file_id if has_output else None,
            error_file_id=record.error_file_id if has_errors else None,
        )

    async def _move(self, state: State, *, since: Collection[State], **changes: Any) -> None:
        """Enter a state if the batch is in one of ``since``."""
        async with self._moving:
            if self._record.status in since:
                moved = entering(state, self._context.now())
                await self._context.batches.change(self._record, **moved, **changes)

    async def _end_as(self, state: State, **changes: Any) -> None:
        """Enter a final state."""
        self._end = entering(state, self._context.now()) | changes
        await self._save_end()

    async def _save_end(self) -> None:
        batches = self._context.batches
        async with self._moving:
            if not self._record.has_ended:
                await batches.change(self._record, **self._end)
        # A journal that stays is removed by the next start.
        with contextlib.suppress(OSError):
            batches.journal_path(self._record.id).unlink(missing_ok=True)


class _Notes:
    """Appends to a journal from many tasks; entries that arrive during a write share the next."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._waiting: list[Entry] = []
        self._lock = asyncio.Lock()

    async def add(self, entry: Entry) -> None:
        """Return once the entry is durable."""
        self._waiting.append(entry)
        async with self._lock:
            entries, self._waiting = self._waiting, []
            if entries:
                await in_thread(self._journal.append, entries)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
