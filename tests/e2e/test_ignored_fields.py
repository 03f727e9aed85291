"""Every route reports the fields of its body that it did not read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mlx_parallm.api.app import SLICES, STORING_SLICES, routes_of
from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.http.json_body import JsonRoute, ignored_names
from mlx_parallm.api.http.routing import DeclaredRoute
from mlx_parallm.api.responses.schema import ResponsesRequest
from mlx_parallm.api.sglang.schema import GenerateBody
from mlx_parallm.server_config import ServerConfig
from tests.api_app import make_app
from tests.fake_engine import FakeEngine, serve_fake

HI = [{"role": "user", "content": "hi"}]
# These routes read their bodies themselves, which may be tensors or files.
OWN_READING = {
    "/v1/update_adapter_weights",
    "/load_lora_adapter_from_tensors",
    "/update_weights",
    "/update_weights_from_tensor",
    "/v1/files",
    "/v1/uploads/{upload_id}/parts",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/rl/act",
    "/v2/models/{name}/infer",
}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"model": "alias", "input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/rl/rollout": {"prompts": ["hi"]},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/chat/completions/render": {"messages": HI},
    "/v1/completions/render": {"prompt": "hi"},
    "/apply-template": {"messages": HI},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
    "/generate": {"text": "hi"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "hi"},
    "/inference/v1/generate": {"token_ids": [65], "sampling_params": {}},
    "/abort_request": {"rid": "none"},
    "/pause_generation": {},
    "/reset_prefix_cache": {},
}


def all_routes() -> list[DeclaredRoute]:
    return routes_of(SLICES + STORING_SLICES)


def test_the_body_of_every_operation_is_compared_with_its_form() -> None:
    with_body = [route for route in all_routes() if route.body_field is not None]
    assert len(with_body) > 40
    for route in with_body:
        assert isinstance(route, JsonRoute), route.path
        assert route.form is not None, route.path
        if route.form.model_config.get("extra") != "forbid":
            assert ignored_names(route.form, {"never_heard_of": 1}) == {"never_heard_of"}


def test_no_other_operation_has_a_body(tmp_path: Path) -> None:
    document = make_app(FakeEngine(), ServerConfig(data_dir=str(tmp_path))).openapi()
    described = {
        path
        for path, operations in document["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }
    # The schema does not say that a part of a path may have slashes.
    compared = {
        route.path.replace(":path", "") for route in all_routes() if route.body_field is not None
    }
    rest = {path for path in described if not compared & {path, path.removeprefix("/v1")}}
    assert rest == OWN_READING


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve_fake(FakeEngine()) as url:
        yield url


@pytest.mark.parametrize("path", ASKED)
def test_clients_are_told(url: str, path: str) -> None:
    known = httpx2.post(url + path, json=ASKED[path] | {"null_is_absent": None})
    assert known.status_code == 200, known.text
    assert "x-ignored-fields" not in known.headers
    unknown = httpx2.post(url + path, json=ASKED[path] | {"never_heard_of": 1})
    assert unknown.status_code == 200, unknown.text
    assert unknown.headers["x-ignored-fields"] == "never_heard_of"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_streams_tell_it_too(url: str, path: str) -> None:
    body = ASKED[path] | {"stream": True, "never_heard_of": 1}
    assert httpx2.post(url + path, json=body).headers["x-ignored-fields"] == "never_heard_of"


def test_options_are_named_with_their_field() -> None:
    body = {"stream_options": {"include_obfuscation": False, "a": 1}, "metadata": {"b": 2}}
    assert ignored_names(ChatRequest, body) == {"stream_options.a"}
    # The keys of messages go to the template.
    assert ignored_names(ChatRequest, {"messages": [{"role": "user", "c": 3}]}) == set()
    sampling = [{"top_p": 1}, {"e": 5}]
    assert ignored_names(GenerateBody, {"sampling_params": sampling}) == {"sampling_params.e"}
    assert ignored_names(ResponsesRequest, {"reasoning": {"d": 4}}) == {"reasoning.d"}
