"""A store that keeps blocks in a dict: what a place below the block pool takes at least."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_parallm.generation.kv_cache.stores import BlockStore, StoredBlock, StoreStats
from mlx_parallm.types.content import Buffer


@dataclass
class DictFetch:
    blocks: Sequence[Buffer]
    is_done: bool

    def result(self) -> Sequence[Buffer]:
        return self.blocks

    def cancel(self) -> None:
        self.blocks = ()


class DictStore(BlockStore):
    """Keeps blocks without a limit; with ``holds_back``, fetches wait for ``complete``."""

    def __init__(self, *, holds_back: bool = False) -> None:
        self.tier, self.blocks, self.fetches = "dict", dict[bytes, Buffer](), list[DictFetch]()
        self._holds_back, self._most, self._wake = holds_back, None, lambda: None

    def fail_after(self, num_blocks: int | None) -> None:
        self._most = num_blocks

    def complete(self) -> None:
        while self.fetches:
            self.fetches.pop(0).is_done = True
        self._wake()

    def wake_by(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def find(self, contents: Sequence[bytes]) -> int:
        return next((i for i, c in enumerate(contents) if c not in self.blocks), len(contents))

    def fetch(self, contents: Sequence[bytes]) -> DictFetch:
        blocks = [self.blocks[each] for each in contents[: self.find(contents)]][: self._most]
        self.fetches += [fetch := DictFetch(blocks, is_done=not self._holds_back)]
        return fetch

    def put(self, block: StoredBlock) -> None:
        self.blocks[block.content] = block.data

    def has(self, content: bytes) -> bool:
        return content in self.blocks

    def clear(self) -> None:
        self.blocks.clear()

    @property
    def stats(self) -> StoreStats:
        return StoreStats(num_blocks=len(self.blocks))
