"""Every line of a batch file gets an answer of its own, whatever is wrong with its neighbours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.cli.batch_file import BatchCounts, run_batch_file
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import OverloadedError
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, fail

Answers = list[dict[str, Any]]
#: ``Handler`` answers a request, and may raise.
Handler = Callable[[Request], Any]


def line(custom_id: Any = "a", **changes: Any) -> str:
    body = {"model": "alias", "prompt": "say"}
    entry = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(entry | changes)


def handled_by(handler: Handler) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)

    return app


class Batches:
    """Runs lines in a folder."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.counts = BatchCounts()
        self.num_calls = 0

    def run(self, app: ASGIApp | None, *lines: str | bytes, **options: Any) -> Answers:
        encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
        self.source.write_bytes(b"\n".join(encoded))
        settings = {"api_key": None, "concurrency": 1, "on_answer": self._count} | options
        app = app or make_app(FakeEngine(), ServerConfig())
        self.counts = asyncio.run(run_batch_file(app, self.source, self.target, **settings))
        return [json.loads(line) for line in self.target.read_text("utf-8").splitlines()]

    def _count(self) -> None:
        self.num_calls += 1


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    return Batches(tmp_path)


def ids(answers: Answers) -> list[str | None]:
    return [answer["custom_id"] for answer in answers]


def test_a_line_is_answered_in_the_form_of_the_batch_api(batches: Batches) -> None:
    (answer,) = batches.run(None, line("mine"))
    assert answer.keys() == {"id", "custom_id", "response", "error"}
    assert answer["id"].startswith("batch_req_")
    assert (answer["custom_id"], answer["error"]) == ("mine", None)
    response = answer["response"]
    assert response["status_code"] == 200
    assert response["request_id"]
    assert response["body"]["choices"][0]["text"] == "hello"
    assert batches.counts == BatchCounts(total=1, failed=0)


NUMBER = b'{"custom_id": "a", "url": "/v1/completions", "body": {"temperature": %s}}'


@pytest.mark.parametrize(
    ("bad", "custom_id", "code"),
    [
        ("{not json", None, "invalid_json_line"),
        ('{"custom_id": "a"', None, "invalid_json_line"),
        ("[]", None, "invalid_json_line"),
        ('"a"', None, "invalid_json_line"),
        ("null", None, "invalid_json_line"),
        (b'{"custom_id": "\xff"}', None, "invalid_json_line"),
        (line().encode("utf-16-le"), None, "invalid_json_line"),
        (NUMBER % b"NaN", None, "invalid_json_line"),
        (NUMBER % b"-Infinity", None, "invalid_json_line"),
        (NUMBER % (b"1" * 5000), None, "invalid_json_line"),
        (b"[" * 100_000, None, "invalid_json_line"),
        ("{}", None, "invalid_request"),
        (line(None), None, "invalid_request"),
        (line(7), None, "invalid_request"),
        (line("a", body=None), "a", "invalid_request"),
        (line("a", body="text"), "a", "invalid_request"),
        (line("a", url=None), "a", "invalid_request"),
        (line("a", body={"stream": True}), "a", "invalid_request"),
        (line("a", method="GET"), "a", "invalid_method"),
        (line("a", url=""), "a", "invalid_url"),
        (line("a", url="v1/completions"), "a", "invalid_url"),
        (line("a", url="http://elsewhere/v1/completions"), "a", "invalid_url"),
        (line("a", url="//elsewhere/v1/completions"), "a", "invalid_url"),
        (line("a", url="/v1/\n"), "a", "invalid_url"),
        (line("a", url="/" + "v" * 100_000), "a", "invalid_url"),
    ],
)
def test_a_bad_line_gets_an_error_and_the_others_their_answers(
    batches: Batches, bad: str | bytes, custom_id: str | None, code: str
) -> None:
    answers = batches.run(None, line("before"), bad, line("after"))
    assert ids(answers) == ["before", custom_id, "after"]
    assert answers[1]["error"]["code"] == code
    assert "Line 2" in answers[1]["error"]["message"]
    assert answers[1]["response"] is None
    assert [answers[i]["response"]["status_code"] for i in (0, 2)] == [200, 200]
    assert batches.counts == BatchCounts(total=3, failed=1)
    assert batches.num_calls == 3


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"url": "/v1/nothing"}, 404),
        ({"url": "/health"}, 405),
        ({"body": {"model": "other", "prompt": "a"}}, 404),
        ({"body": {"model": "alias"}}, 400),
        ({"body": {"model": "alias", "prompt": "\ud800"}}, 400),
        ({"body": {}}, 400),
    ],
)
def test_what_the_application_refuses_is_a_response(
    batches: Batches, changes: dict[str, Any], status: int
) -> None:
    answers = batches.run(None, line("bad", **changes), line("good"))
    assert answers[0]["error"] is None
    assert answers[0]["response"]["status_code"] == status
    assert answers[0]["response"]["body"]["error"]["message"]
    assert answers[1]["response"]["status_code"] == 200
    assert batches.counts == BatchCounts(total=2, failed=1)


