"""Commands about adapters to all models of the engine thread; see ``engine_commands``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.commands import (
    Change,
    EngineCommand,
    JoinsResults,
    LeavesNothing,
    LoopState,
    NeedsDecision,
    StateJournal,
)
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload, Policies
from mlx_parallm.engine.restoring import RestoreAdapter
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError, OverloadedError
from mlx_parallm.types.request import WeightsVersion

#: All adapters, and the versions of the models themselves by their first names.
LoadedVersions = tuple[Sequence[AdapterInfo], Mapping[str, WeightsVersion]]


@dataclass(frozen=True, slots=True)
class ListVersions(EngineCommand[LoadedVersions]):
    """Return what requests are computed with; versions are of models whose weights can change."""

    def __call__(self, loop: LoopState) -> LoadedVersions:
        """Apply the command."""
        having = [*loop.policies.values(), *loop.missed.values()]
        infos = [info for each in having for info in each.infos()]
        engines = loop.engines.items()
        changeable = {name: engine for name, engine in engines if engine.live is not None}
        return infos, {name: engine.policies.base.version for name, engine in changeable.items()}

    @override
    def noted(self, journal: StateJournal, result: LoadedVersions) -> None:
        # Engines may have evicted some.
        kept = {(info.model, info.name) for info in result[0]}
        for key in journal.adapters.keys() - kept:
            del journal.adapters[key]


@dataclass(frozen=True, slots=True)
class BeginAdapter(EngineCommand[bool], JoinsResults):
    """Check an adapter and upload its first part into a slot; return True if there is more.

    Raises:
        VersionMismatchError: another version is there than was expected.
        InvalidRequestError: it does not fit the model, or its name is taken.
        ModelNotFoundError: the model was unloaded.

    Attributes:
        number: unique among the adapters that are being prepared.
        upload: the adapter.
        model: the first name of its model.
        takes_slot: whether to put it into a slot ahead of the first batch that names it.
    """

    number: int
    upload: AdapterUpload
    model: str
    takes_slot: bool

    def __call__(self, loop: LoopState) -> bool:
        """Apply the command."""
        check_owner(loop, self.upload.name, self.model)
        policies = policies_of(loop, self.model)
        staging = AdapterStaging(self.upload, policies, takes_slot=self.takes_slot)
        loop.stagings[self.number] = staging
        return staging.advance()

    @override
    def together(self, results: Sequence[bool]) -> bool:
        """Return True if any has more: an engine without a free slot has no parts to put."""
        return any(results)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending["adapter", self.number] = self


@dataclass(frozen=True, slots=True)
class StageAdapterPart(LeavesNothing, EngineCommand[bool], JoinsResults):
    """Upload the next part of an adapter; see ``BeginAdapter``."""

    number: int

    def __call__(self, loop: LoopState) -> bool:
        """Apply the command."""
        return loop.stagings[self.number].advance()

    @override
    def together(self, results: Sequence[bool]) -> bool:
        return any(results)


#: The adapters that can be evicted for another one, by their last use; None if there is room.
Evictable = Sequence[str] | None


def _choose_evicted(results: Sequence[Evictable]) -> str | None:
    """Return which adapter all engines are to evict; None if there is room.

    Raises:
        OverloadedError: each adapter has requests at some engine.
    """
    lists = [names for names in results if names is not None]
    if not lists:
        return None
    common = set(lists[0]).intersection(*lists[1:])
    if not common:
        raise OverloadedError("Requests use every adapter that could be evicted for another.")
    # An adapter counts as used as recently as at the engine that used it last.
    return min(sorted(common), key=lambda name: max(names.index(name) for names in lists))


def first_evictable(result: Evictable | str) -> str | None:
    """Return which adapter an answer to ``FindRoom`` names first; None if there is room."""
    return result if result is None or isinstance(result, str) else result[0]


@dataclass(frozen=True, slots=True)
class FindRoom(LeavesNothing, EngineCommand[Evictable], JoinsResults):
    """Return what can be evicted for an adapter of a model; raise as ``Policies.load`` does."""

    name: str
    model: str
    spared: frozenset[str] = frozenset()

    def __call__(self, loop: LoopState) -> Evictable:
        """Apply the command."""
        return policies_of(loop, self.model).evictable_for(self.name, self.spared)

    @override
    def together(self, results: Sequence[Evictable]) -> str | None:
        return _choose_evicted(results)


@dataclass(frozen=True, slots=True)
class FindRoomForStaged(LeavesNothing, EngineCommand[Evictable], JoinsResults):
    """Return what can be evicted for a prepared adapter; raise as ``Policies.load`` does.

    Attributes:
        number: of its ``BeginAdapter``.
        evicted: what is to be evicted if it is loaded.
        spared: what is not.
    """

    number: int
    evicted: str | None = None
    spared: frozenset[str] = frozenset()

    def __call__(self, loop: LoopState) -> Evictable:
        """Apply the command."""
        staging = loop.stagings[self.number]
        if self.evicted is not None and staging.policies.has(self.evicted):
            return [self.evicted]
        return staging.policies.evictable_for(staging.upload.name, self.spared)

    @override
    def together(self, results: Sequence[Evictable]) -> str | None:
        return _choose_evicted(results)


@dataclass(frozen=True, slots=True)
class CommitAdapter(Change, EngineCommand[tuple[AdapterInfo, LoadedVersions]], NeedsDecision):
    """Let requests use a prepared adapter; return it, and all that is loaded.

    Raises as ``Policies.load`` does.

    Attributes:
        number: of its ``BeginAdapter``.
        evicted: the adapter to evict for it; None lets the engine choose if there is no room.
        spared: adapters that the engine does not choose.
    """

    number: int
    evicted: str | None = None
    spared: frozenset[str] = frozenset()

    @override
    def inquiry(self) -> FindRoomForStaged:
        return FindRoomForStaged(self.number, self.evicted, self.spared)

    @override
    def decided(self, decision: str | None) -> CommitAdapter:
        return replace(self, evicted=decision)

    def __call__(self, loop: LoopState) -> tuple[AdapterInfo, LoadedVersions]:
        """Apply the command."""
        staging = loop.stagings[self.number]
        check_owner(loop, staging.upload.name, staging.policies.model)
        info = staging.commit(self.evicted, self.spared)
        DropStagedAdapter(self.number)(loop)
        return info, ListVersions()(loop)

    @override
    def noted(self, journal: StateJournal, result: tuple[AdapterInfo, LoadedVersions]) -> None:
        begin: BeginAdapter = journal.pending.pop(("adapter", self.number))
        info, listed = result
        journal.adapters[info.model, info.name] = RestoreAdapter.of(begin.upload, info)
        ListVersions().noted(journal, listed)


@dataclass(frozen=True, slots=True)
class DropStagedAdapter(EngineCommand[None]):
    """Forget an adapter that was prepared, if it is there."""

    number: int

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        staging = loop.stagings.pop(self.number, None)
        if staging is not None:
            staging.drop()

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.pending.pop(("adapter", self.number), None)


@dataclass(frozen=True, slots=True)
class EnsureAdapter(Change, EngineCommand[AdapterInfo], NeedsDecision):
    """Load an adapter of a model unless one of its name is there; see ``Policies.ensure``.

    Attributes:
        upload: the adapter.
        model: the first name of its model.
        evicted: see ``CommitAdapter``.
        spared: likewise.
    """

    upload: AdapterUpload
    model: str
    evicted: str | None = None
    spared: frozenset[str] = frozenset()

    @override
    def inquiry(self) -> FindRoom:
        return FindRoom(self.upload.name, self.model, self.spared)

    @override
    def decided(self, decision: str | None) -> EnsureAdapter:
        return replace(self, evicted=decision)

    def __call__(self, loop: LoopState) -> AdapterInfo:
        """Apply the command."""
        check_owner(loop, self.upload.name, self.model)
        return policies_of(loop, self.model).ensure(self.upload, self.evicted, self.spared)

    @override
    def noted(self, journal: StateJournal, result: AdapterInfo) -> None:
        if self.evicted is not None:
            journal.adapters.pop((self.model, self.evicted), None)
        restored = RestoreAdapter.of(self.upload, result)
        journal.adapters.setdefault((self.model, self.upload.name), restored)


@dataclass(frozen=True, slots=True)
class UnloadAdapter(Change, EngineCommand[AdapterInfo]):
    """Admit no more requests of an adapter of a model; see ``Policies.unload``."""

    name: str
    model: str

    def __call__(self, loop: LoopState) -> AdapterInfo:
        """Apply the command."""
        if self.model in loop.missed and self.name in loop.missed[self.model].adapters:
            return loop.missed[self.model].adapters.pop(self.name).info
        return policies_of(loop, self.model).unload(self.name)

    @override
    def noted(self, journal: StateJournal, result: object) -> None:
        journal.adapters.pop((self.model, self.name), None)


def policies_of(loop: LoopState, model: str) -> Policies:
    """Return what requests of a model are computed with; raise ModelNotFoundError."""
    if model not in loop.policies:
        raise ModelNotFoundError(model)
    return loop.policies[model]


def check_owner(loop: LoopState, name: str, model: str) -> None:
    """Raise InvalidRequestError if another model than this one has an adapter of this name."""
    infos, _ = ListVersions()(loop)
    owners = (info for info in infos if info.name == name and info.model != model)
    if (info := next(owners, None)) is not None:
        raise taken(info)


def taken(info: AdapterInfo) -> InvalidRequestError:
    """Return the refusal of another adapter of this one's name."""
    return InvalidRequestError(
        f"{info.name!r} is an adapter of {info.model!r}; unload it first.", param="name"
    )
