"""The core's view of the models that it serves, whatever they do.

A kind of model is one package: it implements ``Kind``, and ``KindBuilder``, which makes a
``ServedEngine`` and a ``ServedModel`` of a folder. The engine lives on the engine thread; the model
is what the event loop knows of it, and can be pickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from typing_extensions import TypeVar

from mlx_parallm.config import EngineConfig, ModelConfig, ModelTask
from mlx_parallm.engine.models import KindTraits, ServedEngine, ServedModel
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.types.step import StepTracer

if TYPE_CHECKING:
    from mlx_parallm.engine.metrics import MetricFamilies
    from mlx_parallm.engine.policies import Policies
    from mlx_parallm.worker.ops import Pending
    from mlx_parallm.worker.worker import Worker

# ADVANCE_S: seconds of a load between two steps, unless one part takes longer.
ADVANCE_S = 0.01
#: ``ClientT``: what speaks to the models of one kind.
ClientT = TypeVar("ClientT", covariant=True, default=Any)

#: Called with what is being loaded and the share of it that is loaded, from 0 to 1.
TellProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most bytes that the weights of one kind's models may take together.

    Attributes:
        num_bytes: the limit.
        owners: what these models are called, at the beginning of a sentence.
        flag: sets the limit.
    """

    num_bytes: int
    owners: str
    flag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWish:
    """Memory that a model needs, in bytes of each device.

    Attributes:
        smallest: it cannot serve with less.
        least: it gets so much if other models can be evicted for it.
        wanted: it gets up to so much of what is free.
    """

    smallest: int
    least: int
    wanted: int

    @classmethod
    def exactly(cls, num_bytes: int) -> MemoryWish:
        """Return the wish for so much, neither more nor less."""
        return cls(smallest=num_bytes, least=num_bytes, wanted=num_bytes)

    def joined(self, other: MemoryWish) -> MemoryWish:
        """Return what suffices for both, which are those of engines with the same model."""
        return MemoryWish(
            smallest=max(self.smallest, other.smallest),
            least=max(self.least, other.least),
            wanted=max(self.wanted, other.wanted),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """A model to be loaded while the server runs.

    Attributes:
        model: a folder or a hub id; or the name of a served model, to have it in memory.
        names: the names that requests are to use; ``model`` if there is none.
        task: as in ``ModelConfig``.
        dtype: as in ``ModelConfig``; None for the server's.
        revision: hub revision.
        max_model_len: cap on the length of an input in tokens; None takes the model's own.
        is_pinned: True if it is to stay in memory until it is unloaded.
        ttl_s: seconds after its last request until it is evicted; None for the server's.
    """

    model: str
    names: tuple[str, ...] = ()
    task: Literal["auto"] | ModelTask = "auto"
    dtype: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    is_pinned: bool = False
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model that is ready to serve.

    Attributes:
        config: where it comes from.
        model: what the event loop knows of it.
        engine: runs it; None if it was evicted, and its next request loads it again.
    """

    config: ModelConfig
    model: ServedModel
    engine: ServedEngine | None


@dataclass(frozen=True, slots=True)
class StartedModel:
    """A ``BuiltModel`` as the event loop sees it."""

    config: ModelConfig
    model: ServedModel
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model to be loaded: its settings, all its names among them, and where its files are."""

    config: ModelConfig
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use; the first is the one reported."""
        return self.config.served_names


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Parts that every kind of model is built with.

    Attributes:
        settings: of the server.
        families: of metrics.
        worker: has the models.
        on_progress: is notified of the load's progress.
        tracer: records every step; None if none does.
    """

    settings: EngineConfig
    families: MetricFamilies
    worker: Worker
    on_progress: TellProgress
    tracer: StepTracer | None = None


def advance_load(pending: Pending[Any]) -> None:
    """Compute stages of a load for ``ADVANCE_S``, or one that takes longer, but never the last."""
    end_s = time.perf_counter() + ADVANCE_S
    while pending.num_stages > 1:
        pending.advance()
        if time.perf_counter() >= end_s:
            break


class PendingModel(Protocol):
    """A model that is being loaded while others serve. It lives on the engine thread."""

    @property
    def name(self) -> str:
        """The first of its names."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        ...

    def advance(self) -> float:
        """Load the next part; return the share that is loaded, from 0 to 1."""
        ...

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        """Return the model, ready to serve; ``kept`` are the policies that it had before."""
        ...

    def close(self) -> None:
        """Free what is not part of a finished model."""
        ...


@runtime_checkable
class TakesMemory(Protocol):
    """A ``PendingModel`` that takes memory besides its weights, once these are read."""

    @property
    def wish(self) -> MemoryWish | None:
        """Return what it needs; None before its weights are read, and once it was granted."""
        ...

    def grant(self, num_bytes: int) -> None:
        """Begin to take so much; what is left of the weights is read first."""
        ...


#: Opens a model on the engine thread, whose metric families and worker it is given.
OpenModel = Callable[["MetricFamilies", "Worker"], PendingModel]


class Kind(Protocol[ClientT]):
    """One kind of model as the event loop knows it; its process may be without MLX.

    Kinds inherit from this class: methods with a body are defaults.

    Attributes:
        traits: facts that its models have in common.
    """

    traits: KindTraits

    def client(self, door: RequestDoor, /) -> ClientT:
        """Return what finds its models, and sends requests to them, through a door."""
        ...

    def memory_limit(self, settings: EngineConfig) -> MemoryLimit | None:
        """Return what its models may take together if they are loaded later; None for no limit."""
        del settings
        return None

    def serves(self, config: ModelConfig, path: Path) -> bool:
        """True if a folder's model is of this kind; raise ModelLoadError if it is unreadable."""
        ...

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """Read what needs no MLX of a model to be loaded later; any thread may call this.

        The result can be pickled.

        Raises:
            ModelLoadError: it cannot be read.
        """
        ...


class KindBuilder(Kind[ClientT], Protocol[ClientT]):
    """A kind as the engine's process knows it: it loads the models."""

    def declare(self, families: MetricFamilies) -> None:
        """Register its metric families before models report values."""
        ...

    def install(self, worker: Worker) -> None:
        """Give a worker what loads its models."""

    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        """Load models on the calling thread, which is the engine thread.

        Raises:
            ConfigError: they do not fit their settings or the memory.
            ModelLoadError: one cannot be loaded.
        """
        ...
