"""Commands to all models of the engine thread, which it carries out between two steps.

A command is a plain value with a name, so that it can go to engines in another process, or to
several. Adapters and weights change in two commands: the first prepares the change, raises what is
wrong with it, and alters nothing that requests see; the second commits it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from mlx_parallm.engine.commands import (
    Change,
    EngineCommand,
    JoinsResults,
    LeavesNothing,
    LoopState,
    StateJournal,
)
from mlx_parallm.engine.live_weights import LiveWeights, WeightsHistory, WeightsUpdate
from mlx_parallm.engine.models import ServedEngine
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.request import DROPS_WEIGHTS, SLEEP_TAGS, WEIGHTS, WeightsVersion


@dataclass(frozen=True, slots=True)
class Pause(Change, EngineCommand[int], JoinsResults):
    """Begin no more steps; return how many requests are kept."""

    def __call__(self, loop: LoopState) -> int:
        """Apply the command."""
        loop.is_paused = True
        for engine in loop.takers():
            engine.is_paused = True
            # No token may come after the answer.
            loop.deliver(engine.settle())
        return sum(engine.num_requests for engine in loop.takers())

    @override
    def together(self, results: Sequence[int]) -> int:
        """Each engine has requests of its own."""
        return sum(results)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.is_paused = True


@dataclass(frozen=True, slots=True)
class Resume(Change, EngineCommand[None]):
    """Begin steps again."""

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        loop.is_paused = False
        for engine in loop.takers():
            engine.is_paused = False

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.is_paused = False


@dataclass(frozen=True, slots=True)
class ResetCaches(Change, LeavesNothing, EngineCommand[None]):
    """Forget what every model computed before; see ``ServedEngine.reset_cache``."""

    reset_running: bool
    reset_external: bool = True

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        for engine in loop.engines.values():
            loop.deliver(engine.settle())
            engine.reset_cache(reset_running=self.reset_running, reset_external=self.reset_external)


@dataclass(frozen=True, slots=True)
class PrepareUpdate(EngineCommand[None]):
    """Have new weights of a model ready; raise as ``LiveWeights.prepare`` does."""

    model: str
    update: WeightsUpdate

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        live_weights(loop.engines[self.model]).prepare(self.update)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending["update", self.model] = self


@dataclass(frozen=True, slots=True)
class CommitUpdate(Change, EngineCommand[WeightsVersion]):
    """Compute with the weights that were prepared; see ``LiveWeights.commit``."""

    model: str
    digest: str | None = None

    def __call__(self, loop: LoopState) -> WeightsVersion:
        """Apply the command."""
        engine = loop.engines[self.model]
        # The tokens of the step in flight are those of the old weights.
        loop.deliver(engine.settle())
        version = live_weights(engine).commit(self.digest)
        _forget_beside(loop, self.model)
        return version

    @override
    def noted(self, journal: StateJournal, result: WeightsVersion) -> None:
        prepared: PrepareUpdate = journal.pending.pop(("update", self.model))
        history = journal.weights.get(self.model, WeightsHistory())
        journal.weights[self.model] = history.updated(prepared.update, result)


@dataclass(frozen=True, slots=True)
class DropUpdate(EngineCommand[None]):
    """Forget the weights that were prepared for a model, if there are any."""

    model: str

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        engine = loop.engines.get(self.model)
        if engine is not None and engine.live is not None:
            engine.live.drop_prepared()

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending.pop(("update", self.model), None)


@dataclass(frozen=True, slots=True)
class ReadChecksums(LeavesNothing, EngineCommand[Mapping[str, str]]):
    """Return the SHA-256 of each weight of a model; see ``LiveWeights.checksums``."""

    model: str

    def __call__(self, loop: LoopState) -> Mapping[str, str]:
        """Apply the command."""
        return live_weights(loop.engines[self.model]).checksums()


@dataclass(frozen=True, slots=True)
class RelabelWeights(Change, EngineCommand[WeightsVersion]):
    """Give the version of a model's weights another label; see ``LiveWeights.relabel``."""

    model: str
    label: str

    def __call__(self, loop: LoopState) -> WeightsVersion:
        """Apply the command."""
        return live_weights(loop.engines[self.model]).relabel(self.label)

    @override
    def noted(self, journal: StateJournal, result: WeightsVersion) -> None:
        history = journal.weights.get(self.model, WeightsHistory())
        journal.weights[self.model] = replace(history, version=result)


@dataclass(frozen=True, slots=True)
class SleepModels(Change, EngineCommand[None]):
    """Free memory of every model whose weights can change; see ``LiveWeights.sleep``."""

    level: int

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        loop.asleep, loop.sleep_level = SLEEP_TAGS, self.level
        for model, engine in loop.engines.items():
            _forget_beside(loop, model)
            engine.save()
        for live in _changeable(loop):
            live.sleep(self.level)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.asleep, journal.sleep_level = SLEEP_TAGS, self.level
        if self.level >= DROPS_WEIGHTS:
            for model, history in journal.weights.items():
                # The folder is read again when the models wake up.
                journal.weights[model] = replace(history, tensors=None)


@dataclass(frozen=True, slots=True)
class WakeModels(Change, EngineCommand[list[str]], JoinsResults):
    """Allocate memory again; return which of ``SLEEP_TAGS`` are still asleep."""

    tags: Sequence[str]

    def __call__(self, loop: LoopState) -> list[str]:
        """Apply the command."""
        asleep = [tag for tag in loop.asleep if tag not in self.tags]
        if changeable := _changeable(loop):
            for live in changeable:
                live.wake(self.tags)
            asleep = [tag for tag in SLEEP_TAGS if any(tag in live.asleep for live in changeable)]
        loop.asleep = asleep
        return asleep

    @override
    def together(self, results: Sequence[list[str]]) -> list[str]:
        return [tag for tag in SLEEP_TAGS if any(tag in asleep for asleep in results)]

    @override
    def noted(self, journal: StateJournal, result: Sequence[str]) -> None:
        is_back = WEIGHTS in journal.asleep and WEIGHTS not in result
        if is_back and journal.sleep_level >= DROPS_WEIGHTS:
            for model, history in journal.weights.items():
                journal.weights[model] = replace(history, version=history.folder_version)
        journal.asleep = result


def live_weights(engine: ServedEngine) -> LiveWeights:
    """Return a model's own weights; raise InvalidRequestError if they never change."""
    if engine.live is None:
        raise InvalidRequestError("The weights of this model cannot be changed.", param="model")
    return engine.live


def _forget_beside(loop: LoopState, model: str) -> None:
    """Free what the work beside the models keeps of one."""
    for work in loop.beside:
        work.forget(model)


def _changeable(loop: LoopState) -> list[LiveWeights]:
    return [engine.live for engine in loop.engines.values() if engine.live is not None]