def test_a_body_of_any_depth_is_answered_or_refused(batches: Batches) -> None:
    depths = range(100, 1100, 7)
    lists = {str(depth): "[" * depth + "]" * depth for depth in depths}
    lines = [
        f'{{"custom_id": "{name}", "url": "/v1/completions", "body": {{"model": {nested}}}}}'
        for name, nested in lists.items()
    ]
    answers = batches.run(None, *lines)
    assert len(answers) == len(depths)
    codes = {a["error"]["code"] for a in answers if a["error"]}
    assert codes <= {"invalid_json_line"}
    assert {a["response"]["status_code"] for a in answers if a["response"]} == {400}


def test_only_the_first_line_of_an_id_is_run(batches: Batches) -> None:
    engine = FakeEngine()
    app = make_app(engine, ServerConfig())
    answers = batches.run(app, line("a", method="PUT"), line("a"), line("b"), line("a"))
    assert ids(answers) == ["a", "a", "b", "a"]
    codes = [answer["error"] and answer["error"]["code"] for answer in answers]
    assert codes == ["invalid_method", None, None, "duplicate_custom_id"]
    assert engine.submitted.qsize() == 2


def test_an_empty_file_and_blank_lines_have_no_answer(batches: Batches) -> None:
    assert batches.run(None) == []
    assert batches.counts == BatchCounts()
    answers = batches.run(None, "", line("a"), " \t\r", line("b"), "{", "")
    assert ids(answers) == ["a", "b", None]
    assert "Line 5" in answers[2]["error"]["message"]


def test_ids_of_any_characters_come_back(batches: Batches) -> None:
    names = ["", "ö 語", "\x85\u2028\u2029", "\ud800", 'quote " and \n newline']
    escaped = [line(name) for name in names]
    plain = json.dumps(json.loads(line("ünescaped")), ensure_ascii=False)
    assert ids(batches.run(None, *escaped, plain)) == [*names, "ünescaped"]


def test_a_byte_order_mark_and_crlf_are_no_part_of_a_line(batches: Batches) -> None:
    answers = batches.run(None, b"\xef\xbb\xbf" + line("a").encode() + b"\r", line("b"))
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200]


def test_the_key_is_sent(batches: Batches) -> None:
    app = make_app(FakeEngine(), ServerConfig(api_keys=("secret",)))
    (refused,) = batches.run(app, line())
    assert refused["response"]["status_code"] == 401
    (answer,) = batches.run(app, line(), api_key="secret")
    assert answer["response"]["status_code"] == 200


def test_the_output_is_written_anew(batches: Batches) -> None:
    batches.target.write_text("old\n" * 100)
    assert ids(batches.run(None, line("a"))) == ["a"]


def test_answers_that_are_no_json_are_kept_as_text(batches: Batches) -> None:
    async def handler(request: Request) -> Response:
        if request.url.path == "/moved":
            return RedirectResponse("/elsewhere")
        return Response("plain", media_type="text/plain")

    app = handled_by(handler)
    answers = batches.run(app, line("a", url="/moved"), line("b"))
    assert [answer["response"]["body"] for answer in answers] == ["", "plain"]
    assert batches.counts == BatchCounts(total=2, failed=1)


