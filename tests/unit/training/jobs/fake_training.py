"""Sessions that make steps at once, and what jobs need around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights, LowRank
from mlx_parallm.training.records import GradientRecord, SessionState, Status
from mlx_parallm.types.errors import ConflictError, NotFoundError


class FakeSession:
    """A session whose validation loss is a function of its steps."""

    def __init__(self, name: str) -> None:
        self.config = SimpleNamespace(id=name)
        self.state = SessionState()
        self.records: list[GradientRecord] = []
        self.valid_losses: dict[int, float] = {}
        self.costs = SimpleNamespace(seconds=0.0)
        self.changed = asyncio.Event()

    @property
    def num_steps(self) -> int:
        return len(self.records)

    @property
    def last(self) -> GradientRecord | None:
        return self.records[-1] if self.records else None

    def make_step(self) -> None:
        step = self.num_steps + 1
        self.records.append(
            GradientRecord(
                step=step,
                loss=1 / step,
                norm=1.0,
                learning_rate=0.1,
                tokens=8,
                arithmetic="",
                seconds=0.5,
                validation_loss=self.valid_losses.get(step),
            )
        )

    async def wait_for_steps(self, after: int) -> None:
        await self.changed.wait()

    def set_status(self, status: Status, reason: str | None = None) -> None:
        self.state = replace(self.state, status=status, reason=reason)
        self.changed.set()
        self.changed.clear()


class FakeTraining:
    """Implements what jobs use of ``TrainingService``.

    Attributes:
        stops: reasons for which a session is paused when it has made so many steps.
        gate: is awaited before each step, so that a test may act between two.
        room: bytes that there is room for; None: any number.
        failures: are raised by the next requests of weights.
        fill_at: the step after which a disk is full, and the disk; None: it never is.
    """

    def __init__(self) -> None:
        self.sessions: dict[str, FakeSession] = {}
        self.stops: dict[int, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.room: int | None = None
        self.failures: list[Exception] = []
        self.fill_at: tuple[int, Any] | None = None
        self.counts: list[Callable[[], int]] = []

    def count_bytes(self, count: Callable[[], int]) -> None:
        self.counts.append(count)

    @property
    def used(self) -> int:
        return sum(count() for count in self.counts)

    def check_bytes(self, num_bytes: int) -> None:
        if self.room is not None and self.used + num_bytes > self.room:
            raise ConflictError("There is no room.")

    def add(self, name: str = "s") -> FakeSession:
        self.sessions[name] = FakeSession(name)
        return self.sessions[name]

    def get(self, name: str) -> FakeSession:
        if name not in self.sessions:
            raise NotFoundError(f"There is no session {name}.", param="id")
        return self.sessions[name]

    def run(self, name: str, num_steps: int) -> FakeSession:
        session = self.get(name)
        session.state = replace(
            session.state, status=Status.RUNNING, until=session.num_steps + num_steps
        )
        return session

    async def follow(self, name: str, after: int) -> AsyncIterator[GradientRecord]:
        session = self.get(name)
        for record in session.records[after:]:
            yield record
        while session.state.status is Status.RUNNING:
            await self.gate.wait()
            await asyncio.sleep(0)
            if session.state.status is not Status.RUNNING or name not in self.sessions:
                return
            session.make_step()
            if self.fill_at is not None and session.num_steps == self.fill_at[0]:
                self.fill_at[1].is_full, self.fill_at = True, None
            step = session.num_steps
            if reason := self.stops.pop(step, None):
                session.set_status(Status.PAUSED, reason)
            elif session.num_steps == session.state.until:
                session.set_status(Status.READY)
            yield session.records[-1]

    async def pause(self, name: str) -> FakeSession:
        self.get(name).set_status(Status.PAUSED)
        return self.get(name)

    def resume(self, name: str) -> FakeSession:
        session = self.get(name)
        is_running = session.num_steps < session.state.until
        session.set_status(Status.RUNNING if is_running else Status.READY)
        return session

    async def weights(self, name: str, step: int | None, *, of_checkpoint: bool) -> AdapterWeights:
        assert not of_checkpoint, "jobs of generators write mlx-lm's format"
        del step
        if self.failures:
            raise self.failures.pop(0)
        value = np.full((1, 2), self.get(name).num_steps, np.float32)
        module = LowRank(kind="linear", a=HostTensor(value), b=HostTensor(value.T), scale=1.0)
        return AdapterWeights({"layer": module}, of_checkpoint=of_checkpoint)

    async def delete(self, name: str) -> None:
        self.get(name)
        del self.sessions[name]


@dataclass
class FakeServed:
    """The folders that are served, by name.

    Attributes:
        folders: see the class.
        gate: is awaited before a folder is loaded.
        waiting: the names whose folders are being loaded.
    """

    folders: dict[str, Path] = field(default_factory=dict[str, Path])
    gate: asyncio.Event | None = None
    waiting: list[str] = field(default_factory=list[str])

    async def keep(self, name: str, base: str, folder: Path, *, loads: bool = True) -> None:
        assert (folder / "adapter_config.json").is_file()
        if self.gate is not None:
            self.waiting.append(name)
            await self.gate.wait()
            self.waiting.remove(name)
        self.folders[name] = folder

    async def forget_kept(self, name: str) -> None:
        self.folders.pop(name, None)
