"""Keys, origins and request ids, against a server that has them set."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest

from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def locked_server() -> Iterator[ServerProcess]:
    server = ServerProcess(
        "--api-key", "one", "--api-key", "two", "--max-model-len", "256",
        "--served-model-name", "a/b", "--served-model-name", "alias",
        "--allowed-origins", "https://page.example",
        env={"MLX_PARALLM_API_KEYS": "three"},
    )  # fmt: skip
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"x-api-key": ""}],
)
def test_a_wrong_key_is_a_401(locked_server: ServerProcess, headers: dict[str, str]) -> None:
    response = httpx2.get(f"{locked_server.url}/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{locked_server.url}/v1", api_key="no", max_retries=0) as client,
    ):
        client.models.list()


def test_a_misspelt_variable_is_told_once(locked_server: ServerProcess) -> None:
    warning = "MLX_PARALLM_API_KEYS (did you mean MLX_PARALLM_API_KEY?)"
    assert locked_server.log.count(warning) == 1
    assert "three" not in locked_server.log


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "two"}],
)
def test_any_of_the_keys_opens_by_either_header(
    locked_server: ServerProcess, headers: dict[str, str]
) -> None:
    response = httpx2.get(f"{locked_server.url}/models", headers=headers)
    assert [model["id"] for model in response.json()["data"]] == ["a/b", "alias"]
    response = httpx2.get(f"{locked_server.url}/v1/models/a/b", headers=headers)
    assert response.json()["max_model_len"] == 256


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/docs", "/openapi.json"])
def test_supervisors_need_no_key(locked_server: ServerProcess, path: str) -> None:
    assert httpx2.get(locked_server.url + path).status_code == 200


def test_a_sane_request_id_comes_back_and_others_are_replaced(locked_server: ServerProcess) -> None:
    url = f"{locked_server.url}/health"
    assert httpx2.get(url, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    replaced = httpx2.get(url, headers={"x-request-id": "x" * 300}).headers["x-request-id"]
    assert len(replaced) == 32


def test_only_the_named_origin_may_read(locked_server: ServerProcess) -> None:
    headers = {"access-control-request-method": "POST"}
    url = f"{locked_server.url}/v1/chat/completions"
    named = httpx2.options(url, headers={"origin": "https://page.example", **headers})
    other = httpx2.options(url, headers={"origin": "https://other.example", **headers})
    assert named.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in other.headers