def test_a_failing_application_fails_its_line_only(batches: Batches) -> None:
    async def handler(request: Request) -> Response:
        if await request.json() == {"crash": True}:
            raise RuntimeError("a bug")
        return JSONResponse({})

    answers = batches.run(handled_by(handler), line("bug", body={"crash": True}), line("good"))
    assert [answer["response"]["status_code"] for answer in answers] == [500, 200]


def test_an_error_of_the_engine_fails_its_line_only(batches: Batches) -> None:
    engine = FakeEngine()
    engine.script = fail(OverloadedError("full"))
    (answer,) = batches.run(make_app(engine, ServerConfig()), line())
    assert answer["response"]["status_code"] == 429
    assert batches.counts.failed == 1


def test_one_at_a_time_answers_come_in_the_order_of_the_file(batches: Batches) -> None:
    names = [str(i) for i in range(20)]
    assert ids(batches.run(None, *map(line, names), concurrency=1)) == names


def test_a_quick_answer_is_written_before_a_slow_earlier_one(batches: Batches) -> None:
    last_came = asyncio.Event()
    written: list[str] = []

    async def handler(request: Request) -> Response:
        name = (await request.json())["name"]
        if name == "slow":
            await last_came.wait()
            written.append(batches.target.read_text())
        if name == "last":
            last_came.set()
        return JSONResponse({"name": name})

    lines = [line(name, body={"name": name}) for name in ("slow", "quick", "last")]
    answers = batches.run(handled_by(handler), *lines, concurrency=2)
    assert ids(answers) == ["quick", "last", "slow"] or ids(answers) == ["quick", "slow", "last"]
    assert all(answer["response"]["body"]["name"] == answer["custom_id"] for answer in answers)
    assert '"quick"' in written[0], "an answer is in the file before the next is there"


@pytest.mark.parametrize("concurrency", [0, 1, 2, 5, 50])
def test_no_more_lines_than_allowed_are_in_flight(batches: Batches, concurrency: int) -> None:
    inside, most = 0, 0

    async def handler(request: Request) -> Response:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0)
        inside -= 1
        return JSONResponse({})

    app = handled_by(handler)
    answers = batches.run(app, *(line(str(i)) for i in range(20)), concurrency=concurrency)
    assert sorted(ids(answers), key=lambda name: int(name or -1)) == [str(i) for i in range(20)]
    assert most == max(1, min(concurrency, 20))
    assert batches.num_calls == 20


@pytest.mark.parametrize("places", [1, 3])
def test_lines_refused_for_want_of_room_are_sent_again(batches: Batches, places: int) -> None:
    inside, num_refused = 0, 0

    async def handler(request: Request) -> Response:
        nonlocal inside, num_refused
        if inside == places:
            num_refused += 1
            return JSONResponse({}, 429)
        inside += 1
        for _ in range(5):
            await asyncio.sleep(0)
        inside -= 1
        return JSONResponse({})

    answers = batches.run(handled_by(handler), *(line(str(i)) for i in range(12)), concurrency=8)
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 12
    assert num_refused > 0


def test_a_line_refused_while_the_last_other_one_ends_is_sent_again(batches: Batches) -> None:
    refused, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if (await request.json())["holds"]:
            await refused.wait()
            return JSONResponse({})
        if refused.is_set():
            return JSONResponse({})
        refused.set()
        await ended.wait()
        return JSONResponse({}, 429)

    lines = [line(str(holds), body={"holds": holds}) for holds in (True, False)]
    answers = batches.run(handled_by(handler), *lines, concurrency=2, on_answer=ended.set)
    assert [answer["response"]["status_code"] for answer in answers] == [200, 200]


def test_lines_that_never_find_room_fail_in_the_end(batches: Batches) -> None:
    async def handler(request: Request) -> Response:
        body = await request.json()
        await asyncio.sleep(0)
        return JSONResponse({}, 429 if body["large"] else 200)

    lines = [line(str(i), body={"large": i % 2 == 0}) for i in range(6)]
    answers = batches.run(handled_by(handler), *lines, concurrency=4)
    statuses = {answer["custom_id"]: answer["response"]["status_code"] for answer in answers}
    assert statuses == {str(i): 429 if i % 2 == 0 else 200 for i in range(6)}
