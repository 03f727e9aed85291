"""What may be asked of the engine thread. Commands are applied between steps, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_parallm.errors import ParallmError
from mlx_parallm.request import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Admit a request; ``reply`` is called on the engine thread with None or the refusal.

    ``arrival_s`` is the caller's monotonic clock; latencies are measured from it.
    """

    request: GenerateRequest
    arrival_s: float
    reply: Callable[[ParallmError | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a request and free its blocks. Unknown ids are ignored.

    ``is_told``: its reader gets a last event for every sample, of reason "abort".
    """

    request_id: str
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop; requests still in flight are dropped."""


Command = Submit | Abort | Stop
