"""One table from errors to HTTP, complete and never 5xx for the caller's fault."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from mlx_parallm import errors
from mlx_parallm.api.errors import body_of, describe, response_of, status_of

STARTUP = {errors.ConfigError, errors.ModelLoadError}
MAKE: dict[type, Any] = {
    errors.ContextLengthError: lambda: errors.ContextLengthError(10, "Too long."),
    errors.ModelNotFoundError: lambda: errors.ModelNotFoundError("m"),
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
    assert http not in (408, 409, 422)


@pytest.mark.parametrize("cls", ALL)
def test_every_body_has_openais_four_keys(cls: type[errors.ParallmError]) -> None:
    error = body_of(make(cls))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


def test_an_overload_says_when_to_come_back() -> None:
    response = response_of(errors.OverloadedError("full", retry_after_s=3))
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


def test_a_failed_step_tells_the_client_not_to_retry() -> None:
    response = response_of(errors.StepError("no"))
    assert response.headers["x-should-retry"] == "false"
    assert json.loads(bytes(response.body))["error"]["type"] == "server_error"


def test_the_echo_of_a_bad_body_is_bounded() -> None:
    problems = [{"loc": ("body", "x" * 9999), "msg": "y" * 9999, "type": "t"}] * 50
    assert len(describe(problems)) < 1200
