"""What may be asked of the engine thread. Commands are applied between steps, in order.

Replies may be called on any thread: on the engine's, or on one that speaks to its process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.pooling import EncodeRequest
from mlx_parallm.types.request import GenerateRequest

if TYPE_CHECKING:
    from mlx_parallm.engine.adapter_staging import AdapterStaging
    from mlx_parallm.engine.encoders.adapters import EncoderAdapterSet
    from mlx_parallm.engine.encoders.build import EncoderBuild
    from mlx_parallm.engine.encoders.engine import EncodeEngine
    from mlx_parallm.engine.encoders.metrics import EncoderFamilies
    from mlx_parallm.engine.engine import Engine
    from mlx_parallm.engine.policies import AdapterUpload


class EngineHost(Protocol):
    """What the engine thread has."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """By their models' first names."""
        ...

    @property
    def encoders(self) -> MutableMapping[str, EncodeEngine]:
        """Likewise; those that are loaded."""
        ...

    @property
    def encoder_adapters(self) -> MutableMapping[str, EncoderAdapterSet]:
        """Likewise; those of encoders that made way too."""
        ...

    @property
    def encoder_families(self) -> EncoderFamilies:
        """Metrics of encoders."""
        ...

    @property
    def builds(self) -> MutableMapping[int, EncoderBuild]:
        """Encoders on their way into memory, by the number that their commands name."""
        ...

    @property
    def stagings(self) -> MutableMapping[int, AdapterStaging]:
        """Adapters on their way into a slot, likewise."""
        ...

    def deliver(self, events: list[GenerateEvent], /) -> None:
        """Send events to their readers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Admit a request; ``reply`` is called with None or the refusal.

    ``arrival_s`` is the caller's monotonic clock; latencies are measured from it. ``upload`` is the
    request's adapter, for when it is not loaded.
    """

    request: GenerateRequest
    arrival_s: float
    upload: AdapterUpload | None = None
    reply: Callable[[ParallmError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Compute what a request's inputs ask for.

    ``reply`` is called with a list of results, or with the error.
    """

    request: EncodeRequest
    reply: Callable[[Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a request and free its blocks. Unknown ids are ignored.

    ``is_told``: its reader gets a last event for every sample, of reason "abort".
    """

    request_id: str
    is_told: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Do something between two steps.

    ``reply`` is called with what ``action`` gave, or with its error. The action can be pickled, as
    what it gives: the engine may be in another process.
    """

    action: Callable[[EngineHost], Any]
    reply: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop; requests still in flight are dropped."""


Command = Submit | Encode | Abort | Call | Stop
