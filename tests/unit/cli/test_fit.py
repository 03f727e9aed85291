"""The first line of ``mlx_parallm models pull`` says whether a model fits, and into what."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.cli.models.fit import Need, Room, free_memory, verdict
from mlx_parallm.cli.server_client import ServerClient
from mlx_parallm.client.errors import RequestFailedError, ServerUnreachableError
from mlx_parallm.types.errors import ParallmError

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
}


class Server(ServerClient):
    """A server with this answer, or error."""

    def __init__(self, answer: Any, url: str = "http://server:1") -> None:
        super().__init__(url)
        self._answer = answer

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        assert (method, path) == ("GET", "/v1/memory")
        if isinstance(self._answer, ParallmError):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (8 * GIB, "fits: weights 7 GiB + KV of one context (8,192 tokens) 1 GiB = 8 GiB; "
         "http://server:1 has 8 GiB free"),
        (8 * GIB - 1, "does not fit: weights 7 GiB + KV of one context (8,192 tokens) 1 GiB"),
    ],
)  # fmt: skip
def test_weights_and_one_context_are_compared_with_the_servers_ledger(
    free: int, expected: str
) -> None:
    with Server({"limit_bytes": 64 * GIB, "free_bytes": free}) as server:
        room = free_memory(server)
    assert verdict(Need.of(LLAMA, 7 * GIB, None), room).startswith(expected)


def test_unknown_kv_is_not_said_to_fit() -> None:
    room = Room(GIB, "here")
    assert verdict(Need(GIB, None, 4096), room).startswith("the weights fit: weights 1 GiB + KV")
    assert verdict(Need(GIB + 1, None, 4096), room).startswith("does not fit: ")


def test_the_context_may_be_chosen() -> None:
    assert Need.of(LLAMA, GIB, 1024).kv == GIB // 8


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["BertModel"]}, "weights 1 GiB"),
        ({"architectures": ["XForCausalLM"]}, "weights 1 GiB + KV of one context (4,096 tokens) "
         "unknown"),
        ({"architectures": {"a": 1}, "max_position_embeddings": "long", "text_config": 1},
         "weights 1 GiB + KV of one context (4,096 tokens) unknown"),
        ({}, "weights 1 GiB + KV of one context (4,096 tokens) unknown"),
    ],
)  # fmt: skip
def test_models_without_kv_and_unknown_ones(config: dict[str, Any], expected: str) -> None:
    assert str(Need.of(config, GIB, None)) == expected


@pytest.mark.parametrize("answer", [{}, {"free_bytes": None}, [], {"free_bytes": "much"}])
def test_a_server_that_does_not_say_is_no_reason_to_guess(answer: Any) -> None:
    with Server(answer) as server:
        assert free_memory(server) == Room(None, "http://server:1")
    line = verdict(Need(GIB, 0, 1), Room(None, "http://server:1"))
    assert line == "memory: weights 1 GiB; the free memory of http://server:1 is unknown"


def test_a_server_of_this_machine_without_a_limit_has_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_parallm.worker.device.properties.free_memory_bytes", lambda: 5 * GIB)
    with Server({"limit_bytes": None, "free_bytes": None}, "http://localhost:1") as server:
        assert free_memory(server) == Room(5 * GIB, "this machine")


@pytest.mark.parametrize(
    "error", [ServerUnreachableError("gone"), RequestFailedError(404, "no such route")]
)
def test_without_a_ledger_the_machine_counts(
    error: ParallmError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.worker.device.properties.free_memory_bytes", lambda: 5 * GIB)
    with Server(error) as server:
        assert free_memory(server) == Room(5 * GIB, "this machine")
