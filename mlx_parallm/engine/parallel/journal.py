"""The commands that bring an engine that was started anew to the state of the others.

Every command that all engines have carried out is noted here. Only the latest state is kept: an
adapter as it is now, and the tensors of a model that its folder does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_parallm.engine.commands import HostCommand
from mlx_parallm.engine.host_commands import (
    BeginAdapter,
    CommitAdapter,
    CommitUpdate,
    DropStagedAdapter,
    DropUpdate,
    EnsureAdapter,
    ListVersions,
    Pause,
    PrepareUpdate,
    RelabelWeights,
    RestoreVersion,
    Resume,
    SleepModels,
    UnloadAdapter,
    WakeModels,
)
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.loader import (
    AdvanceLoad,
    BeginLoad,
    CommitLoad,
    DropLoad,
    ForgetAdapters,
    UnloadModel,
)
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.weights import SLEEP_TAGS, WEIGHTS, WeightsVersion

# DROPS_WEIGHTS: the level of sleep from which weights are read again from the folder.
DROPS_WEIGHTS = 2


@dataclass(frozen=True, slots=True)
class FinishLoad(HostCommand[None]):
    """Load the rest of a model at once, for an engine that serves no request yet."""

    number: int

    def __call__(self, host: EngineLoop) -> None:
        """Apply the command."""
        while AdvanceLoad(self.number)(host) < 1:
            pass


@dataclass(slots=True)
class _Weights:
    """How a model's weights differ from those that it is loaded with.

    Attributes:
        folder: the update from a folder that replaced all of them; None if there was none.
        tensors: the updates since, joined; None if there was none.
        version: the version as it is now; None for that of a loaded model.
        folder_version: the version that came with ``folder``.
        num_updates: how many updates there were.
    """

    folder: WeightsUpdate | None = None
    tensors: WeightsUpdate | None = None
    version: WeightsVersion | None = None
    folder_version: WeightsVersion | None = None
    num_updates: int = 0


@dataclass(slots=True)
class StateJournal:
    """The state of engines that have all had the same commands.

    What is being prepared belongs to the state: its commit may come any time.
    """

    _pending: dict[tuple[str, int | str], HostCommand[Any]] = field(
        default_factory=dict[tuple[str, "int | str"], "HostCommand[Any]"]
    )
    _models: dict[str, BeginLoad] = field(default_factory=dict[str, BeginLoad])
    _adapters: dict[tuple[str, str], EnsureAdapter] = field(
        default_factory=dict[tuple[str, str], EnsureAdapter]
    )
    _weights: dict[str, _Weights] = field(default_factory=dict[str, _Weights])
    _asleep: tuple[str, ...] = ()
    _sleep_level: int = 0
    _is_paused: bool = False

    def note(self, action: HostCommand[Any], result: Any) -> None:
        """Note a command that every engine has carried out, and its result."""
        match action:
            case BeginLoad() | BeginAdapter() | PrepareUpdate():
                self._pending[_preparation(action)] = action
            case DropLoad() | DropStagedAdapter() | DropUpdate():
                self._pending.pop(_preparation(action), None)
            case CommitLoad() | CommitAdapter() | CommitUpdate():
                self._note_commit(self._pending.pop(_preparation(action)), result)
            case UnloadModel(name):
                self._models.pop(name, None)
            case Pause() | Resume():
                self._is_paused = isinstance(action, Pause)
            case _:
                self._note_change(action, result)

    def commands(self) -> Sequence[HostCommand[Any]]:
        """Return what brings an engine that has just loaded to this state, in order."""
        commands: list[HostCommand[Any]] = []
        for begin in self._models.values():
            commands += [begin, FinishLoad(begin.number), CommitLoad(begin.number)]
        for model, weights in self._weights.items():
            for update in filter(None, (weights.folder, weights.tensors)):
                commands += [PrepareUpdate(model, update), CommitUpdate(model)]
            version = weights.version or WeightsVersion()
            commands.append(RestoreVersion(model, version, weights.num_updates))
        commands += self._adapters.values()
        if self._is_paused:
            commands.append(Pause())
        if self._asleep:
            commands.append(SleepModels(self._sleep_level))
            commands.append(WakeModels([tag for tag in SLEEP_TAGS if tag not in self._asleep]))
        return [*commands, *self._pending.values()]

    def _note_commit(self, prepared: HostCommand[Any], result: Any) -> None:
        match prepared:
            case BeginLoad():
                self._models[result.names[0]] = prepared
            case BeginAdapter(upload=upload):
                info, (infos, _) = result
                self._note_adapter(upload, info)
                self._note_listed(infos)
            case PrepareUpdate(model, update):
                self._note_update(model, update, result)
            case _:
                raise AssertionError(prepared)

    def _note_change(self, action: HostCommand[Any], result: Any) -> None:
        """Note adapters, labels and sleep; other commands change nothing that stays."""
        match action:
            case EnsureAdapter(upload, model, evicted):
                if evicted is not None:
                    self._adapters.pop((model, evicted), None)
                if (model, upload.name) not in self._adapters:
                    self._note_adapter(upload, result)
            case UnloadAdapter(name, model):
                self._adapters.pop((model, name), None)
            case ForgetAdapters(name):
                self._keep_adapters(key for key in self._adapters if key[0] != name)
            case ListVersions():
                self._note_listed(result[0])
            case RelabelWeights(model):
                self._weights.setdefault(model, _Weights()).version = result
            case SleepModels(level):
                self._sleep(level)
            case WakeModels():
                self._wake(result)
            case _:
                pass

    def _note_adapter(self, upload: AdapterUpload, info: AdapterInfo) -> None:
        loaded = replace(
            upload,
            version=info.version,
            expected_version=None,
            replaces=True,
            is_pinned=info.is_pinned,
        )
        self._adapters[info.model, info.name] = EnsureAdapter(loaded, info.model)

    def _note_listed(self, infos: Sequence[AdapterInfo]) -> None:
        """Forget adapters that engines have evicted."""
        self._keep_adapters({(info.model, info.name) for info in infos})

    def _keep_adapters(self, keys: Iterable[tuple[str, str]]) -> None:
        kept = set(keys)
        self._adapters = {key: value for key, value in self._adapters.items() if key in kept}

    def _note_update(self, model: str, update: WeightsUpdate, version: WeightsVersion) -> None:
        weights = self._weights.setdefault(model, _Weights())
        update = replace(update, version=version.label, expected_version=None)
        weights.version = version
        weights.num_updates += 1
        if update.folder is not None:
            weights.folder, weights.tensors, weights.folder_version = update, None, version
            return
        before = weights.tensors.tensors if weights.tensors is not None else None
        weights.tensors = replace(update, tensors={**(before or {}), **(update.tensors or {})})

    def _sleep(self, level: int) -> None:
        self._asleep, self._sleep_level = SLEEP_TAGS, level
        if level < DROPS_WEIGHTS:
            return
        for weights in self._weights.values():
            # The tensors are lost; the folder is read again when the models wake up.
            weights.tensors = None

    def _wake(self, asleep: Sequence[str]) -> None:
        if WEIGHTS in self._asleep and WEIGHTS not in asleep and self._sleep_level >= DROPS_WEIGHTS:
            for weights in self._weights.values():
                weights.version = weights.folder_version
        self._asleep = tuple(asleep)


def _preparation(action: HostCommand[Any]) -> tuple[str, int | str]:
    """Return a key that is equal for the commands that begin, commit and drop one thing."""
    match action:
        case BeginLoad(number) | CommitLoad(number) | DropLoad(number):
            return "load", number
        case BeginAdapter(number) | CommitAdapter(number) | DropStagedAdapter(number):
            return "adapter", number
        case PrepareUpdate(model) | CommitUpdate(model) | DropUpdate(model):
            return "update", model
        case _:
            raise AssertionError(action)
