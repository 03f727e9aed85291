"""One model that requests may name, in memory or not, as the event loop keeps it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.models import ServedModel
from mlx_parallm.engine.status import ModelState, ModelStatus

# SHOWN: the fields that a model's status is made of.
SHOWN = frozenset(
    (
        *("config", "names", "model", "is_loaded", "is_pinned", "is_listed"),
        *("ttl_s", "stay_s", "progress", "loading", "size_bytes"),
    )
)


@dataclass(slots=True, eq=False)
class ModelEntry:
    """A model that requests may name.

    Attributes:
        config: where it comes from.
        names: the first is the one reported.
        model: what is known about it once it was loaded; it stays while the weights are away.
        is_loaded: True if requests may be sent to the engine thread.
        is_pinned: True if it stays in memory until it is unloaded.
        is_changed: True if its weights are not those of its folder any more.
        is_gone: True if it was unloaded: no request may begin any more.
        is_listed: True if it lies in a folder of models, where its name stays known.
        is_added: True if it was added while the server runs, and its name goes when it is unloaded.
        ttl_s: seconds after the last request until it is evicted; None: for ever.
        stay_s: the same for its present stay in memory, as a request has asked for it; None: none.
        progress: of the load, from 0 to 1.
        loading: the load that requests wait for.
        waiting: these requests.
        num_open: requests that the engine thread has.
        used: larger for those used later.
        loaded_s: when it was loaded, by the event loop's clock.
        expires_s: when it is evicted unless a request comes before, by the same clock.
        idle: set while ``num_open`` is 0.
        smallest_kv: bytes of KV without which it cannot serve; 0 until they are known.
        full_kv: bytes of KV that it had before it gave some back for others; 0 if it did not.
        size_bytes: the bytes of its files, if they were looked at before it was loaded.
        on_shown: called with the name of a field after a change that ``status`` has.
    """

    config: ModelConfig
    names: tuple[str, ...]
    model: ServedModel | None = None
    is_loaded: bool = False
    is_pinned: bool = False
    is_changed: bool = False
    is_gone: bool = False
    is_listed: bool = False
    is_added: bool = False
    ttl_s: float | None = None
    stay_s: float | None = None
    progress: float = 0.0
    loading: asyncio.Future[None] | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    num_open: int = 0
    used: int = 0
    loaded_s: float = -math.inf
    expires_s: float = math.inf
    timer: asyncio.TimerHandle | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    smallest_kv: int = 0
    full_kv: int = 0
    size_bytes: int | None = None
    on_shown: Callable[[str], None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Call ``on_shown`` if clients see the change."""
        if name not in SHOWN:
            object.__setattr__(self, name, value)
            return
        before = getattr(self, name, None)
        object.__setattr__(self, name, value)
        # Requests set equal times again and again; models are large to compare.
        is_equal = before is value or (isinstance(value, float) and before == value)
        if not is_equal and (note := getattr(self, "on_shown", None)) is not None:
            note(name)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self.names[0]

    @property
    def is_untouched(self) -> bool:
        """True if it was never loaded, and nobody waits for that."""
        return self.model is None and self.loading is None

    @property
    def refuses_unload(self) -> str | None:
        """Return why it cannot leave the memory, after its name; None if it can."""
        return None if self.model is None else self.model.refuses_unload

    @property
    def must_stay(self) -> bool:
        """True if it cannot be evicted and come back as it was, or was pinned."""
        return self.is_pinned or self.is_changed or self.refuses_unload is not None

    @property
    def stays_s(self) -> float | None:
        """Return how long it stays after its last request, in seconds; None: for ever."""
        if self.stay_s is None:
            return self.ttl_s
        return None if math.isinf(self.stay_s) else self.stay_s

    def enter(self) -> None:
        """Count a request that the engine thread gets; the time to live begins once it ends."""
        self.num_open += 1
        self.idle.clear()
        self.disarm()

    def leave(self) -> None:
        """Count the end of such a request."""
        self.num_open -= 1
        if not self.num_open:
            self.idle.set()

    def arm(self, expire: Callable[[ModelEntry], None], least_s: float = 0.0) -> None:
        """Have ``expire`` called once the model was idle for its time to live, or ``least_s``."""
        self.disarm()
        if (stays_s := self.stays_s) is None or self.num_open or not self.is_loaded:
            return
        loop, stays_s = asyncio.get_running_loop(), max(stays_s, least_s)
        self.expires_s = loop.time() + stays_s
        self.timer = loop.call_later(stays_s, expire, self)

    def disarm(self) -> None:
        """Let the model not expire."""
        self.expires_s = math.inf
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def status(self) -> ModelStatus:
        """Return what clients see of it."""
        state = (
            ModelState.AVAILABLE if self.model is None and self.is_listed else ModelState.EVICTED
        )
        progress = 0.0
        if self.is_loaded:
            state, progress = ModelState.LOADED, 1.0
        elif self.loading is not None:
            state, progress = ModelState.LOADING, self.progress
        return ModelStatus(
            names=self.names,
            root=self.config.path or self.name,
            state=state,
            progress=progress,
            is_pinned=self.is_pinned,
            model=self.model,
            ttl_s=self.stays_s,
            size_bytes=self.size_bytes,
        )
