"""The messages between the processes of a server, besides ``Abort``, ``Stop`` and ``CheckRoom``.

Commands to engines travel as they are, without their replies. The reply to a command or question
has its number.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.conversations.records import StoredChat
from mlx_parallm.engine.models import EngineState, PackedModel
from mlx_parallm.engine.policies import AdapterInfo, NamedAdapter
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.models.checkpoints.copies import Copy, copy_of
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.request import WeightsVersion
from mlx_parallm.types.work import Event, Request


@dataclass(frozen=True, slots=True)
class StartEngines:
    """To the engines, first.

    Attributes:
        config: what to load.
        silence_timeout_s: seconds without a message, beats included, after which they count as
            dead.
        copies: the models' files on the server's machine, for engines on another.
    """

    config: EngineConfig
    silence_timeout_s: float
    copies: Sequence[Copy] = ()


@dataclass(frozen=True, slots=True)
class StartHttp:
    """To an HTTP process, first.

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
class LoadProgress:
    """From the engines: how far the load is."""

    text: str
    fraction: float


@dataclass(frozen=True, slots=True)
class Ready:
    """From a process: it serves.

    ``models``: what the engines have loaded, as fields of ``StartedModel``.
    """

    models: Sequence[tuple[ModelConfig, PackedModel, bool]] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """From the engines, and to those of other machines: the process runs; see ``silence``.

    ``step_s``: for how long the step in flight has run, in seconds.
    """

    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """From the engines, last: what they could not be loaded for, or died of."""

    error: ParallmError


class Events:
    """From where the engines are: what a step means for its requests. It is pickled compactly.

    Attributes:
        events: in their order.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def __reduce__(self) -> tuple[Callable[..., Events], tuple[Any]]:
        """Pickle token events as tuples, which takes a fifth of the time; there are many."""
        return _unpacked, ([_fields(event) for event in self.events],)


def _fields(event: Event) -> tuple[Any, ...] | Event:
    if type(event) is not TokenEvent:
        return event
    return (
        event.request_id,
        event.index,
        event.token_ids,
        event.text,
        event.logprobs,
        event.finish_reason,
        event.stop_reason,
        event.version,
    )


def _unpacked(packed: Sequence[tuple[Any, ...] | Event]) -> Events:
    return Events([_token_event(*each) if isinstance(each, tuple) else each for each in packed])


def _token_event(
    request_id: str, index: int, token_ids: Any, text: str, logprobs: Any, *end: Any
) -> TokenEvent:
    finish_reason, stop_reason, version = end
    return TokenEvent(
        request_id=request_id,
        index=index,
        token_ids=token_ids,
        text=text,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        version=version,
    )


@dataclass(frozen=True, slots=True)
class Query:
    """To the engines: a question about their state.

    It is answered between messages, not between steps. Where the answer is a future, its result
    is sent. Any of several engines answers; ``key``: see ``Ask``.
    """

    ask: Callable[[EngineState], Any]
    key: Hashable = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To the engines: the caller of the query of this number was cancelled."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of the command or question of its number, or its error."""

    value: Any


@dataclass(frozen=True, slots=True)
class Open:
    """From an HTTP process: admit a request; the reply is None or the refusal.

    ``num_samples`` and ``has_one_event`` are those of its reader. A request that has one event is
    answered by that, or by the refusal.
    """

    request: Request
    num_samples: int
    has_one_event: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """From an HTTP process: see ``EngineCore.wait``."""

    name: str
    client: str


@dataclass(frozen=True, slots=True)
class SetTtl:
    """From an HTTP process: see ``EngineCore.set_ttl``."""

    name: str
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class KeepChat:
    """From an HTTP process: store a chat; the reply is None once it is on the disk."""

    chat: StoredChat


@dataclass(frozen=True, slots=True)
class Closed:
    """From an HTTP process: one of its connections is no longer there."""


@dataclass(frozen=True, slots=True)
class Starting:
    """From engines elsewhere, from time to time: their process runs, and imports its modules."""


@dataclass(frozen=True, slots=True)
class Leave:
    """To an HTTP process: its connections end with an answer; with ``is_over``, idle ones now."""

    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Counted:
    """From an HTTP process: what it has counted since the last time, by labels of the metrics."""

    counts: Mapping[Any, float]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """To an HTTP process: what is known of a model, before the first catalog that has it."""

    number: int
    model: PackedModel


@dataclass(frozen=True, slots=True)
class Catalog:
    """To an HTTP process: what requests may name, whenever that has changed.

    Attributes:
        statuses: the models, without what is known of them but with the number of that.
        adapters: the loaded adapters by name.
        kept: see ``AdapterNames``.
        versions: of the models' weights.
        shared: what the application shares with those of other processes.
    """

    statuses: Sequence[tuple[ModelStatus, int | None]]
    adapters: Mapping[str, AdapterInfo]
    kept: Mapping[str, NamedAdapter]
    versions: Mapping[str, WeightsVersion]
    shared: Any = None


@dataclass(frozen=True, slots=True)
class Known:
    """To an HTTP process, which sends it back: all messages before it have been taken."""


def copies_of(config: EngineConfig) -> list[Copy]:
    """Return the models' files on this machine; models that it does not have are left out."""
    drafts = [] if config.speculative is None else [config.speculative.model]
    paths = {path for path in (*(model.path for model in config.models), *drafts) if path}
    return [copy for copy in map(copy_of, sorted(paths)) if copy is not None]


def find_remote_code(config: EngineConfig) -> None:
    """Let this process unpickle what another has made by a model's own code, where that is allowed.

    transformers puts its folder of such modules on the path when it first loads one.
    """
    if any(model.trust_remote_code for model in config.models):
        # Only then: it takes half a second, and makes the folder.
        from transformers.dynamic_module_utils import init_hf_modules  # noqa: PLC0415

        init_hf_modules()
