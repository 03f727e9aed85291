"""The KV blocks of a model: who holds each, which are cached, and those of a sequence."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_parallm.generation.inputs.prompt_inputs import NO_INPUTS, PromptInputs
from mlx_parallm.types.content import block_hash


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a preempted sequence, from where it can go on.

    Attributes:
        content: of the snapshot there, and of the block that its prefix ends with.
        num_tokens: the tokens before that position.
        is_whole: True if that block is full, and found like others; otherwise it is found by the
            tail alone.
    """

    content: bytes
    num_tokens: int
    is_whole: bool = False


class BlockPool:
    """Every block is free, cached (found by its content, without an owner) or owned, exactly once.

    An owned block can have a content too: it is then shared with every sequence that needs that
    content. A block loses its content when it is evicted, or if that turns out to be wrong.

    Attributes:
        drafted: full blocks that hold a draft model's KV of the same tokens too; a block is dropped
            from it when it is allocated.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._owners = [0] * num_blocks
        self._content: list[bytes | None] = [None] * num_blocks
        self._by_content: dict[bytes, int] = {}
        self.drafted: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones that can be evicted."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Own ``count`` blocks, evicting the least recently used cached ones; None if too few."""
        if count > self.num_free:
            return None
        blocks = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._owners[block] = 1
        self.drafted.difference_update(blocks)
        return blocks

    def share(self, block: int) -> None:
        """Own a block that is owned or cached already."""
        if self._owners[block] == 0:
            del self._cached[block]
        self._owners[block] += 1

    def release(self, block: int) -> None:
        """Give up a block; with its last owner it becomes cached, or free if it has no content."""
        assert self._owners[block] > 0, "a block without an owner is released"
        self._owners[block] -= 1
        if self._owners[block] > 0:
            return
        if self._content[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def find(self, content: bytes) -> int | None:
        """Return the block with this content, owned or cached."""
        return self._by_content.get(content)

    def contents(self, most: float = math.inf) -> list[bytes]:
        """Return the contents of the blocks, without those to be evicted first if there are more.

        Any thread may call it.
        """
        known = list(self._by_content)
        if len(known) <= most:
            return known
        cached = {self._content[block]: None for block in reversed(list(self._cached))}
        owned = [content for content in known if content not in cached]
        return [*owned, *filter(None, cached)][: int(most)]

    def is_cached(self, block: int) -> bool:
        """Return True if a block has a content and no owner."""
        return block in self._cached

    def drop_content(self, block: int) -> None:
        """Let an owned block not be found any more: its owner is going to change it."""
        assert self._owners[block] == 1, "others may read the block"
        self.forget(block)

    def forget(self, block: int) -> None:
        """Let a block not be found any more; those that own it keep it."""
        content, self._content[block] = self._content[block], None
        assert content is not None, "the block has no content"
        del self._by_content[content]
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def set_content(self, block: int, content: bytes) -> bool:
        """Make an owned, computed block findable; return True if its content was not before.

        The first block of a content keeps it.
        """
        is_new = self._content[block] is None and content not in self._by_content
        if is_new:
            self._content[block] = content
            self._by_content[content] = block
        return is_new

    def clear_cache(self) -> None:
        """Forget all contents; owned blocks stay owned."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_content.clear()
        self._content = [None] * self.num_blocks

    def check_integrity(self, owners: list[int]) -> None:
        """Assert the invariants, given how many tables hold each block."""
        assert self._owners == owners, "reference counts differ from the tables"
        places = [*self._free, *self._cached, *(b for b, n in enumerate(owners) if n)]
        assert sorted(places) == list(range(self.num_blocks)), (
            "a block is nowhere, or in two places"
        )
        for content, block in self._by_content.items():
            assert self._content[block] == content
        assert all(self._content[block] is None for block in self._free)
        assert all(self._content[block] is not None for block in self._cached)
        assert sum(c is not None for c in self._content) == len(self._by_content)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        content = self._content[block]
        assert content is not None
        del self._by_content[content]
        self._content[block] = None
        return block


class BlockTable:
    """Block ids, the chain of hashes of its leading full blocks, and the ids as a tuple, made once.

    The content of a block is ``root``, or ``lasting_root`` where contents outlive the process,
    followed by its hash. ``lasting_root`` is None if no store may have the blocks.
    ``generation`` is the one of the prefix cache when the sequence began: what it computes becomes
    cached only in that, and never after ``KVCacheManager.withhold``. ``num_drafted``: leading
    blocks noted as computed by a draft model. ``inputs``: what positions mean that are no tokens.
    ``num_cached``: tokens that were found in the cache. ``num_matched``: tokens whose blocks were
    found, with a snapshot behind them or not. ``snapshot``: the slot with the state after
    these, held until the first step of the sequence; None if there is none. ``found``: the
    content of that snapshot. ``tail``: that of a last block that only this table may use; empty if
    there is none. ``is_source``: True if the chain is that of a source, of use as a whole only.
    """

    def __init__(
        self,
        root: bytes,
        generation: int,
        inputs: PromptInputs = NO_INPUTS,
        lasting_root: bytes | None = None,
    ) -> None:
        self.blocks: list[int] = []
        self.hashes: list[bytes] = []
        self.root = root
        self.lasting_root = lasting_root
        self.generation = generation
        self.inputs = inputs
        self.num_drafted = 0
        self.num_cached = 0
        self.num_matched = 0
        self.snapshot: int | None = None
        self.found = b""
        self.tail = b""
        self.is_source = False
        self._tuple: tuple[int, ...] | None = None

    @property
    def parent(self) -> bytes:
        """The hash that the next full block follows; empty if there is none."""
        return self.hashes[-1] if self.hashes else b""

    def link(
        self, token_ids: Sequence[int], start: int, stop: int, parent: bytes | None = None
    ) -> bytes:
        """Return the hash of a full block of tokens, ``start`` to ``stop - 1``.

        It follows ``parent``, or the table's last hash.
        """
        key = self.inputs.block_key(start, stop)
        return block_hash(self.parent if parent is None else parent, token_ids[start:stop], key)

    def links(self, token_ids: Sequence[int], stop: int, block_size: int) -> Iterator[bytes]:
        """Yield the hashes of the full blocks behind a table's that begin before ``stop``."""
        link = self.parent
        for start in range(len(self.hashes) * block_size, stop, block_size):
            link = self.link(token_ids, start, start + block_size, link)
            yield link

    def count_whole(self, num_blocks: int, block_size: int) -> int:
        """Return how many of a prompt's first blocks, at most ``num_blocks``, may be a prefix.

        It ends where rows of inputs may be cut.
        """
        while num_blocks:
            num_whole = self.inputs.cut(0, num_blocks * block_size) // block_size
            if num_whole == num_blocks:
                break
            num_blocks = num_whole
        return num_blocks

    def append(self, blocks: list[int]) -> None:
        """Add blocks at the end."""
        if blocks:
            self.blocks += blocks
            self._tuple = None

    def clear(self) -> None:
        """Hold nothing."""
        self.blocks.clear()
        self.hashes.clear()
        self.num_drafted = self.num_cached = 0
        self.tail = b""
        self._tuple = None

    def as_tuple(self) -> tuple[int, ...]:
        """Return the block ids; the same object until they change."""
        if self._tuple is None:
            self._tuple = tuple(self.blocks)
        return self._tuple
