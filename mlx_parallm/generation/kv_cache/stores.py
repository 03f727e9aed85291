"""The protocol of places below the block pool: a store keeps KV blocks by their contents.

A model with a state per sequence has the states after some prefixes too, of a size of their own. In
a store the state after a block is an entry like a block that follows it, and nothing follows it.
Blocks are to mean both.

Only the scheduler's side knows stores: it asks for blocks before a sequence starts, and gives them
what the device has read. A store never repairs: a block that it cannot return is a miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlx_parallm.types.content import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """A block as a store gets it.

    Attributes:
        content: its content address, which means the same in every process.
        parent: the content of the block that it follows; empty for the first of a chain.
        data: its bytes, which do not change.
        is_state: True for the state after the parent; without a parent, after a prefix without KV.
    """

    content: bytes
    parent: bytes
    data: Buffer
    is_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The state of a store, and its counters.

    Attributes:
        num_blocks: blocks that ``find`` finds.
        used_bytes: bytes that they take, with what is kept beside them.
        limit_bytes: the most bytes.
        read_blocks: blocks that were returned so far.
        read_bytes: bytes of these.
        written_blocks: blocks that were kept so far; on a disk, written.
        written_bytes: bytes of these.
        discarded: blocks that were not kept, or not returned, by reason.
        off: why the store keeps nothing at the moment; empty if it works.
    """

    num_blocks: int = 0
    used_bytes: int = 0
    limit_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    discarded: Mapping[str, int] = field(default_factory=dict[str, int])
    off: str = ""


class Fetch(Protocol):
    """Blocks that are being read; any thread may call its methods."""

    @property
    def is_done(self) -> bool:
        """True once ``result`` returns at once."""
        ...

    def result(self) -> Sequence[Buffer]:
        """Return the leading blocks that could be read, verified; call it only when done."""
        ...

    def cancel(self) -> None:
        """Stop reading what is not read yet: the result is no longer needed."""
        ...


class BlockStore(Protocol):
    """A place for blocks of one model, in host memory or on a disk.

    The engine thread makes all calls, and no call waits for a device. Stores inherit from this
    class; methods with a body are defaults.

    Attributes:
        tier: what the place is called in metrics.
        is_own: False if its blocks are those of other servers.
        gives_parts: True if what a fetch has so far may be used before it is done.
        is_steady: True if that also says how long the rest takes.
    """

    tier: str
    is_own: bool = True
    gives_parts: bool = False
    is_steady: bool = False

    def find(self, contents: Sequence[bytes]) -> int:
        """Return how many leading ones of these contents are here, and count them as used.

        A block that ``put`` took is found at once, although it may still be written.
        """
        ...

    def use(self, contents: Sequence[bytes]) -> None:
        """Count blocks of a chain as used, its first block first; those not here are passed over.

        So the beginning of a chain is never older than what follows it.
        """
        del contents

    def fetch(self, contents: Sequence[bytes]) -> Fetch:
        """Begin to read blocks of a chain, in order."""
        ...

    def place(self, contents: Sequence[bytes]) -> str:
        """Return where ``fetch`` reads blocks: each such place has a pace of its own."""
        del contents
        return self.tier

    def put(self, block: StoredBlock) -> None:
        """Keep a block. Blocks of a chain come one after the other, in order."""
        ...

    @property
    def is_busy(self) -> bool:
        """True while so much waits to be written that more would be discarded.

        Then the caller keeps its blocks where they are, if it can.
        """
        return False

    @property
    def room_bytes(self) -> float:
        """Return how many bytes of blocks it takes now before it discards any."""
        return math.inf

    def wake_by(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, on any thread, when a fetch is done or the store not busy any more.

        A fetch that is done when ``fetch`` returns needs no call.
        """
        del wake

    def has(self, content: bytes) -> bool:
        """True if a block is here, or is not worth to be put again; it does not count as used."""
        ...

    def contents(self, most: float = math.inf) -> Sequence[bytes]:
        """Return the contents of what ``find`` finds, the latest used ones if there are more.

        Any thread may call it.
        """
        del most
        return ()

    def clear(self) -> None:
        """Forget all blocks of the model, those of other processes and earlier ones too."""
        ...

    @property
    def stats(self) -> StoreStats:
        """Its state and its counters."""
        ...

    def close(self) -> None:
        """Keep what is still to be written, as far as that takes a short time, and end."""


def latest(used: Mapping[bytes, float], most: float) -> Sequence[bytes]:
    """Return at most so many contents, the latest used ones; ``used``: when each was used.

    Among contents that were used at once, those that are listed first are returned.
    """
    if len(used) <= most:
        return list(used)
    return sorted(used, key=used.__getitem__, reverse=True)[: int(most)]
