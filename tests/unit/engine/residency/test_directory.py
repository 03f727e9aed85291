"""Models that lie in folders: their names, and looks at the folders that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm.config import EngineConfig, LoadingConfig
from mlx_parallm.engine import directory
from mlx_parallm.engine.catalogue import FoundModel
from mlx_parallm.engine.core import EngineCore


class NoEngines:
    """Stands for the life of engines that are asked nothing else."""

    put = None

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
