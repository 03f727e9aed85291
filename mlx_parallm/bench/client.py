"""A client that sends streaming requests to an OpenAI-compatible server and times the answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.bench.http_stream import ResponseError, Target, request
from mlx_parallm.bench.record import PlannedRequest, RequestRecord

DONE = b"[DONE]"
MAX_ERROR_TEXT = 300


class LoadClient:
    """A client of one server that holds no connection between requests."""

    def __init__(
        self,
        target: Target,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._headers = {**key, **(headers or {})}
        self._timeout_s = timeout_s
        self._clock = clock

    async def send(self, planned: PlannedRequest) -> RequestRecord:
        """Send ``planned`` and return the record of its stream; failures are in the record."""
        record = RequestRecord(
            index=planned.index, start_s=self._clock(), max_tokens=planned.max_tokens
        )
        await self.send_into(record, planned)
        return record

    async def send_into(self, record: RequestRecord, planned: PlannedRequest) -> None:
        """Fill the caller's record, so that the caller has it even after a cancellation."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._follow(planned, record)
        except (OSError, ResponseError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.end_s = self._clock()

    async def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object that ``GET path`` answers.

        Raises:
            OSError: the server cannot be reached.
            ResponseError: the status is no success.
        """
        return json.loads(await self.get_text(path))

    async def get_text(self, path: str) -> str:
        """Return the text that ``GET path`` answers; raise as ``get_json`` does."""
        async with request(self._target, "GET", path, headers=self._headers) as response:
            body = await response.read()
            if response.status != 200:
                raise ResponseError(f"GET {path} answered {response.status}")
            return body.decode(errors="replace")

    async def _follow(self, planned: PlannedRequest, record: RequestRecord) -> None:
        body = json.dumps(planned.body).encode()
        async with request(
            self._target, "POST", planned.route, body=body, headers=self._headers
        ) as response:
            record.status = response.status
            if response.status != 200:
                text = (await response.read()).decode(errors="replace")
                record.error = f"status {response.status}: {text[:MAX_ERROR_TEXT]}"
                return
            events = StreamEvents(record)
            parser = SSEParser()
            async for piece in response.body():
                now = self._clock()
                for data in parser.feed(piece):
                    events.take(data, now)
            events.check_complete()


class StreamEvents:
    """Adds the events of one stream to a record."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._texts: list[str] = []
        self._counted = 0
        self._is_done = False

    def take(self, data: bytes, now: float) -> None:
        """Add the event ``data``, which arrived at ``now``.

        Raises:
            ValueError: it is not JSON.
        """
        if data == DONE:
            self._is_done = True
            return
        event = json.loads(data)
        if event.get("error"):
            self._record.error = f"error event: {str(event['error'])[:MAX_ERROR_TEXT]}"
        has_count = self._take_usage(event.get("usage"))
        text = "".join(self._take_choice(choice) for choice in event.get("choices") or ())
        if text:
            self._texts.append(text)
            self._record.chunk_times_s.append(now)
            self._record.chunk_tokens.append(self._take_new() if has_count else None)

    def check_complete(self) -> None:
        """Close the record; a stream without its end mark or without usage is an error."""
        self._record.text = "".join(self._texts)
        if self._record.error is None and not self._is_done:
            self._record.error = "the stream ended without [DONE]"
        elif self._record.error is None and not self._record.output_tokens:
            self._record.error = "the stream had no usage"

    def _take_usage(self, usage: Mapping[str, Any] | None) -> bool:
        """Add running or final counts; return False if there are none."""
        if not usage:
            return False
        details: Mapping[str, Any] = usage.get("prompt_tokens_details") or {}
        self._record.prompt_tokens = usage.get("prompt_tokens", 0)
        self._record.cached_tokens = details.get("cached_tokens") or 0
        self._record.image_tokens = details.get("image_tokens") or 0
        self._record.output_tokens = usage.get("completion_tokens", 0)
        return True

    def _take_new(self) -> int:
        """Return the number of tokens since the latest text, with those of events without text."""
        new = self._record.output_tokens - self._counted
        self._counted = self._record.output_tokens
        return new

    def _take_choice(self, choice: Mapping[str, Any]) -> str:
        self._record.finish_reason = choice.get("finish_reason") or self._record.finish_reason
        delta = choice.get("delta")
        if delta is None:
            return choice.get("text") or ""
        # SGLang names only the second, newer releases of vLLM only the first.
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        return reasoning + (delta.get("content") or "")


class SSEParser:
    """A parser that splits a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of each event that ``piece`` completes; comments are dropped."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
