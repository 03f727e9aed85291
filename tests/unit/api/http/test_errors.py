"""One table from errors to HTTP, complete and never 5xx for the caller's fault."""

from __future__ import annotations

import inspect
import json
from typing import Any

import httpx2
import pytest
from pydantic import ValidationError

from mlx_parallm.api.files.service import line_response
from mlx_parallm.api.http.errors import body_of, describe, response_of, status_of
from mlx_parallm.api.mezo.rows import PairRow
from mlx_parallm.batch_jobs.run import TRY_LATER
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types import errors
from tests.api_app import make_app, scope_of
from tests.fake_engine import FakeEngine

CHAT = scope_of("/v1/chat/completions")
STARTUP = {errors.ConfigError, errors.ModelLoadError}
MAKE: dict[type, Any] = {
    errors.ContextLengthError: lambda: errors.ContextLengthError(10, "Too long."),
    errors.ModelNotFoundError: lambda: errors.ModelNotFoundError("m"),
    errors.PausedError: errors.PausedError,
    errors.PeerRefusedError: lambda: errors.PeerRefusedError("why", status=409),
    errors.RankLostError: lambda: errors.RankLostError(1, "is gone"),
}
ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.ParallmError) and cls not in STARTUP
]


def make(cls: type[errors.ParallmError]) -> errors.ParallmError:
    return MAKE.get(cls, lambda: cls("why"))()


@pytest.mark.parametrize("cls", ALL)
def test_a_callers_fault_is_4xx_and_ours_is_not(cls: type[errors.ParallmError]) -> None:
    http = status_of(make(cls)).http
    callers = issubclass(cls, (errors.InvalidRequestError, errors.OverloadedError))
    assert (400 <= http < 500) == callers
    # Clients of OpenAI send these again by themselves: right only for a body that came too slowly.
    # The SDK repeats these. A conflict has changed nothing, so that repeating it does no harm.
    assert http != 408 or cls is errors.RequestTimeoutError
    assert http != 409 or issubclass(cls, errors.ConflictError)
    assert http != 422


@pytest.mark.parametrize("cls", ALL)
def test_every_body_has_openais_four_keys(cls: type[errors.ParallmError]) -> None:
    error = body_of(make(cls), CHAT)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/messages/count_tokens"])
def test_anthropics_routes_have_its_shape(cls: type[errors.ParallmError], path: str) -> None:
    scope = scope_of(path, state={"request_id": "r"})
    response = response_of(make(cls), scope)
    body = json.loads(bytes(response.body))
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["request_id"]) == ("error", "r")
    code = body_of(make(cls), CHAT)["error"]["code"]
    assert body["error"].pop("details", None) == ({"error_code": code} if code else None)
    assert set(body["error"]) == {"type", "message"}
    http = status_of(make(cls)).http
    assert response.status_code == (529 if http == 503 else http)
    kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
    kinds |= {403: "permission_error", 413: "request_too_large", 429: "rate_limit_error"}
    assert body["error"]["type"] == kinds.get(http, body["error"]["type"])
    assert (body["error"]["type"] in ("api_error", "overloaded_error")) == (http >= 500)


@pytest.mark.parametrize(
    "path", ["/v1/message", "/v1/messages2", "/x/messages", "/v1/files/messages"]
)
def test_other_routes_do_not(path: str) -> None:
    body = body_of(errors.StepError("no"), scope_of(path))
    assert set(body) == {"error"}


def test_a_prefix_of_a_proxy_does_not_hide_the_protocol() -> None:
    scope = scope_of("/llm/v1/messages", root_path="/llm")
    assert body_of(errors.StepError("no"), scope)["type"] == "error"


def test_the_field_is_told_in_anthropics_message() -> None:
    scope = scope_of("/v1/messages")
    for said, expected in (("a is bad", "a is bad"), ("it is bad", "tools: it is bad")):
        error = errors.InvalidRequestError(said, param="a" if said == expected else "tools")
        assert body_of(error, scope)["error"]["message"] == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ShuttingDownError("bye"), "shutting_down"),
        (errors.EngineDeadError("dead"), "engine_dead"),
        (errors.RequestLostError("dead"), "request_lost"),
        (errors.RankLostError(1, "is gone"), "engine_dead"),
    ],
)
def test_a_batch_knows_failures_of_one_status_by_their_codes(
    path: str, error: errors.ParallmError, code: str
) -> None:
    own = response_of(error, scope_of(path))
    line = line_response(httpx2.Response(own.status_code, content=bytes(own.body)))
    assert (line.status_code in TRY_LATER, line.error_code) == (True, code)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b'{"error": {"code": "request_lost"}}'),
        (503, b"<html>"),
        (503, b"[1]"),
        (503, b'{"error": "no"}'),
        (503, b'{"error": {"code": 7}}'),
        (503, b'{"error": {"details": {}}}'),
    ],
)
def test_an_answer_without_a_code_has_none(status: int, body: bytes) -> None:
    assert line_response(httpx2.Response(status, content=body)).error_code is None


def test_an_overload_says_when_to_come_back() -> None:
    response = response_of(errors.OverloadedError("full", retry_after_s=3), CHAT)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


def test_a_failed_step_tells_the_client_not_to_retry() -> None:
    response = response_of(errors.StepError("no"), CHAT)
    assert response.headers["x-should-retry"] == "false"
    assert json.loads(bytes(response.body))["error"]["type"] == "server_error"


def test_the_echo_of_a_long_name_is_bounded() -> None:
    error = body_of(errors.ModelNotFoundError("m" * 99_999), CHAT)["error"]
    assert len(error["message"]) == 1000
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("content", "content_type", "message"),
    [
        (b"{}", "text/plain", "The content type must be application/json."),
        (b"{}", "application/x-www-form-urlencoded", "The content type must be application/json."),
        (b"{}", None, "The content type must be application/json."),
        (b"", "application/json", "The body must be a JSON object."),
        (b"[1]", "application/json", "The body must be a JSON object."),
        (b"null", "Application/JSON; charset=utf-8", "The body must be a JSON object."),
        (b"{]", "application/json", "The body is not JSON: key must be a string at line 1 col"),
    ],
)
async def test_what_is_wrong_with_a_body_is_said(
    content: bytes, content_type: str | None, message: str
) -> None:
    transport = httpx2.ASGITransport(make_app(FakeEngine(), ServerConfig()))
    headers = {} if content_type is None else {"content-type": content_type}
    async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
        response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert response.json()["error"]["param"] is None


def test_the_echo_of_a_bad_body_is_bounded() -> None:
    problems = [{"loc": ("body", "x" * 9999), "msg": "y" * 9999, "type": "t"}] * 50
    assert len(describe(problems)) < 1200


def test_a_validators_own_message_is_said_as_it_is() -> None:
    with pytest.raises(ValidationError) as refused:
        PairRow.model_validate({"chosen": "", "rejected": "Later."})
    assert describe(refused.value.errors()) == "chosen cannot be empty"
