"""Sources that only stores have are read once, before the sequences that need them start."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock, Tiers


@dataclass(frozen=True, slots=True)
class SourceKey:
    """All that the KV of a source depends on.

    Attributes:
        salt: of the source itself, the weights, the adapter and the scope.
        lasting_salt: ``salt`` as every process has it; None if no store may have the blocks, or
            while it is unknown.
        adapter: the content of the adapter; None for none.
        owner: the only request that may use the KV; None if any may.
    """

    salt: bytes
    lasting_salt: bytes | None = field(default=None, compare=False)
    adapter: str | None = None
    owner: Hashable | None = None


@dataclass(slots=True, eq=False)
class SourceRead:
    """The chain of a source that is read. Implements ``Arrival``.

    Attributes:
        key: of the source.
        fetch: reads the chain.
        num_users: sequences that wait for it.
        is_taken: True once one of them has what was read.
    """

    key: SourceKey
    fetch: ChainFetch
    num_users: int = 0
    is_taken: bool = False

    def is_awaited(self, position: int) -> bool:
        """See ``Arrival``."""
        return not self.is_taken and self.fetch.is_awaited(position)


class SourceReads:
    """Reads sources from stores: the whole chain of one, or nothing.

    A sequence that waits reads its source once. What could not be read is encoded.
    """

    def __init__(self, kv: KVCacheManager, tiers: Tiers) -> None:
        self._kv = kv
        self._tiers = tiers
        self._by_key: dict[SourceKey, SourceRead] = {}

    def join(self, key: SourceKey, num_tokens: int) -> SourceRead | None:
        """Return the read of a source for one more sequence, begun if it is the first.

        None if there is nothing to read, or it would take longer than encoding.
        """
        read = self._by_key.get(key)
        if read is None:
            read = self._begin(key, num_tokens)
        if read is not None:
            read.num_users += 1
        return read

    def _begin(self, key: SourceKey, num_tokens: int) -> SourceRead | None:
        if key.owner is not None:
            return None
        chain = self._kv.stored_source(key.salt, num_tokens, key.lasting_salt)
        if chain is None:
            return None
        fetches = self._tiers.fetches
        fetch = fetches.add(chain.runs, num_tokens, pace=fetches.encoding)
        if fetch is None:
            return None
        read = self._by_key[key] = SourceRead(key, fetch)
        return read

    def leave(self, read: SourceRead) -> None:
        """Count one sequence less that waits; without any the read ends."""
        read.num_users -= 1
        if not read.num_users and not read.is_taken:
            del self._by_key[read.key]
            self._tiers.fetches.release(read.fetch)

    def take(self, read: SourceRead, num_blocks: int) -> Sequence[ArrivedBlock]:
        """Return all blocks of a source; ``end`` must follow. None of them if any is missing."""
        if read.is_taken:
            return ()
        read.is_taken = True
        del self._by_key[read.key]
        arrived = self._tiers.take(read.fetch)
        if len(arrived) == num_blocks:
            return arrived
        self.end(read)
        return ()

    def end(self, read: SourceRead) -> None:
        """Release what was read: all of it is filled, or is not needed."""
        self._tiers.fetches.release(read.fetch)

    def __iter__(self) -> Iterator[SourceRead]:
        """Yield the reads that nothing was taken of."""
        return iter(self._by_key.values())
