"""A service of batches, over an application that tests play."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mlx_parallm.batch_jobs.answers import LineResponse
from mlx_parallm.batch_jobs.files import FileLimits
from mlx_parallm.batch_jobs.records import BatchRecord
from mlx_parallm.batch_jobs.service import BatchLimits, BatchOrder, BatchService

ENDPOINT = "/v1/completions"
NUM_PLACES = 3
Handler = Callable[[str, dict[str, Any]], Awaitable[LineResponse]]
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def good(number: int) -> LineResponse:
    return LineResponse(200, "id", {"answer": number, "usage": USAGE})


def failing(status: int) -> LineResponse:
    return LineResponse(status, "id", {"error": {"message": "no"}})


async def answer_at_once(_: str, body: dict[str, Any]) -> LineResponse:
    return good(body["number"])


class World:
    """A data folder, and the services that come and go over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler: Handler = answer_at_once
        self.sent: list[tuple[str, int]] = []
        self.now = 1000.0
        self.delays: list[int] = []
        self.service = self.make()

    def make(self) -> BatchService:
        files = FileLimits(max_file_bytes=2**20, max_total_bytes=2**30)
        limits = BatchLimits(files=files, max_line_bytes=10_000, max_samples=NUM_PLACES)
        return BatchService(
            self.folder, limits, self.send, now=lambda: self.now, delay=self.no_delay
        )

    def no_delay(self, num_tries: int) -> float:
        self.delays.append(num_tries)
        return 0

    async def send(
        self, owner: str, url: str, body: dict[str, Any], request_id: str
    ) -> LineResponse:
        assert url == ENDPOINT
        assert request_id.startswith("batch_req_")
        self.sent.append((owner, body["number"]))
        return await self.handler(owner, body)

    async def restart(self) -> None:
        await self.service.stop()
        self.service = self.make()
        self.service.start()

    async def upload(self, content: bytes, owner: str = "me", purpose: str = "batch") -> str:
        files = await self.service.files()
        upload = await files.begin()
        upload.claim(len(content))
        upload.write(content)
        record = await files.commit(upload, owner=owner, filename="in", purpose=purpose)
        return record.id

    async def create(self, num_lines: int, owner: str = "me", **more: Any) -> BatchRecord:
        file_id = await self.upload(lines(num_lines, **more), owner)
        return await self.service.create(
            owner, BatchOrder(input_file_id=file_id, endpoint=ENDPOINT, metadata={"a": "b"})
        )

    async def until(self, record: BatchRecord, is_so: Callable[[BatchRecord], bool]) -> BatchRecord:
        while True:
            current = await self.service.get(record.id, record.owner)
            if is_so(current):
                return current
            await asyncio.sleep(0)

    async def end_of(self, record: BatchRecord) -> BatchRecord:
        return await self.until(record, lambda current: current.has_ended)

    async def results(
        self, record: BatchRecord
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        files = await self.service.files()

        async def read(file_id: str | None) -> list[dict[str, Any]]:
            if file_id is None:
                return []
            file = await files.get(file_id, record.owner)
            assert file.num_bytes
            text = files.path(file).read_text("utf-8")
            return [json.loads(line) for line in text.splitlines()]

        return await read(record.output_file_id), await read(record.error_file_id)


def lines(count: int, **more: Any) -> bytes:
    entries = [
        {"custom_id": f"c{n}", "method": "POST", "url": ENDPOINT, "body": {"number": n} | more}
        for n in range(count)
    ]
    return "\n".join(json.dumps(entry) for entry in entries).encode()


async def hang(*_: object) -> LineResponse:
    await asyncio.Event().wait()
    raise AssertionError
