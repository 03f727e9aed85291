"""Requests whose engine died while it may have computed them: one of them may have killed it.

Engines compute one suspect at a time, and only while two engines answer or more: a suspect that is
placed with an engine ends that one at most. The others wait.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

from mlx_parallm.types.work import Request, RequestWork

# MAX_DEATHS: a request fails that has gone through so many deaths of engines. One death is no proof
# against a request, because others were computed beside it.
MAX_DEATHS = 2
# LEAST_SERVING: engines that must serve before one of them gets a suspect. The last one would take
# the whole server with it, so a suspect waits instead until a dead engine has been started anew.
LEAST_SERVING = 2
# MAX_CONTENTS: contents of suspects that are remembered, the latest ones.
MAX_CONTENTS = 1024
# MAX_WAITING: while so many suspects wait, a request that repeats one is refused.
MAX_WAITING = 256
# MAX_LEFT: requests that left an engine without an answer and are remembered, the latest ones.
MAX_LEFT = 64


class LatestKeys:
    """The latest keys that were added, at most ``MAX_CONTENTS``. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[Hashable, None] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def add(self, key: Hashable) -> None:
        """Remember a key, unless it is None."""
        if key is None:
            return
        with self._lock:
            self._keys.pop(key, None)
            self._keys[key] = None
            if len(self._keys) > MAX_CONTENTS:
                del self._keys[next(iter(self._keys))]

    def discard(self, key: Hashable) -> None:
        """Forget a key."""
        with self._lock:
            self._keys.pop(key, None)


class Suspects:
    """Remembers what suspects ask, because clients repeat a request that was lost.

    Attributes:
        waiting: parts that no engine has, by their ids, oldest first; True if an engine has
            computed the prompt, as the reader knows.
        placed: the ids of parts that engines have; those that have ended may still be among them.
        rank: the engine that gets suspects while it serves. An aborted suspect may still be
            computed there, so that the next one must not go to another engine.
    """

    def __init__(self, num_engines: int) -> None:
        self.waiting: dict[str, bool] = {}
        self.placed: set[str] = set()
        self.rank = 0
        self._contents = LatestKeys()
        # What left each engine since its last delivery of events, and before that one: the engine
        # may be computing it until then, because it runs one step ahead.
        self._left: list[tuple[dict[str, int | None], dict[str, int | None]]] = [
            ({}, {}) for _ in range(num_engines)
        ]

    def add(self, request: Request) -> None:
        """Suspect requests of this content from now on."""
        self.add_content(_content(request.work()))

    def add_content(self, content: int | None) -> None:
        """Suspect requests of a content that ``take_left`` returned."""
        self._contents.add(content)

    def has(self, request: Request) -> bool:
        """True if a request of this content was a suspect, and none was answered since."""
        return bool(self._contents) and _content(request.work()) in self._contents

    def clear(self, request: Request) -> None:
        """Suspect this content no longer: an engine has answered it."""
        if self._contents:
            self._contents.discard(_content(request.work()))

    def note_left(self, part_id: str, rank: int, request: Request) -> None:
        """Note that a part was aborted at an engine, which may still compute it."""
        recent, _ = self._left[rank]
        recent[part_id] = _content(request.work())
        if len(recent) > MAX_LEFT:
            del recent[next(iter(recent))]

    def note_answer(self, rank: int) -> None:
        """Note that an engine has delivered events."""
        recent, _ = self._left[rank]
        self._left[rank] = {}, recent

    def take_left(self, rank: int) -> dict[str, int | None]:
        """Return the contents of what left an engine that died, by the parts' ids."""
        recent, older = self._left[rank]
        self._left[rank] = {}, {}
        return older | recent


def _content(work: RequestWork) -> int | None:
    """Return a key of what is computed; None if the work does not say that.

    Different contents may have one key by accident; then a request waits longer than it must.
    """
    if not (work.prefix or work.inputs or work.sticky):
        return None
    return hash((work.cache_key, tuple(work.prefix), tuple(work.inputs), work.sticky))
