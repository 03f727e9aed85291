"""Which engine keeps what later requests need, by its name. See ``RequestWork.sticky``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# MAX_NAMES: names that are remembered; beyond that, the least recently used one is forgotten.
MAX_NAMES = 65_536


class Homes:
    """The engines' numbers by the names of what they keep."""

    def __init__(self) -> None:
        self._ranks: OrderedDict[Hashable, int] = OrderedDict()

    def rank_of(self, name: Hashable | None) -> int | None:
        """Return which engine keeps what has this name; None if none does."""
        return None if name is None else self._ranks.get(name)

    def note(self, name: Hashable | None, rank: int) -> None:
        """Note that an engine keeps what has this name, if it has one."""
        if name is None:
            return
        self._ranks[name] = rank
        self._ranks.move_to_end(name)
        if len(self._ranks) > MAX_NAMES:
            self._ranks.popitem(last=False)

    def drop(self, rank: int) -> None:
        """Forget what an engine keeps, because it has died."""
        for name in [name for name, kept_by in self._ranks.items() if kept_by == rank]:
            del self._ranks[name]
