"""Runs a file of OpenAI batch lines through the application, in this process.

Input and output lines have the form of OpenAI's Batch API: ``{"custom_id", "method", "url",
"body"}`` in, ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``
out. Lines are answered in the order they finish.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx2
from starlette.types import ASGIApp


class BatchLineError(Exception):
    """A line that is no request; its ``code`` goes into the output line."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class BatchCounts:
    """How many lines were answered, and how many of them not by status 200."""

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
        api_key: sent with every request, when the application asks for one.
        concurrency: lines in flight at once.
        on_answer: called after each answered line.

    Raises:
        OSError: a file could not be read or written.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    transport = httpx2.ASGITransport(app=app)
    counts = BatchCounts()
    lines = numbered_lines(source)
    with target.open("w", encoding="utf-8") as sink:
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://batch", headers=headers, timeout=None
        ) as client:
            workers = [
                _work(client, lines, sink, counts, on_answer) for _ in range(max(1, concurrency))
            ]
            await asyncio.gather(*workers)
    return counts


def numbered_lines(source: Path) -> Iterator[tuple[int, str]]:
    """The non-blank lines of a file with their numbers, from 1."""
    with source.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


async def _work(
    client: httpx2.AsyncClient,
    lines: Iterator[tuple[int, str]],
    sink: IO[str],
    counts: BatchCounts,
    on_answer: Callable[[], None],
) -> None:
    for number, line in lines:
        answer = await _answer(client, number, line)
        counts.total += 1
        response = answer["response"]
        counts.failed += response is None or response["status_code"] != 200
        sink.write(json.dumps(answer, ensure_ascii=False) + "\n")
        sink.flush()
        on_answer()


async def _answer(client: httpx2.AsyncClient, number: int, line: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": None,
        "response": None,
        "error": None,
    }
    try:
        entry = parse_line(number, line)
    except BatchLineError as problem:
        answer["error"] = {"code": problem.code, "message": str(problem)}
        return answer
    answer["custom_id"] = entry["custom_id"]
    response = await client.post(entry["url"], json=entry["body"])
    answer["response"] = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id"),
        "body": response.json(),
    }
    return answer


def parse_line(number: int, line: str) -> dict[str, Any]:
    """A batch line as a dict with ``custom_id``, ``url`` and ``body``.

    Raises:
        BatchLineError: it is not JSON, lacks a field, is no POST, or asks for a stream.
    """
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as problem:
        raise BatchLineError("invalid_json_line", f"Line {number} is not JSON: {problem}") from None
    if not isinstance(entry, dict):
        raise BatchLineError("invalid_json_line", f"Line {number} is not a JSON object.")
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(entry.get(name), kind):
            raise BatchLineError("invalid_request", f"Line {number}: {name!r} is missing.")
    if entry.get("method", "POST") != "POST":
        raise BatchLineError("invalid_method", f"Line {number}: only POST can be batched.")
    if entry["body"].get("stream"):
        raise BatchLineError("invalid_request", f"Line {number}: a batch cannot stream.")
    return entry
