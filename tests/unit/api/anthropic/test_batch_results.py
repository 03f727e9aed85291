"""Results and states of Anthropic's batches that end otherwise than by all answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.api.anthropic.batch_results import input_lines, result_files, result_lines
from mlx_parallm.api.anthropic.batch_schema import KEPT_S, BatchedMessage, message_batch
from mlx_parallm.batch_jobs import answers, results
from mlx_parallm.batch_jobs.records import BatchRecord, State
from mlx_parallm.types.errors import InvalidRequestError

INPUT = input_lines([BatchedMessage(custom_id=name, params={"é": "\u2028"}) for name in "ab"])
ERROR = {"type": "error", "error": {"type": "api_error", "message": "no"}, "request_id": None}
MESSAGE = {"type": "message", "usage": {"output_tokens": 1, "service_tier": "standard"}}


def record(status: State, **fields: Any) -> BatchRecord:
    return BatchRecord(
        id="msgbatch_1", owner="me", endpoint="/v1/messages", input_file_id="in", created_at=0,
        expires_at=9, status=status, **fields,
    )  # fmt: skip


def read(batch: BatchRecord, path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result_lines(batch, [path])]


def answer(status: int, body: Any) -> dict[str, Any]:
    return answers.answered("id", "a", answers.LineResponse(status, None, body))


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        (answer(200, MESSAGE), "succeeded"),
        (answer(500, ERROR), "errored"),
        (answer(307, "a page"), "errored"),
        (answers.refused("id", "a", results.EXPIRED.code, ""), "expired"),
        (answers.refused("id", "a", results.CANCELLED.code, ""), "canceled"),
    ],
)
def test_every_end_of_a_line_has_its_type(tmp_path: Path, entry: Any, kind: str) -> None:
    path = tmp_path / "out"
    path.write_bytes(answers.encode(entry))
    (line,) = read(record(State.COMPLETED), path)
    assert (line["custom_id"], line["result"]["type"]) == ("a", kind)
    if kind == "errored":
        assert line["result"]["error"]["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    ("status", "kind"), [(State.FAILED, "errored"), (State.CANCELLED, "canceled")]
)
def test_a_batch_without_answers_has_results(tmp_path: Path, status: State, kind: str) -> None:
    path = tmp_path / "in"
    path.write_bytes(INPUT)
    batch = record(status)
    assert result_files(batch) == ["in"]
    assert [(line["custom_id"], line["result"]["type"]) for line in read(batch, path)] == [
        ("a", kind),
        ("b", kind),
    ]


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (record(State.VALIDATING, total=3), {"processing": 3}),
        (record(State.IN_PROGRESS, total=3, completed=2), {"processing": 3}),
        (record(State.FAILED, total=3, completed=2), {"errored": 3}),
        (record(State.COMPLETED, total=3, completed=2, failed=1), {"succeeded": 2, "errored": 1}),
        (
            record(State.EXPIRED, total=6, completed=1, failed=5, unanswered=3),
            {"succeeded": 1, "errored": 2, "expired": 3},
        ),
        (
            record(State.CANCELLED, total=6, completed=1, failed=5, unanswered=3),
            {"succeeded": 1, "errored": 2, "canceled": 3},
        ),
        (record(State.CANCELLED, total=6), {"canceled": 6}),
    ],
)
def test_the_counts_are_of_all_requests(batch: BatchRecord, counts: dict[str, int]) -> None:
    shown = message_batch(batch, "http://a", now=0).request_counts.model_dump()
    assert {name: count for name, count in shown.items() if count} == counts


def test_a_batch_is_archived_when_its_results_expire() -> None:
    batch = record(State.COMPLETED, completed_at=5)
    shown = message_batch(batch, "http://a", now=5 + KEPT_S - 1)
    assert shown.results_url == "http://a/v1/messages/batches/msgbatch_1/results"
    assert (shown.ended_at, shown.archived_at) == ("1970-01-01T00:00:05Z", None)
    shown = message_batch(batch, "http://a", now=5 + KEPT_S)
    assert (shown.results_url, shown.archived_at) == (None, "1970-01-30T00:00:05Z")


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_json_cannot_write_is_refused_by_its_place(number: float) -> None:
    requests = [
        BatchedMessage(custom_id="a", params={}),
        BatchedMessage(custom_id="b", params={"metadata": [{"n": number}]}),
    ]
    with pytest.raises(InvalidRequestError) as refused:
        input_lines(requests)
    assert refused.value.param == "requests.1.params"


def test_what_refused_the_input_is_said_of_each_request(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(INPUT)
    errors = [{"code": "invalid_json_line", "message": "why", "param": None, "line": 1}]
    for line in read(record(State.FAILED, errors=errors), path):
        error = line["result"]["error"]["error"]
        assert error == {"type": "invalid_request_error", "message": "why"}
