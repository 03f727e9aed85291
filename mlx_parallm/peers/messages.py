"""The messages between the server's process and the engines' process.

Commands travel as they are, without their replies. Those of a command and of a query have its
number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.models import PackedModel
from mlx_parallm.engine.state import EngineState
from mlx_parallm.types.errors import ParallmError


@dataclass(frozen=True, slots=True)
class Start:
    """To the engines, first.

    Attributes:
        config: what to load.
        silence_timeout_s: seconds without a message, beats included, after which they count as
            dead.
    """

    config: EngineConfig
    silence_timeout_s: float


@dataclass(frozen=True, slots=True)
class Query:
    """To the engines: a question about their state.

    It is answered between messages, not between steps. Where the answer is a future, its result
    is sent.
    """

    ask: Callable[[EngineState], Any]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To the engines: the caller of the query of this number was cancelled."""


@dataclass(frozen=True, slots=True)
class Progress:
    """From the engines: how far the load is."""

    text: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """From the engines: everything is loaded; ``models`` are the fields of ``StartedModel``."""

    models: Sequence[tuple[ModelConfig, PackedModel, bool]]


@dataclass(frozen=True, slots=True)
class Failed:
    """From the engines, last: what they could not be loaded for, or died of."""

    error: ParallmError


@dataclass(frozen=True, slots=True)
class Events:
    """From the engines: what a step means for its clients, packed by ``pack_events``."""

    packed: list[Any]


@dataclass(frozen=True, slots=True)
class Beat:
    """From the engines: their process runs; see ``silence``.

    ``step_s``: for how long the step in flight has run, in seconds.
    """

    step_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """From the engines: what came of the command or query of its number, or its error."""

    value: Any
