"""The text that a server shows people: it says where it is, what it has, and what to try."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from mlx_parallm.cli.banner import banner, url_of
from mlx_parallm.engine.status import ModelState, ModelStatus
from tests.fake_engine import FakeEngine

(LOADED,) = FakeEngine().statuses()
AWAY = replace(LOADED, names=("other/model",), state=ModelState.EVICTED)
UNKNOWN = replace(AWAY, names=("new",), state=ModelState.LOADING, model=None)
HERE = [("127.0.0.1", 8000)]


def test_models_have_states_and_memory() -> None:
    text = banner([LOADED, AWAY, UNKNOWN], HERE, needs_key=False)
    assert "models org/fake     loaded" in text
    assert "other/model  evicted" in text
    assert "new          loading" in text
    assert text.count("bytes") + text.count("iB") == 2
    assert all(len(line) < 200 for line in text.splitlines())


def test_loaded_models_come_first_of_many() -> None:
    text = banner([AWAY] * 200 + [LOADED], HERE, needs_key=False)
    assert "models org/fake" in text
    assert "and 193 more: http://127.0.0.1:8000/v1/models" in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize(
    ("statuses", "path"),
    [([LOADED], "/v1/chat/completions"), ([UNKNOWN], "/v1/models"), ([], "/v1/models")],
)
@pytest.mark.parametrize("needs_key", [False, True])
def test_the_example_is_a_command(statuses: list[ModelStatus], path: str, needs_key: bool) -> None:
    text = banner(statuses, HERE, needs_key=needs_key)
    words = shlex.split(text.partition("  try    ")[2])
    assert words[:2] == ["curl", f"http://127.0.0.1:8000{path}"]
    assert ("authorization: Bearer $KEY" in words) is needs_key
    assert ("(with a key)" in text) is needs_key


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("fd00::1", "http://[fd00::1]:1"),
        ("192.168.0.4", "http://192.168.0.4:1"),
    ],
)
def test_the_address_is_one_that_a_browser_here_can_open(host: str, url: str) -> None:
    assert url_of(host, 1) == url
