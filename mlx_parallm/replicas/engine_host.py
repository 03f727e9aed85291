"""The engines of this server as a member of a fleet changes them, and changes as it sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

from mlx_parallm.engine.changes import (
    ChangesHere,
    LoadAdapter,
    RemoveAdapter,
    ReplaceWeights,
    ServerChange,
    Staged,
    UnloadModel,
    stage,
)
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.replicas.codec import Folders, decode, encode, known_digest
from mlx_parallm.replicas.entries import Head, number_of
from mlx_parallm.replicas.fan_out import FanOut, Proposal
from mlx_parallm.replicas.host import Content
from mlx_parallm.replicas.reached import REACHED
from mlx_parallm.replicas.room import AdapterRoom
from mlx_parallm.replicas.served import ServedModels

R = TypeVar("R")


class EngineHost:
    """Carries out changes at the engines of this process. Implements ``Host``."""

    def __init__(
        self,
        control: EngineControl,
        folders: Folders,
        served: ServedModels,
    ) -> None:
        self._control = control
        self._served = served
        self._folders = folders

    async def stage(self, head: Head, content: Content | None) -> Staged[Any]:
        """See ``Host``."""
        change = await asyncio.to_thread(decode, head, content, self._folders)
        return await stage(change, self._control)

    async def settle(self) -> None:
        """See ``Host``."""
        await self._control.announce()

    def versions(self) -> Mapping[str, Mapping[str, str]]:
        """See ``Host``."""
        weights = self._control.versions
        return {
            "models": {name: version.label for name, version in weights.items()},
            "adapters": {info.name: info.version for info in self._control.adapters()},
        }

    def models(self) -> Mapping[str, str]:
        """See ``Host``."""
        return self._served.marks

    def largest_label(self) -> int:
        """See ``Host``."""
        labels = (label for named in self.versions().values() for label in named.values())
        return max(map(number_of, labels), default=0)


class FleetChanges:
    """Carries out an operator's changes at all servers of a fleet. Implements ``Changes``."""

    def __init__(
        self, control: EngineControl, folders: Folders, fan_out: FanOut, room: AdapterRoom
    ) -> None:
        self._control = control
        self._folders = folders
        self._room = room
        self._here = ChangesHere(control)
        self._fan_out = fan_out
        # Adapters that the device makes, which no other server can have.
        self._own: set[str] = set()

    async def apply(self, change: ServerChange[R]) -> R:
        """See ``Changes``; a caller's end does not end what is under way."""
        if self._is_own(change):
            return await self._here.apply(change)
        return await asyncio.shield(asyncio.ensure_future(self._apply(change)))

    def _is_own(self, change: ServerChange[Any]) -> bool:
        match change:
            case LoadAdapter(upload) if upload.opaque is not None:
                self._own.add(upload.name)
                return True
            case RemoveAdapter(name) if name in self._own:
                self._own.discard(name)
                return True
            case _:
                return False

    async def _apply(self, change: ServerChange[R]) -> R:
        change = cast("ServerChange[R]", self._named(change))
        encoded = await asyncio.to_thread(encode, change, self._folders)

        async def stage_here(head: Head) -> Staged[Any]:
            label = head.get("version")
            labelled: ServerChange[Any] = change if label is None else change.labelled(label)
            if isinstance(labelled, LoadAdapter):
                labelled = replace(labelled, evicted=head["evicted"])
            if isinstance(labelled, ReplaceWeights) and encoded.digest is not None:
                labelled = replace(labelled, digest=known_digest(encoded.digest))
            return await stage(labelled, self._control)

        proposal = Proposal(
            head=encoded.head,
            content=encoded.content,
            digest=encoded.digest,
            is_labelled=encoded.is_labelled,
            stage=stage_here,
            decide=partial(self._room.decide, change),
        )
        outcome = await self._fan_out.carry_out(proposal)
        reached = REACHED.get()
        if reached is not None:
            reached.update(outcome.versions)
        return outcome.result

    def _named(self, change: ServerChange[Any]) -> ServerChange[Any]:
        """Return a change with the first name of what it names; raise if there is none."""
        if isinstance(change, RemoveAdapter):
            info = self._control.names.find(change.name)
            return change if info is None else replace(change, name=info.name)
        if isinstance(change, UnloadModel):
            status = self._control.door.status_of(change.name)
            return change if status is None else replace(change, name=status.names[0])
        return change
