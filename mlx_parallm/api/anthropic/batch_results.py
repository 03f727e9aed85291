"""From the files of a batch to Anthropic's lines of results, and from requests to its input."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.api.anthropic.batch_schema import ENDPOINT, BatchedMessage
from mlx_parallm.batch_jobs import results
from mlx_parallm.batch_jobs.answers import encode
from mlx_parallm.batch_jobs.lines import numbered_lines
from mlx_parallm.batch_jobs.records import BatchRecord, State
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

# UNANSWERED: results by the codes of lines that got no answer.
UNANSWERED = {results.EXPIRED.code: "expired", results.CANCELLED.code: "canceled"}
FAILED = {"type": "api_error", "message": "The server failed; its log says why."}


def input_lines(requests: Iterable[BatchedMessage]) -> bytes:
    """Return requests as lines of a batch's input.

    Numbers and texts are as short as in the body, so that no line outgrows its limit.

    Raises:
        InvalidRequestError: a number is infinite or none, which JSON cannot write.
    """
    return b"".join(_input_line(number, request) for number, request in enumerate(requests))


def _input_line(number: int, request: BatchedMessage) -> bytes:
    try:
        text = json.dumps(
            {"custom_id": request.custom_id, "url": ENDPOINT, "body": request.params},
            ensure_ascii=False,
            separators=(",", ":"),
            allow_nan=False,
        )
    except ValueError:
        param = f"requests.{number}.params"
        raise InvalidRequestError(
            f"{param}: a number is infinite or no number.", param=param
        ) from None
    return text.encode("utf-8", "backslashreplace") + b"\n"


def result_files(record: BatchRecord) -> list[str]:
    """Return the ids of the files that have an ended batch's results.

    They are in its input if it has no others: it failed as a whole, or ended before it began.
    """
    ids = [each for each in (record.output_file_id, record.error_file_id) if each is not None]
    return [record.input_file_id] if record.status == State.FAILED or not ids else ids


def result_lines(record: BatchRecord, paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield Anthropic's line for each line of the files; it reads them, so it needs a thread."""
    for path in paths:
        for _, line in numbered_lines(path):
            entry = json.loads(line)
            result = _result(entry) if "response" in entry else _unread(record)
            yield encode({"custom_id": entry["custom_id"], "result": result})


def _result(answer: Mapping[str, Any]) -> dict[str, Any]:
    response = answer["response"]
    if response is None:
        kind = UNANSWERED.get(answer["error"]["code"])
        return {"type": kind} if kind else _errored(None)
    if response["status_code"] != 200:
        return _errored(response["body"])
    message = response["body"]
    message["usage"]["service_tier"] = "batch"
    return {"type": "succeeded", "message": message}


def _unread(record: BatchRecord) -> dict[str, Any]:
    """Return the result of a line that was never sent, with what refused the batch's input."""
    if record.status == State.CANCELLED:
        return {"type": "canceled"}
    if not record.errors:
        return _errored(None)
    error = {"type": "invalid_request_error", "message": record.errors[0]["message"]}
    return _errored({"type": "error", "error": error, "request_id": None})


def _errored(body: Any) -> dict[str, Any]:
    is_error = is_object(body) and body.get("type") == "error"
    error = body if is_error else {"type": "error", "error": FAILED, "request_id": None}
    return {"type": "errored", "error": error}
