"""Ollama's descriptions of models, loaded or not."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.api.control.server.models import model_card
from mlx_parallm.api.ollama.models import FOREVER, described, listed, running, served_name
from mlx_parallm.engine.models import ModelMemory
from tests.fake_engine import FakeEngine

ENGINE = FakeEngine()
(STATUS,) = ENGINE.statuses()
MEMORY = {"org/fake": ModelMemory(weights=100, kv=50)}
CARD = model_card("org/fake", STATUS, MEMORY)
#: A model that lies in a folder, and was never loaded.
FOUND: dict[str, Any] = {
    **model_card("new", STATUS, {}),
    "created": 0,
    "max_model_len": None,
    "tasks": None,
    "status": "available",
    "memory": None,
    "size_bytes": 7,
}


def test_a_loaded_model_is_listed_and_running() -> None:
    entry = listed(CARD, STATUS.model)
    assert entry is not None
    assert (entry["name"], entry["size"]) == ("org/fake:latest", 100)
    assert "completion" in entry["capabilities"]
    assert len(bytes.fromhex(entry["digest"])) == 32
    process = running(CARD, STATUS.model)
    assert process is not None
    assert (process["size"], process["size_vram"], process["expires_at"]) == (150, 150, FOREVER)
    soon = running({**CARD, "expires_in_s": 60}, STATUS.model)
    assert soon is not None
    assert soon["modified_at"] < soon["expires_at"] < FOREVER


def test_a_model_that_was_never_loaded_is_listed_alone() -> None:
    entry = listed(FOUND, None)
    assert entry is not None
    assert (entry["name"], entry["size"], entry["capabilities"]) == ("new:latest", 7, [])
    assert running(FOUND, None) is None
    assert described(FOUND, None)["model_info"]["mlx.context_length"] is None


def test_models_of_other_kinds_are_left_out() -> None:
    assert listed(CARD, object()) is None


@pytest.mark.parametrize(
    ("name", "served"),
    [
        (None, None),
        ("alias", "alias"),
        ("alias:latest", "alias"),
        ("x:8b", "x:8b"),
    ],
)
def test_a_tag_may_be_added(name: str | None, served: str | None) -> None:
    assert served_name(ENGINE, name) == served
