"""A life of engines on a thread: what ends before what."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.build import build_models
from mlx_parallm.engine.commands import Stop
from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.worker import Worker
from tests.sum_kind import SumKind, write_sum_model


class NotingWorker(Worker):
    """Notes how many engines there are when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.engines = weakref.WeakSet[Any]()
        self.closed: list[int] = []

    @override
    def close(self) -> None:
        super().close()
        self.closed.append(len(self.engines))


def life_of(config: EngineConfig, worker: NotingWorker, problem: Exception | None) -> LocalLife:
    def build(*arguments: Any) -> Sequence[BuiltModel]:
        built = build_models((SumKind(),), *arguments)
        worker.engines.update(each.engine for each in built)
        if problem is not None:
            raise problem
        return built

    opened = nullcontext(worker)
    return LocalLife(config, lambda *_: None, build, open_worker=lambda *_: opened)


@pytest.mark.parametrize("problem", [None, ModelLoadError("gone"), RuntimeError("loop")])
def test_the_worker_is_closed_before_engines_are_freed(
    tmp_path: Path, problem: Exception | None
) -> None:
    """Check the order, because a thread may still submit a step, whose arrays engines have."""
    write_sum_model(tmp_path / "sums", 1000)
    config = EngineConfig(
        models=(ModelConfig(path=str(tmp_path / "sums"), served_names=("sums",)),)
    )
    worker = NotingWorker()
    is_late = isinstance(problem, RuntimeError)
    life = life_of(config, worker, None if is_late else problem)

    def on_loaded(_: object) -> None:
        if problem is not None:
            raise problem

    life.put(Stop())
    run = partial(life.run, lambda _: None, on_loaded)
    if problem is None:
        run()
    else:
        with pytest.raises(type(problem)):
            run()
    assert worker.closed == [1]
