"""Garbage collection of processes whose pauses clients notice."""

from __future__ import annotations

import gc

# NEW_OBJECTS: new objects that trigger a collection; a step of 128 rows makes some 800.
NEW_OBJECTS = 10_000


def spare_garbage_collection() -> None:
    """Make garbage collection rare: steps and answers leave little garbage in cycles.

    The objects that exist now are excluded, because scanning them would stop every stream. Only the
    owner of a process may ask for it: a library would change its caller's process.
    """
    gc.collect()
    gc.freeze()
    first, *others = gc.get_threshold()
    # A caller may have set a higher threshold already, or disabled collection.
    if 0 < first < NEW_OBJECTS:
        gc.set_threshold(NEW_OBJECTS, *others)
