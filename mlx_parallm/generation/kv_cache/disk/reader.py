"""Threads that read and verify blocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.digests import block_digest
from mlx_parallm.generation.kv_cache.disk.files import Files, OpenFile
from mlx_parallm.generation.kv_cache.disk.format import BadFileError, Span
from mlx_parallm.generation.kv_cache.disk.runs import Run
from mlx_parallm.generation.kv_cache.stores import Fetch
from mlx_parallm.types.content import Buffer

logger = logging.getLogger(__name__)

# NUM_READERS: threads that read and verify at once. A core verifies 1 to 2 GB/s, and a disk reads
# more.
NUM_READERS = 8
# PIECE_BLOCKS: most blocks that a thread takes at once, so that threads share a file.
PIECE_BLOCKS = 32


@dataclass(slots=True, eq=False)
class _Piece:
    """Consecutive blocks of one run, a part of a fetch."""

    run: Run
    first: int
    contents: list[bytes]
    data: list[Buffer] = field(default_factory=list[Buffer])


class DiskFetch(Fetch):
    """Blocks of a chain that several threads read."""

    def __init__(self, pieces: Sequence[_Piece], wake: Callable[[], None]) -> None:
        self._pieces = pieces
        self._wake = wake
        self._lock = threading.Lock()
        self._num_open = len(pieces)
        # Blocks from here on need not be read: the result ends before them.
        self._end = sum(len(piece.contents) for piece in pieces)

    @property
    def is_done(self) -> bool:
        """See ``Fetch``."""
        return self._num_open == 0

    def result(self) -> Sequence[Buffer]:
        """See ``Fetch``."""
        data: list[Buffer] = []
        for piece in self._pieces:
            data += piece.data
            if len(piece.data) < len(piece.contents):
                break
        return data

    def cancel(self) -> None:
        """See ``Fetch``."""
        self._end = 0

    def needs(self, index: int) -> bool:
        """True if the block of this index is still of use."""
        return index < self._end

    def end(self, index: int) -> None:
        """End the result before a block, which cannot be read."""
        with self._lock:
            self._end = min(self._end, index)

    def finish_piece(self) -> None:
        """Count a piece as read, or as given up."""
        with self._lock:
            self._num_open -= 1
            is_last = self._num_open == 0
        if is_last:
            self._wake()


class Readers:
    """Threads that read pieces of fetches, in the order in which they were asked for.

    ``wake`` is called when a fetch is done,
    ``on_bad`` is called with a run that cannot be read, and why; ``on_read`` with a run, the number
    of its blocks that were read, and their bytes.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        on_bad: Callable[[Run, Exception], None],
        on_read: Callable[[Run, int, int], None],
        wake: Callable[[], None],
        clocks: Clocks,
    ) -> None:
        self._folder = folder
        self._files = files
        self._on_bad = on_bad
        self._on_read = on_read
        self._wake = wake
        self._timer = clocks.timer
        self._queue: SimpleQueue[tuple[DiskFetch, _Piece] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._begun_ns: dict[_Piece, int] = {}
        self._is_closed = False

    def start(self) -> None:
        """Start the threads."""
        for number in range(NUM_READERS):
            name = f"kv-disk-reader-{number}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def fetch(self, runs: Sequence[tuple[Run, bytes]]) -> DiskFetch:
        """Begin to read contents, each with the run that has it."""
        pieces = [] if self._is_closed else list(_pieces(runs))
        fetch = DiskFetch(pieces, self._wake)
        for piece in pieces:
            self._queue.put((fetch, piece))
        return fetch

    def waiting_s(self) -> float:
        """Return how many seconds the oldest read has taken that is under way."""
        begun = min(list(self._begun_ns.values()), default=None)
        return 0.0 if begun is None else (self._timer() - begun) / 1e9

    def read_waiting(self) -> None:
        """Read what waits, on the caller's thread."""
        while not self._queue.empty():
            self._read_next()

    def close(self, within_s: float) -> None:
        """End the threads after what they read now; fetches that wait get no more blocks."""
        self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(within_s / len(self._threads))

    def _work(self) -> None:
        while self._read_next():
            pass

    def _read_next(self) -> bool:
        work = self._queue.get()
        if work is None:
            return False
        fetch, piece = work
        self._begun_ns[piece] = self._timer()
        try:
            if fetch.needs(piece.first) and not self._is_closed:
                self._read(fetch, piece)
        finally:
            del self._begun_ns[piece]
            fetch.finish_piece()
        return True

    def _read(self, fetch: DiskFetch, piece: _Piece) -> None:
        try:
            for data in self._blocks(fetch, piece):
                piece.data.append(data)
        except (OSError, BadFileError) as problem:
            self._on_bad(piece.run, problem)
        except Exception:
            # It says nothing of the file. The thread goes on: reads would be awaited without it.
            logger.exception("KV of %s could not be read", piece.run.path(self._folder))
        if len(piece.data) < len(piece.contents):
            fetch.end(piece.first + len(piece.data))
        if piece.data:
            self._on_read(piece.run, len(piece.data), sum(map(len, piece.data)))

    def _blocks(self, fetch: DiskFetch, piece: _Piece) -> Iterator[Buffer]:
        # A run that is being written drops its bytes at any time, but not before it is a file.
        if (blocks := piece.run.blocks) is not None:
            yield from (blocks[content] for content in piece.contents)
            return
        header = piece.run.header
        if header is None:
            raise BadFileError("it was not written")
        spans = {span.content: span for span in header.spans()}
        with ExitStack() as stack:
            file = stack.enter_context(self._files.reading(piece.run.path(self._folder)))
            for number, content in enumerate(piece.contents, piece.first):
                if not fetch.needs(number):
                    return
                yield _verified(file, spans[content])


def _pieces(runs: Sequence[tuple[Run, bytes]]) -> Iterator[_Piece]:
    piece: _Piece | None = None
    for number, (run, content) in enumerate(runs):
        if piece is None or piece.run is not run or len(piece.contents) == PIECE_BLOCKS:
            if piece is not None:
                yield piece
            piece = _Piece(run, number, [])
        piece.contents.append(content)
    if piece is not None:
        yield piece


def _verified(file: OpenFile, span: Span) -> bytes:
    """Return a block from a file.

    Raises:
        BadFileError: the file has other bytes there.
    """
    data = file.read(span.offset, span.length)
    if len(data) != span.length:
        raise BadFileError("it ends within a block")
    if block_digest(span.content, data) != span.digest:
        raise BadFileError("a block has other bytes than were written")
    return data
