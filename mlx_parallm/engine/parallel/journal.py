"""The commands that bring an engine that was started anew to the state of the others."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mlx_parallm.engine.commands import EngineCommand, StateJournal
from mlx_parallm.engine.engine_commands import (
    CommitUpdate,
    Pause,
    PrepareUpdate,
    SleepModels,
    WakeModels,
)
from mlx_parallm.engine.live_weights import WeightsHistory
from mlx_parallm.engine.restoring import RestoreVersion
from mlx_parallm.types.request import SLEEP_TAGS


def catch_up(journal: StateJournal) -> Sequence[EngineCommand[Any]]:
    """Return what brings an engine that has just loaded to the state of the journal, in order."""
    loads = [*journal.unloaded.values(), *journal.models.values()]
    commands: list[EngineCommand[Any]] = [command for load in loads for command in load]
    commands += journal.resized.values()
    for model, history in journal.weights.items():
        commands += _updates(model, history)
    commands += journal.adapters.values()
    if journal.is_paused:
        commands.append(Pause())
    if journal.asleep:
        commands.append(SleepModels(journal.sleep_level))
        commands.append(WakeModels([tag for tag in SLEEP_TAGS if tag not in journal.asleep]))
    return [*commands, *journal.pending.values()]


def _updates(model: str, history: WeightsHistory) -> Generator[EngineCommand[Any]]:
    for update in filter(None, (history.folder, history.tensors)):
        yield PrepareUpdate(model, update)
        yield CommitUpdate(model)
    yield RestoreVersion(model, history)
