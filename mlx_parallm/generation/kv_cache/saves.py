"""Blocks and states that stores are to get: what the device must read, and when at the latest."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from operator import itemgetter

from mlx_parallm.types.content import Buffer

# EARLY_BYTES: most bytes of what was read before the blocks that it follows; a single state may be
# larger.
EARLY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Save:
    """A block of the pool, or a snapshot, whose bytes stores are to get.

    Attributes:
        place: the number of the block, or the snapshot's slot.
        content: its content in stores.
        parent: the content of the block that it follows; empty for the first of a chain.
        is_drafted: True if it holds a draft model's KV too.
        is_state: True for a snapshot.
        size: how many blocks have as many bytes.
        is_kept: False if only another server has asked for it.
    """

    place: int
    content: bytes
    parent: bytes
    is_drafted: bool = False
    is_state: bool = False
    size: int = 1
    is_kept: bool = True


class SaveQueue:
    """Blocks in the order in which their chains ended, each chain's snapshots behind it.

    A block stays in the pool, where others find it, until it is read. If it is allocated before
    that, it is read before the step that may write to it. So the end of a chain, which is evicted
    first, may be read steps before its beginning. Stores get it behind that. The slots of snapshots
    are evicted likewise.
    """

    def __init__(self) -> None:
        self._numbers = count()
        # With their numbers in the queue, by whether they are snapshots, and their places.
        self._waiting: OrderedDict[tuple[bool, int], tuple[int, Save]] = OrderedDict()
        self._leaving: list[tuple[int, Save]] = []
        # Those that steps in flight read, by their contents.
        self._begun: dict[bytes, Save] = {}
        self._contents: set[bytes] = set()
        # The places of those that are not kept, by their contents.
        self._unkept: dict[bytes, int] = {}
        # What was read before the blocks that it follows, by these blocks' contents.
        self._early: dict[bytes, list[tuple[Save, Buffer]]] = {}
        self._early_bytes = 0

    def __len__(self) -> int:
        """Return how many wait to be read."""
        return len(self._waiting) + len(self._leaving)

    @property
    def begun_size(self) -> int:
        """Return the size of what is being read for stores, in blocks."""
        return sum(save.size for save in self._begun.values() if save.is_kept)

    @property
    def has_unkept(self) -> bool:
        """True if something is read, or waits to be, that no store gets."""
        return bool(self._unkept)

    def __contains__(self, content: bytes) -> bool:
        """True if a content waits to be read, is being read, or waits for what it follows."""
        return content in self._contents

    def keeps(self, content: bytes) -> bool:
        """True if stores get a content once it is read."""
        return content in self._contents and content not in self._unkept

    def add(self, save: Save) -> None:
        """Queue a block or a snapshot, whose content does not wait already to be kept."""
        number = next(self._numbers)
        if (place := self._unkept.pop(save.content, None)) is not None:
            self._waiting.pop((False, place), None)
            if self._replace(number, save):
                return
        if not save.is_kept:
            self._unkept[save.content] = save.place
        self._waiting[save.is_state, save.place] = number, save
        self._contents.add(save.content)

    def _replace(self, number: int, save: Save) -> bool:
        """Replace one that leaves, or is being read, by one that is kept; False if there is none.

        That one reads the same bytes, maybe from another place.
        """
        if (begun := self._begun.get(save.content)) is not None:
            self._begun[save.content] = replace(save, is_drafted=begun.is_drafted)
            return True
        for index, (_, leaving) in enumerate(self._leaving):
            if leaving.content == save.content:
                kept = replace(leaving, parent=save.parent, is_kept=True)
                self._leaving[index] = number, kept
                return True
        return False

    def leave(self, places: Iterable[int], *, are_states: bool = False) -> None:
        """Have blocks, or snapshots, read before the next step, which may write to them."""
        if self._waiting:
            leaving = (self._waiting.pop((are_states, place), None) for place in places)
            self._leaving += filter(None, leaving)

    def forget(self, blocks: Iterable[int]) -> None:
        """Give up blocks that may be written to before the next step."""
        for block in blocks:
            if (queued := self._waiting.pop((False, block), None)) is not None:
                self._end(queued[1].content)

    def _end(self, content: bytes) -> None:
        self._contents.discard(content)
        self._unkept.pop(content, None)

    def take(self, limit: float, room: float = math.inf) -> Sequence[Save]:
        """Return what is to be read before the next step.

        It is what leaves, and others in the order of their chains, because stores keep no block
        without the one before it: until ``limit`` blocks are reached, as far as ``room`` blocks
        hold what is kept of them.
        """
        if not (self._waiting or self._leaving):
            return ()
        taken, self._leaving = self._leaving, []
        size = sum(save.size for _, save in taken)
        size_kept = sum(save.size for _, save in taken if save.is_kept)
        while self._waiting and size < limit:
            save = next(iter(self._waiting.values()))[1]
            size_kept += save.size * save.is_kept
            if size_kept > room:
                taken += self._take_unkept(limit - size)
                break
            size += save.size
            taken.append(self._waiting.popitem(last=False)[1])
        saves = [save for _, save in sorted(taken, key=itemgetter(0))]
        self._begun.update((save.content, save) for save in saves)
        return saves

    def _take_unkept(self, limit: float) -> list[tuple[int, Save]]:
        """Return those that wait and need no room, at most so many."""
        waiting = [
            key for place in self._unkept.values() if (key := (False, place)) in self._waiting
        ]
        return [
            self._waiting.pop(key) for key in islice(waiting, math.ceil(min(limit, len(waiting))))
        ]

    def end(self, content: bytes, data: Buffer) -> Sequence[tuple[Save, Buffer]]:
        """Return what stores can get now that a block was read, each behind what it follows.

        It is the block with what was read early behind it, or nothing: it is early itself, or was
        forgotten meanwhile.
        """
        save = self._begun.pop(content, None)
        if save is None:
            return ()
        has_room = not self._early or self._early_bytes + len(data) <= EARLY_BYTES
        if save.parent in self._contents and has_room:
            self._early.setdefault(save.parent, []).append((save, data))
            self._early_bytes += len(data)
            self._drop_stranded()
            return ()
        ended, following = list[tuple[Save, Buffer]](), [(save, data)]
        while following:
            ended.append(following.pop())
            following += self._take_early(ended[-1][0].content)
        for each, _ in ended:
            self._end(each.content)
        self._drop_stranded()
        return ended

    def fail(self, content: bytes) -> None:
        """Forget a block that could not be read."""
        if self._begun.pop(content, None) is not None:
            self._end(content)
            self._drop_stranded()

    def _take_early(self, parent: bytes) -> list[tuple[Save, Buffer]]:
        early = self._early.pop(parent, [])
        self._early_bytes -= sum(len(data) for _, data in early)
        return early

    def _drop_stranded(self) -> None:
        """Drop what is early if nothing that it could follow is to come."""
        if not (self._waiting or self._leaving or self._begun):
            self.clear()

    def clear(self) -> None:
        """Forget all, also what steps in flight read: nothing of before is to be kept."""
        self._waiting.clear()
        self._leaving.clear()
        self._begun.clear()
        self._contents.clear()
        self._unkept.clear()
        self._early.clear()
        self._early_bytes = 0
