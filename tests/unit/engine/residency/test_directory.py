"""Models that lie in folders: their names, and looks at the folders that fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm.config import EngineConfig, LoadingConfig, ModelConfig
from mlx_parallm.engine import directory
from mlx_parallm.engine.catalogue import FoundModel
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.kind import ModelLoad
from mlx_parallm.engine.model_entry import SHOWN, ModelEntry
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.types.errors import EngineDeadError, InvalidRequestError, ModelNotFoundError
from tests.virtual_time import in_virtual_time


class NoEngines:
    """Stands for the life of engines that are asked nothing else."""

    def put(self, command: object) -> None:
        """Refuse."""
        raise EngineDeadError(str(command))

    async def query(self, question: object) -> None:
        """Return no limit of memory."""


def core_of(**loading: Any) -> EngineCore:
    config = EngineConfig(loading=LoadingConfig(**loading))
    return EngineCore(config, (), cast("Any", NoEngines()))


class Scans:
    """Stands for a catalogue: each look raises, or has models."""

    def __init__(self, *looks: Exception | dict[str, FoundModel]) -> None:
        self.looks = list(looks)

    def __bool__(self) -> bool:
        return True

    def scan(self) -> dict[str, FoundModel]:
        look = self.looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look


def found(*names: str) -> dict[str, FoundModel]:
    return {name: FoundModel(name, Path("/models") / name, 1) for name in names}


@pytest.mark.parametrize("problem", [OSError("gone"), RuntimeError("loop"), ValueError("name")])
async def test_a_look_that_fails_is_logged_and_another_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: Exception
) -> None:
    monkeypatch.setattr(directory, "SCAN_S", 0)
    core = core_of()
    core.directory._catalogue = cast("Any", Scans(problem, found("late")))
    listed = asyncio.Event()

    async def announce() -> None:
        listed.set()

    core.control.announce = announce
    watch = asyncio.ensure_future(core.directory.watch())
    done, _ = await asyncio.wait(
        [watch, asyncio.ensure_future(listed.wait())], return_when=asyncio.FIRST_COMPLETED
    )
    assert watch not in done
    watch.cancel()
    assert core.find("late") is not None
    assert str(problem) in caplog.text


@pytest.mark.parametrize("foreign", ["gpt-oss-tiny", "claude-like", "gpt-4o"])
def test_the_default_model_takes_no_folders_name(foreign: str) -> None:
    core = core_of(default_model="plain")
    core.directory.list_found(found("plain", foreign))
    status, plain = core.find(foreign), core.find("plain")
    assert status is not None
    assert plain is not None
    assert (status.names, plain.names) == ((foreign,), ("plain",))
    # A name of nothing else is the default model's still, and is not one of an adapter.
    other = core.find("gpt-5")
    assert other is not None
    assert other.names == ("plain",)
    assert core.directory.is_taken(foreign)
    assert not core.directory.is_taken("gpt-5")


async def test_a_model_may_be_loaded_under_a_name_that_the_default_model_answers() -> None:
    core = core_of(default_model="plain")
    core.directory.list_found(found("plain"))
    # The name is free, and the load goes on until it meets no engine.
    with pytest.raises(EngineDeadError):
        await core.load_model(ModelLoad(model="demo:mlm", names=("gpt-own",)))
    with pytest.raises(InvalidRequestError, match="is the name of a model"):
        await core.load_model(ModelLoad(model="demo:mlm", names=("plain",)))
    with pytest.raises(ModelNotFoundError):
        await core.unload_model("gpt-own")


def test_names_cost_the_same_with_any_number_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    status = ModelEntry.status

    def noting(entry: ModelEntry) -> ModelStatus:
        calls["status"] += 1
        return status(entry)

    monkeypatch.setattr(ModelEntry, "status", noting)
    core = core_of()
    models = found(*(f"model-{number}" for number in range(2000)))
    core.directory.list_found(models)
    core.directory.list_found(models)
    assert len(core.model_names()) == 2000
    for number in range(10_000):
        assert core.find(f"nothing-{number}") is None
        assert "and 1990 more" in str(core.not_found(f"org:nothing:{number}"))
    assert not calls
    core.directory.list_found({})
    assert not calls
    assert not core.model_names()


@in_virtual_time
async def test_a_time_to_live_holds_for_a_request_that_ended_before() -> None:
    core = core_of()
    core.directory.list_found(found("m"))
    entry, _ = core.directory.address("m")
    assert entry is not None
    entry.is_loaded = True
    async with core.directory.held(entry):
        core.set_ttl("m", 5)
        assert core.directory.expires_in_s("m") is None
    assert core.directory.expires_in_s("m") == 5
    core.set_ttl("m", 2)
    assert core.directory.expires_in_s("m") == 2
    core.set_ttl("m", None)
    assert core.directory.expires_in_s("m") is None


def test_every_change_that_a_status_shows_is_counted() -> None:
    core = core_of()
    core.directory.list_found(found("m"))
    entry, _ = core.directory.address("m")
    assert entry is not None
    loop = asyncio.new_event_loop()
    other: dict[str, Any] = {
        "config": ModelConfig(path="/elsewhere"),
        "names": ("n",),
        "loading": loop.create_future(),
        "waiting": [],
        "idle": asyncio.Event(),
        "timer": None,
        "on_shown": entry.on_shown,
    }
    loop.close()
    for field in fields(ModelEntry):
        before, number = entry.status(), core.directory.number
        now = getattr(entry, field.name)
        value = other.get(field.name, not now if isinstance(now, bool) else 7)
        setattr(entry, field.name, value)
        if entry.status() != before:
            assert core.directory.number > number, field.name
        else:
            assert core.directory.number == number or field.name in SHOWN, field.name
        setattr(entry, field.name, now)


async def test_progress_is_counted_about_once_a_second() -> None:
    core = core_of()
    core.directory.list_found(found("m"))
    entry, _ = core.directory.address("m")
    assert entry is not None
    moves = Counter[str]()
    core.directory.on_moved(lambda: moves.update(["move"]))
    for number in range(1, 1000):
        entry.progress = number / 1000
    assert 1 <= moves["move"] < 20
    before = moves["move"]
    entry.is_loaded = True
    entry.is_loaded = True
    core.set_ttl("m", 5)
    core.set_ttl("m", 5.0)
    assert moves["move"] == before + 2
