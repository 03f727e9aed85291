"""The messages between an HTTP process and the process that chooses among the engines.

Those of a question have its number, as the answer has. ``Abort`` is that of the engines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.engine.models import PackedModel
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.engine.requests import Request
from mlx_parallm.engine.state import EngineState
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.types.weights import WeightsVersion


@dataclass(frozen=True, slots=True)
class Start:
    """To the HTTP process, first.

    Attributes:
        engine_config: the engines' settings.
        server_config: the server's.
        max_waiting: the size of an engine's queue.
        bound_to: the IP address of the server's socket.
        num_processes: how many HTTP processes share the queue.
    """

    engine_config: EngineConfig
    server_config: ServerConfig
    max_waiting: int
    bound_to: str
    num_processes: int


@dataclass(frozen=True, slots=True)
class Catalog:
    """To the HTTP process: what requests may name, whenever that has changed.

    Attributes:
        statuses: the models, without what is known of them but with the number of that.
        models: what is known of models, by numbers that were not sent before.
        adapters: the loaded adapters by name.
        versions: of the models' weights.
        shared: what the application shares with those of other processes.
    """

    statuses: Sequence[tuple[ModelStatus, int | None]]
    models: Mapping[int, PackedModel]
    adapters: Mapping[str, AdapterInfo]
    versions: Mapping[str, WeightsVersion]
    shared: Any = None


@dataclass(frozen=True, slots=True)
class Stop:
    """To the HTTP process: answer what has been computed, and end."""


@dataclass(frozen=True, slots=True)
class Events:
    """To the HTTP process: what a step means for its requests, packed by ``pack_events``."""

    packed: list[Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """To the HTTP process: the result of the question of its number, or its error."""

    value: Any


@dataclass(frozen=True, slots=True)
class Ready:
    """From the HTTP process: it takes connections."""


@dataclass(frozen=True, slots=True)
class Closed:
    """From the HTTP process: one of its connections is no longer there."""


@dataclass(frozen=True, slots=True)
class Counted:
    """From the HTTP process: what it has answered since the last time, by labels of the metric."""

    counts: Mapping[Any, int]


@dataclass(frozen=True, slots=True)
class Open:
    """From the HTTP process: admit a request; the answer is None or the refusal.

    ``num_samples`` is that of its reader.
    """

    request: Request
    num_samples: int


@dataclass(frozen=True, slots=True)
class CheckRoom:
    """From the HTTP process: see ``EngineCore.check_queue``."""

    model: str
    client: str
    n: int


@dataclass(frozen=True, slots=True)
class Wait:
    """From the HTTP process: see ``EngineCore.wait``."""

    name: str


@dataclass(frozen=True, slots=True)
class AskEngine:
    """From the HTTP process: ask any of the engines; see ``Ask``."""

    question: Callable[[EngineState], Any]
    key: Hashable


@dataclass(frozen=True, slots=True)
class Known:
    """To the HTTP process, which answers it: all messages before it have been taken."""
