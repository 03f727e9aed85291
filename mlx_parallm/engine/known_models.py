"""The models that requests may name, and a count of the changes that clients see of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import count

from mlx_parallm.engine.model_entry import ModelEntry

# PROGRESS_S: seconds between two changes that are counted for the progress of loads. Each change
# has the list of all models sent to other processes.
PROGRESS_S = 1.0


class KnownModels:
    """Models by their names. It belongs to the event loop.

    Attributes:
        by_name: the models that requests may name.
        number: another one after every change that their statuses show; after progress about once
            a second.
        on_moved: called after each such change, on any thread.
    """

    def __init__(self, ttl_s: float | None) -> None:
        """Begin without models; ``ttl_s``: of those that have no time to live of their own."""
        self.by_name: dict[str, ModelEntry] = {}
        self.number = 0
        self.on_moved: Callable[[], None] = lambda: None
        self._ttl_s = ttl_s
        self._numbers = count(1)
        self._progress_s = -math.inf

    def entries(self) -> list[ModelEntry]:
        """Return all models that requests may name, in the order they were given."""
        return list({id(entry): entry for entry in self.by_name.values()}.values())

    def add(self, entry: ModelEntry) -> None:
        """Let requests name a model, whose names are free."""
        if entry.ttl_s is None:
            entry.ttl_s = self._ttl_s
        self.by_name |= dict.fromkeys(entry.names, entry)
        entry.on_shown = self._note_shown
        self._note_shown("names")

    def remove(self, entry: ModelEntry) -> None:
        """Let no request name a model any more; those that run go on."""
        entry.is_gone = True
        entry.on_shown = None
        self._note_shown("names")
        for name in entry.names:
            if self.by_name.get(name) is entry:
                del self.by_name[name]

    def _note_shown(self, field: str) -> None:
        """Count a change of a field of a model that statuses show."""
        if field == "progress":
            now_s = time.monotonic()
            if now_s - self._progress_s < PROGRESS_S:
                return
            self._progress_s = now_s
        # Threads that read files change the progress.
        self.number = next(self._numbers)
        self.on_moved()
