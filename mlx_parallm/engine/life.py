"""A life of the engines: from their load to ``Stop``, or to their death."""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.build import LoadedEngine, build_engines
from mlx_parallm.engine.commands import Command
from mlx_parallm.engine.encoder_interface import LoadedEncoder
from mlx_parallm.engine.encoders.build import BuiltEncoder
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.engine.loop import EngineLoop
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.state import EngineState
from mlx_parallm.types.errors import EngineDeadError
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.worker.device.properties import end_thread

T = TypeVar("T")

# More than there are, so that the youngest are looked through: a step of 128 rows makes some 800.
NEW_OBJECTS = 10_000

#: Hears what is loaded, and which share of it is.
TellProgress = Callable[[str, float], None]
Built = Sequence[LoadedEngine | BuiltEncoder]
Build = Callable[[EngineConfig, MetricFamilies, TellProgress], Built]
Deliver = Callable[[list[GenerateEvent]], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The models of a life."""

    models: Sequence[ServedModel]
    encoders: Sequence[LoadedEncoder]


class EngineLife(Protocol):
    """Where the engines live: on a thread of this process, or in another."""

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Deliver,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        """Load, and carry out commands until ``Stop``; one life after the other, on one thread.

        Raises:
            ModelLoadError, ConfigError: of the load.
            BaseException: what the engines died of.
        """
        ...

    async def query(self, ask: Callable[[EngineState], T]) -> T:
        """What the engines' state tells, without waiting for a step; ``ask`` can be pickled.

        Raises:
            EngineDeadError: no engines are there.
            ParallmError: what ``ask`` raises.
        """
        ...

    def give_up_load(self) -> None:
        """Let ``run`` fail if it is loading, and that can be interrupted."""
        ...

    def end(self) -> None:
        """The thread of ``run`` is about to end, and calls this."""
        ...


class LocalLife:
    """Engines on the thread that runs this, whose metrics go on from life to life."""

    def __init__(
        self, config: EngineConfig, on_progress: TellProgress, *, build: Build = build_engines
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._build = build
        self._families = MetricFamilies()
        self._state: EngineState | None = None

    def run(
        self,
        inbox: queue.SimpleQueue[Command],
        deliver: Deliver,
        on_loaded: Callable[[Loaded], None],
    ) -> None:
        """See ``EngineLife.run``."""
        gc.unfreeze()
        built = self._build(self._config, self._families, self._on_progress)
        spare_garbage_collection()
        loaded = _loaded(built)
        engines = {one.model.names[0]: one.engine for one in built if isinstance(one, LoadedEngine)}
        encoders = {
            one.model.names[0]: one.engine
            for one in built
            if isinstance(one, BuiltEncoder) and one.engine is not None
        }
        grammars = {one.names[0]: one.grammars for one in loaded.models if one.grammars is not None}
        self._state = EngineState(self._families, engines, encoders, grammars)
        on_loaded(loaded)
        stall_ms = self._config.scheduler.max_decode_stall_ms
        EngineLoop(
            engines,
            inbox,
            deliver,
            encoders,
            encoder_families=self._families.encoders,
            max_stall_s=None if stall_ms is None else stall_ms / 1e3,
        ).run()

    async def query(self, ask: Callable[[EngineState], T]) -> T:
        """See ``EngineLife.query``."""
        return self.ask(ask)

    def ask(self, ask: Callable[[EngineState], T]) -> T:
        """``query`` from any thread."""
        if self._state is None:
            raise EngineDeadError("No engine is loaded.")
        return ask(self._state)

    def give_up_load(self) -> None:
        """See ``EngineLife.give_up_load``; nothing interrupts this thread."""

    def end(self) -> None:
        """See ``EngineLife.end``."""
        end_thread()


def spare_garbage_collection() -> None:
    """Let garbage in cycles, of which steps and answers make little, be looked for seldom.

    What is there now stays: to look through it would stop every stream.
    """
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    # Somebody may look for it more seldom already, or never.
    if 0 < first < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *others)


def _loaded(built: Built) -> Loaded:
    """What was built as its clients see it."""
    return Loaded(
        [one.model for one in built if isinstance(one, LoadedEngine)],
        [
            LoadedEncoder(one.config, one.model, one.engine is not None)
            for one in built
            if isinstance(one, BuiltEncoder)
        ],
    )
