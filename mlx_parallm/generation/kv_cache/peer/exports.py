"""Blocks that other servers ask for: read from this server's stores, and from its pool."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from pickle import PickleBuffer
from typing import Any, Protocol

from mlx_parallm.generation.kv_cache.blocks import BlockPool, BlockTable
from mlx_parallm.generation.kv_cache.peer.filters import MAX_CONTENTS, UID_BYTES, FilterMaker
from mlx_parallm.generation.kv_cache.saves import Save, SaveQueue
from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch
from mlx_parallm.types.content import BLOCK_DIGEST_BYTES, Buffer

logger = logging.getLogger(__name__)

# MAX_ROOTS: prefixes' roots of which blocks in the pool can be asked for; the latest ones.
MAX_ROOTS = 4096
#: ``MAX_BLOCKS``, ``MAX_BYTES``: most of one answer, unless a single block is larger.
MAX_BLOCKS = 64
MAX_BYTES = 8 << 20
#: ``ANSWER_S``: seconds after which an answer has what was read by then.
ANSWER_S = 10.0
# FILTER_S: seconds in which all who ask get the same filter.
FILTER_S = 2.0


@dataclass(frozen=True, slots=True)
class SentBlock:
    """The bytes of a block, which go to other processes uncopied.

    They are no PickleBuffer before they go: Python before 3.12.7 crashes where its garbage
    collection meets a memoryview with a PickleBuffer (CPython's issue 122306), and the future of an
    answer is in a cycle.
    """

    data: Buffer

    def __bytes__(self) -> bytes:
        """Return a copy."""
        return bytes(self.data)

    def __reduce_ex__(self, _protocol: object) -> tuple[Any, ...]:
        """See pickle."""
        return SentBlock, (PickleBuffer(self.data),)


@dataclass(slots=True, eq=False)
class _Question:
    """Blocks that were asked for; what ``answer`` gets is their leading run, at the latest then."""

    contents: Sequence[bytes]
    answer: Future[list[SentBlock]]
    until_s: float
    waits: bool
    blocks: list[Buffer | None] = field(default_factory=list[Buffer | None])
    reads: list[tuple[int, Fetch]] = field(default_factory=list[tuple[int, Fetch]])

    @property
    def leading(self) -> list[SentBlock]:
        """Return the leading blocks that were read."""
        return [SentBlock(block) for block in _leading(self.blocks)]


class Places(Protocol):
    """The stores of a model, as ``Tiers`` has them."""

    saves: SaveQueue

    @property
    def own_stores(self) -> Sequence[BlockStore]:
        """Return those whose blocks are on this machine."""
        ...


class Exports:
    """Answers other servers' requests for blocks.

    Blocks of the pool are read before a step, as those which are saved, and no more at a time. All
    methods but ``ask`` and ``contents`` are called on the engine thread.

    Attributes:
        owner: digest of the model's ``Identity``: only a server with the same may ask.
        uid: names this server, so that it finds out that a peer is itself.
        wake: wakes the engine thread.
    """

    def __init__(
        self,
        owner: str,
        block_bytes: int,
        uid: bytes = bytes(UID_BYTES),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``clock`` returns seconds."""
        self.owner = owner
        self.uid = uid
        self.wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._most = max(1, min(MAX_BLOCKS, MAX_BYTES // block_bytes))
        self._pool: BlockPool | None = None
        self._places: Places | None = None
        self._lock = threading.Lock()
        self._inbox: deque[_Question] = deque()
        self._open: list[_Question] = []
        self._filter: Future[bytes] | None = None
        self._filter_s = -math.inf
        self._has_logged = False
        self._maker = FilterMaker()
        # The roots of contents in the pool, by those of the same contents in stores.
        self._roots: OrderedDict[bytes, bytes] = OrderedDict()

    def attach(self, pool: BlockPool, places: Places) -> None:
        """Answer with blocks of a pool, and of the stores below it."""
        self._pool, self._places = pool, places

    def note(self, table: BlockTable) -> None:
        """Let blocks of a table in the pool be asked for."""
        root = table.lasting_root
        if root is None:
            return
        with self._lock:
            self._roots[root] = table.root
            self._roots.move_to_end(root)
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)

    def contents(self, most: float = math.inf) -> list[bytes]:
        """Return the contents that are here now, the latest used ones if there are more.

        Any thread may call it.
        """
        if self._pool is None or self._places is None:
            return []
        with self._lock:
            lasting = {root: known for known, root in self._roots.items()}
        pairs = (
            (lasting.get(content[:BLOCK_DIGEST_BYTES]), content[BLOCK_DIGEST_BYTES:])
            for content in self._pool.contents(most)
        )
        # A set in order: stores have copies.
        known = dict.fromkeys(root + link for root, link in pairs if root is not None)
        for store in self._places.own_stores:
            known |= dict.fromkeys(store.contents(most))
        return list(known)

    def filter(self) -> Future[bytes]:
        """Return ``uid`` and the bytes of a filter of ``contents``; any thread may call it.

        It is made on a thread of its own, once for all who ask within a short time.
        """
        with self._lock:
            is_old = self._clock() - self._filter_s > FILTER_S
            if self._filter is None or (is_old and self._filter.done()):
                self._filter, self._filter_s = Future(), self._clock()
                make = threading.Thread(
                    target=self._make_filter, args=(self._filter,), name="kv-filter", daemon=True
                )
                make.start()
            # A caller that cancels its answer leaves the others theirs.
            answer: Future[bytes] = Future()
            self._filter.add_done_callback(partial(_pass_on, answer))
            return answer

    def _make_filter(self, answer: Future[bytes]) -> None:
        try:
            contents = self.contents(MAX_CONTENTS)
            if len(contents) >= MAX_CONTENTS:
                self._log_many()
            answer.set_result(self.uid + self._maker.make(contents[:MAX_CONTENTS]))
        except BaseException as problem:
            answer.set_exception(problem)
            raise

    def _log_many(self) -> None:
        if not self._has_logged:
            self._has_logged = True
            logger.info("peers see the latest %d blocks only, not all", MAX_CONTENTS)

    def ask(self, contents: Sequence[bytes], *, waits: bool = False) -> Future[list[SentBlock]]:
        """Return the leading blocks of a chain, at most ``MAX_BLOCKS``; any thread may call it.

        ``waits``: blocks that are not here are being computed; the first of them is awaited. The
        caller cancels the answer when it is needed no longer.
        """
        until_s = self._clock() + ANSWER_S
        question = _Question(contents[: self._most], Future(), until_s, waits)
        self._inbox.append(question)
        self.wake()
        return question.answer

    @property
    def has_work(self) -> bool:
        """True if ``advance`` would do something."""
        return bool(self._inbox) or any(map(self._is_ready, self._open))

    def _is_ready(self, question: _Question) -> bool:
        """True if an answer can be given, or the pool has more of it."""
        if self._is_over(question):
            return True
        if not all(read.is_done for _, read in question.reads):
            return False
        return not question.waits or self._has(question.contents[0])

    def _is_over(self, question: _Question) -> bool:
        """True if the caller waits no longer; one in another process cannot say so."""
        return question.answer.cancelled() or self._clock() > question.until_s

    def _has(self, content: bytes) -> bool:
        if self._block(content) is not None:
            return True
        assert self._places is not None
        return any(store.find([content]) for store in self._places.own_stores)

    def advance(self) -> None:
        """Begin to read what was asked for, and answer what was read."""
        while self._inbox:
            self._open.append(self._inbox.popleft())
        for question in tuple(self._open):
            if not question.blocks and (not question.waits or self._has(question.contents[0])):
                question.waits = False
                self._begin(question)
            self._collect(question)
            is_awaited = question.waits or self._is_awaited(question)
            if self._is_over(question) or not is_awaited:
                self._open.remove(question)
                _settle(question)

    def _begin(self, question: _Question) -> None:
        """Read from the nearest store that has a block, else from the pool, until none has it."""
        assert self._places is not None, "the exports are attached"
        start, contents = 0, question.contents
        while start < len(contents):
            rest = contents[start:]
            counts = ((store, store.find(rest)) for store in self._places.own_stores)
            store, count = next(((store, n) for store, n in counts if n), (None, 0))
            if store is not None:
                question.reads.append((start, store.fetch(rest[:count])))
            elif (block := self._block(contents[start])) is not None:
                self._save(block, contents[start])
                count = 1
            else:
                break
            start += count
        question.contents = contents[:start]
        question.blocks = [None] * start

    def _block(self, content: bytes) -> int | None:
        """Return the block of the pool with a content; None if there is none."""
        root = self._roots.get(content[:BLOCK_DIGEST_BYTES])
        if root is None or self._pool is None:
            return None
        return self._pool.find(root + content[BLOCK_DIGEST_BYTES:])

    def _save(self, block: int, content: bytes) -> None:
        assert self._places is not None
        assert self._pool is not None
        saves = self._places.saves
        if content not in saves:
            is_drafted = block in self._pool.drafted
            saves.add(Save(block, content, b"", is_drafted=is_drafted, is_kept=False))

    def put(self, content: bytes, data: Buffer) -> None:
        """Take a block of the pool that was read."""
        for question in self._open:
            if content in question.contents:
                index = question.contents.index(content)
                if index < len(question.blocks):
                    question.blocks[index] = data

    def _collect(self, question: _Question) -> None:
        """Take what stores have read."""
        for entry in tuple(question.reads):
            start, read = entry
            if read.is_done:
                question.reads.remove(entry)
                data = read.result()
                question.blocks[start : start + len(data)] = data

    def _is_awaited(self, question: _Question) -> bool:
        """True if a store still reads, or the device is still to read blocks of the pool."""
        assert self._places is not None
        if question.reads:
            return True
        missing = question.blocks.index(None) if None in question.blocks else None
        return missing is not None and question.contents[missing] in self._places.saves


def _leading(blocks: Sequence[Buffer | None]) -> Iterator[Buffer]:
    for block in blocks:
        if block is None:
            return
        yield block


def _pass_on(answer: Future[bytes], made: Future[bytes]) -> None:
    if answer.set_running_or_notify_cancel():
        if problem := made.exception():
            answer.set_exception(problem)
        else:
            answer.set_result(made.result())


def _settle(question: _Question) -> None:
    for _, read in question.reads:
        read.cancel()
    try:
        question.answer.set_result(question.leading)
    except InvalidStateError:
        # The caller needs it no longer.
        return
