"""The runner of a file of OpenAI batch lines through the application in this process.

Output lines have the form of OpenAI's Batch API: ``{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}``. Lines are answered in the order they finish.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2
from starlette.types import ASGIApp

from mlx_parallm.api.files.service import line_response
from mlx_parallm.batch_jobs import answers
from mlx_parallm.batch_jobs.lines import (
    BatchLine,
    BatchLineError,
    custom_id_of,
    numbered_lines,
    read_line,
    read_object,
)

TOO_MANY_REQUESTS = 429


@dataclass(slots=True)
class BatchCounts:
    """The number of answered lines, and of those without status 200."""

    total: int = 0
    failed: int = 0


async def run_batch_file(
    app: ASGIApp,
    source: Path,
    target: Path,
    *,
    api_key: str | None,
    concurrency: int,
    on_answer: Callable[[], None],
) -> BatchCounts:
    """Answer every line of ``source`` into ``target``.

    Args:
        app: the application; its engine must be running.
        source: JSON lines; blank lines are skipped.
        target: overwritten; flushed after each line.
        api_key: the key sent with every request; None: no key is needed.
        concurrency: lines in flight at once.
        on_answer: called after each answered line.

    Raises:
        OSError: a file could not be read or written.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    lines = numbered_lines(source)
    with target.open("wb") as sink:
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://batch", headers=headers, timeout=None
        ) as client:
            batch = _Batch(client, sink, on_answer)
            await asyncio.gather(*(batch.work(lines) for _ in range(max(1, concurrency))))
    return batch.counts


class _Batch:
    """The state that the workers share."""

    def __init__(
        self, client: httpx2.AsyncClient, sink: IO[bytes], on_answer: Callable[[], None]
    ) -> None:
        self.counts = BatchCounts()
        self._client = client
        self._sink = sink
        self._on_answer = on_answer
        self._custom_ids: set[str] = set()
        self._num_sent = 0
        self._num_ended = 0
        self._line_ended = asyncio.Condition()

    async def work(self, lines: Iterator[tuple[int, bytes]]) -> None:
        """Answer lines until none is left."""
        for number, line in lines:
            answer = await self._answer(number, line)
            self.counts.total += 1
            self.counts.failed += answers.is_failed(answer)
            self._sink.write(answers.encode(answer))
            self._sink.flush()
            self._on_answer()

    async def _answer(self, number: int, line: bytes) -> dict[str, Any]:
        name, custom_id = answers.new_answer_id(), None
        try:
            entry = read_object(number, line)
            custom_id = custom_id_of(entry)
            request = self._request(number, read_line(number, entry))
        except BatchLineError as problem:
            return answers.refused(name, custom_id, problem.code, str(problem))
        return answers.answered(name, custom_id, line_response(await self._send(request)))

    def _request(self, number: int, line: BatchLine) -> httpx2.Request:
        headers = {"content-type": "application/json"}
        try:
            content = json.dumps(line.body)
            request = self._client.build_request("POST", line.url, content=content, headers=headers)
        except httpx2.InvalidURL as problem:
            raise BatchLineError("invalid_url", f"Line {number}: {problem}") from None
        if line.custom_id in self._custom_ids:
            message = f"Line {number}: an earlier line has the same 'custom_id'."
            raise BatchLineError("duplicate_custom_id", message)
        self._custom_ids.add(line.custom_id)
        return request

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer, resending a line refused by a full queue when another has ended."""
        self._num_sent += 1
        while True:
            num_ended = self._num_ended
            response = await self._client.send(request)
            if response.status_code != TOO_MANY_REQUESTS:
                break
            if num_ended == self._num_ended:
                if self._num_sent == 1:  # no other line will end and make room
                    break
                self._num_sent -= 1
                async with self._line_ended:
                    await self._line_ended.wait()
                self._num_sent += 1
        self._num_sent -= 1
        self._num_ended += 1
        async with self._line_ended:
            self._line_ended.notify()
        return response
