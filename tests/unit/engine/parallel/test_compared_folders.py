"""Engines on other machines take weights only from folders that are as on the server's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.engine.commands import Call
from mlx_parallm.engine.engine_commands import PrepareUpdate
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.parallel.life import compared
from mlx_parallm.types.errors import InvalidRequestError
from tests.fleet_harness import FakeFleet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def ignore(result: Any) -> None:
    """Do nothing."""


def call(update: WeightsUpdate) -> Call:
    """Return a command as an engine on another machine gets it."""
    return compared(Call(action=PrepareUpdate("m", update), reply=ignore))


def test_only_weights_of_a_folder_are_compared(folder: Path) -> None:
    tensors = Call(action=PrepareUpdate("m", WeightsUpdate(tensors={})), reply=ignore)
    assert compared(tensors) is tensors
    action = call(WeightsUpdate(folder=folder, version="7")).action
    assert isinstance(action, PrepareUpdate)
    assert action.update.copy is not None
    assert action.update.copy.path == str(folder)
    assert action.update.version == "7"


def test_an_update_from_another_folder_changes_no_engine(folder: Path) -> None:
    fleet = FakeFleet(2)
    action = call(WeightsUpdate(folder=folder)).action
    assert fleet.call(action) is None
    (folder / "config.json").write_text('{"other": 1}')
    refusal = fleet.call(action)
    assert isinstance(refusal, InvalidRequestError)
    assert "config.json has " in str(refusal)
    assert [life.weights.prepared for life in fleet.lives] == [None, None]
    # An engine that is started anew compares it, too.
    (folder / "config.json").write_text("{}")
    assert fleet.call(action) is None
    fleet.commit()
    fleet.kill(1)
    assert fleet.states()[0] == fleet.states()[1]
    fleet.stop()
