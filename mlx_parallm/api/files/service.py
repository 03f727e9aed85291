"""Batches behind an application: their lines are requests to that same application."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import httpx2
from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.api.http.auth import INTERNAL_CALLER, Caller
from mlx_parallm.batch_jobs.answers import LineResponse
from mlx_parallm.batch_jobs.files import FileLimits
from mlx_parallm.batch_jobs.service import BatchLimits, BatchService
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ShuttingDownError
from mlx_parallm.types.json_values import is_object

HEADERS = {"content-type": "application/json"}
# LINE_BYTES: size of a batch file's line without the body.
LINE_BYTES = 4096


def make_batch_service(
    app: ASGIApp, scheduler: SchedulerConfig, config: ServerConfig, max_waiting: int | None
) -> BatchService | None:
    """Return the files and batches of an application; None if it has no data folder."""
    if config.data_dir is None:
        return None
    limits = BatchLimits(
        files=FileLimits(
            max_file_bytes=config.max_file_bytes, max_total_bytes=config.max_files_bytes
        ),
        max_line_bytes=max(config.max_body_bytes, config.max_media_body_bytes) + LINE_BYTES,
        max_samples=_max_samples(config, scheduler),
    )
    sender = LineSender(app, max_waiting)
    return BatchService(Path(config.data_dir), limits, sender)


def _max_samples(config: ServerConfig, scheduler: SchedulerConfig) -> int:
    if config.max_num_seqs_of_batches is not None:
        return config.max_num_seqs_of_batches
    # A key's batch must not use all the sequences that the key may run, either.
    places = min(scheduler.max_num_seqs, scheduler.max_num_seqs_per_client or math.inf)
    return max(1, int(places) // 2)


class LineSender:
    """Sends lines through an application, in this process, as their owner's requests."""

    def __init__(self, app: ASGIApp, max_waiting: int | None) -> None:
        self._app = app
        # Half of the queue stays free for clients. 0 means no limit.
        self._max_waiting = max(1, max_waiting // 2) if max_waiting else max_waiting

    async def __call__(
        self, owner: str, url: str, body: dict[str, Any], request_id: str
    ) -> LineResponse:
        """See ``batch_jobs.run.Send``."""
        caller = Caller(client=owner, max_waiting=self._max_waiting, is_background=True)

        async def as_caller(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, INTERNAL_CALLER: caller}, receive, send)

        transport = httpx2.ASGITransport(as_caller, raise_app_exceptions=False)
        headers = {**HEADERS, "x-request-id": request_id}
        # The body stays as short as in the file. Only half a surrogate pair is escaped.
        content = json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace")
        request = httpx2.Request("POST", f"http://batch{url}", headers=headers, content=content)
        response = await transport.handle_async_request(request)
        await response.aread()
        answer = line_response(response)
        if answer.error_code == "shutting_down":
            raise ShuttingDownError("The server is shutting down.")
        return answer


def line_response(response: httpx2.Response) -> LineResponse:
    """Return an answer in the form of a batch's output."""
    try:
        body = response.json()
    except ValueError:  # The answer is a redirect or a page.
        body = response.text
    request_id = response.headers.get("x-request-id")
    code = _error_code(body) if response.is_error else None
    return LineResponse(response.status_code, request_id, body, code)


def _error_code(body: Any) -> str | None:
    error = body.get("error") if is_object(body) else None
    if not is_object(error):
        return None
    # Anthropic's routes report the code in the details.
    details = error.get("details")
    code = details.get("error_code") if is_object(details) else error.get("code")
    return code if isinstance(code, str) else None


async def get_batches(request: Request) -> BatchService:
    """Return the files and batches of this application."""
    return request.app.state.batches


BatchesDep = Annotated[BatchService, Depends(get_batches)]
