"""Chains of blocks that are being read from stores, each for a sequence that waits for it."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch
from mlx_parallm.types.content import Buffer

# FETCH_BYTES: most bytes of chains in host memory, which are read or wait for their sequence to
# start; one chain may be larger.
FETCH_BYTES = 2 << 30
# LONGEST_READ_S: seconds after which a read is given up, however long computing takes, unless it
# gives parts.
LONGEST_READ_S = 10.0
# SILENT_S: seconds without a further part after which a read that gives parts is given up if it is
# unknown how long computing takes.
SILENT_S = 4.0
# RETRY_S: seconds after which reading is tried again if it was slower than computing.
RETRY_S = 30.0
# MOST_RETRY_S: most seconds: the time doubles while reading stays slower than computing.
MOST_RETRY_S = 600.0
# MOST_SLOW: a read that was given up counts as at most so many times as long as computing.
MOST_SLOW = 2.0
# LOOK_SHARE: share of the time of computing after which a read that is too slow is given up, where
# what has come says so.
LOOK_SHARE = 0.1
# LEAST_LOOK_S: seconds that it has in any case, in which a busy peer answers.
LEAST_LOOK_S = 0.5
# NEW: share of a new measurement in an average.
NEW = 0.3


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of a chain that one store has, or the state at its end.

    Attributes:
        store: the store.
        contents: the contents, in order.
        entry_size: how many blocks have as many bytes as each.
    """

    store: BlockStore
    contents: Sequence[bytes]
    entry_size: int = 1

    @property
    def size(self) -> int:
        """The size of all, in blocks."""
        return len(self.contents) * self.entry_size


@dataclass(slots=True, eq=False)
class ChainFetch:
    """A chain that is read for one sequence.

    Attributes:
        runs: its blocks in order.
        state: the state after its last block, without which nothing of it is used; None for models
            without a state.
        compute_s: how long computing them takes, in seconds, times the patience with which they
            are read; None if that is unknown.
        clock: returns seconds.
        reads: of the runs; none before it is begun.
        asked_s: when it was asked for.
        begin_s: when reading was begun.
        done_s: when it was seen to be read; None before.
        came_s: when the latest parts came, of a read that gives parts.
        num_came: blocks that have come.
        num_latest: how many of them came last.
        is_dropped: True if the stores were cleared meanwhile: nothing of it may be used.
        is_taken: True once its sequence runs.
        num_chances: plans of steps that began while it was awaited no longer.
        places: tiers, and peers, that it is read from, which are of different speeds.
    """

    runs: Sequence[Run]
    state: Run | None
    compute_s: float | None
    clock: Callable[[], float]
    reads: list[Fetch] = field(default_factory=list[Fetch])
    asked_s: float = 0.0
    begin_s: float = 0.0
    done_s: float | None = None
    came_s: float = -math.inf
    num_came: int = 0
    num_latest: int = 0
    is_dropped: bool = False
    is_taken: bool = False
    num_chances: int = 0
    places: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.places = frozenset(run.store.place(run.contents) for run in self._parts)

    @property
    def num_blocks(self) -> int:
        """The number of its blocks."""
        return sum(len(run.contents) for run in self.runs)

    @property
    def num_entries(self) -> int:
        """The number of its blocks, and of its state if it has one."""
        return self.num_blocks + (self.state is not None)

    @property
    def size(self) -> int:
        """Its size in blocks, its state included."""
        return sum(run.size for run in self._parts)

    @property
    def _parts(self) -> Sequence[Run]:
        return self.runs if self.state is None else (*self.runs, self.state)

    @property
    def gives_parts(self) -> bool:
        """True if what has come of its last blocks is of use when it is given up."""
        return self.state is None and any(run.store.gives_parts for run in self.runs)

    @property
    def contents(self) -> list[bytes]:
        """The contents of its blocks."""
        return [content for run in self.runs for content in run.contents]

    @property
    def is_done(self) -> bool:
        """True once it has been read, or needs not be."""
        if self.is_dropped:
            return True
        return bool(self.reads) and all(read.is_done for read in self.reads)

    @property
    def due_s(self) -> float:
        """The time at which it is given up.

        Chains may be read one after the other, so one that was not begun has as long as computing
        takes if that is long. One that gives parts has as long in any case, and longer while they
        come faster than they are computed.
        """
        if not self.reads:
            return self.asked_s + max(LONGEST_READ_S, self.compute_s or 0.0)
        if not self.gives_parts:
            return self.begin_s + min(LONGEST_READ_S, self.compute_s or LONGEST_READ_S)
        look_s = self._look_s
        if look_s is not None and (self.clock() < look_s or self._is_behind):
            return look_s
        if self.compute_s is None:
            silent_s = max(self.begin_s, self.came_s) + SILENT_S
            return min(self.begin_s + LONGEST_READ_S, silent_s)
        latest_s = self.came_s + self.compute_s * self.num_latest / self.num_blocks
        return max(self.begin_s + self.compute_s, latest_s)

    @property
    def _look_s(self) -> float | None:
        """The time at which it is seen how fast a read is; None if it cannot be seen."""
        is_steady = self.state is None and all(run.store.is_steady for run in self.runs)
        if not is_steady or self.compute_s is None:
            return None
        after_s = max(LEAST_LOOK_S, LOOK_SHARE * self.compute_s)
        return self.begin_s + min(LONGEST_READ_S, after_s) if after_s < self.compute_s else None

    @property
    def _is_behind(self) -> bool:
        """True if computing would be done before what is read as fast as what has come."""
        came_s = (self.came_s - self.begin_s) * self.num_blocks
        return not self.num_came or came_s > (self.compute_s or math.inf) * self.num_came

    def is_awaited(self, position: int) -> bool:
        """See ``Arrival``: it is neither read nor late."""
        del position
        return not self.is_done and self.clock() < self.due_s

    def begin(self) -> None:
        """Begin to read."""
        self.begin_s = self.clock()
        self.reads = [run.store.fetch(run.contents) for run in self._parts]
        self.note_done()

    def note_done(self) -> None:
        """Note the time if it, or a part of it, has just been read; any thread may call it."""
        if self.done_s is not None:
            return
        if self.is_done:
            self.done_s = self.clock()
        elif self.gives_parts and (num_new := len(self.result()) - self.num_came):
            self.num_latest, self.came_s = num_new, self.clock()
            self.num_came += num_new

    def result(self) -> list[tuple[Buffer, str]]:
        """Return the leading blocks that could be read, with their tiers.

        There are none of a store that is late, unless it gives parts.

        If it has a state, that is behind all blocks; without it, or one of them, there are none.
        """
        blocks: list[tuple[Buffer, str]] = []
        if self.is_dropped or not self.reads:
            return blocks
        for run, read in zip(self._parts, self.reads, strict=True):
            data = read.result() if read.is_done or run.store.gives_parts else ()
            blocks += ((each, run.store.tier) for each in data)
            if len(data) < len(run.contents):
                return blocks if self.state is None else []
        return blocks

    def cancel(self) -> None:
        """Stop reading."""
        for read in self.reads:
            read.cancel()


class UnitPace:
    """Measures how long one of many equal things takes."""

    def __init__(self) -> None:
        self._unit_s: float | None = None

    def observe(self, count: float, seconds: float) -> None:
        """Note that ``count`` of them took so long."""
        new, old = seconds / count, self._unit_s
        self._unit_s = new if old is None else old + NEW * (new - old)

    def predict(self, count: float) -> float | None:
        """Return how long ``count`` of them take, in seconds; None if it is unknown."""
        return None if self._unit_s is None else count * self._unit_s


class ReadPace(UnitPace):
    """Measures reads from the same places.

    Attributes:
        retry_at_s: when reading is tried again if it was slower than computing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.retry_at_s = -math.inf
        self._retry_s = RETRY_S

    def begin_trial(self, now_s: float) -> None:
        """Let other reads wait for what is learnt of one that is begun."""
        self.retry_at_s = now_s + self._retry_s

    def note(self, fetch: ChainFetch, num_read: int, waited_s: float, now_s: float) -> None:
        """Note a read that took so long, or was given up then; it has so many blocks and states."""
        is_late = not fetch.is_done
        if not num_read and not is_late:
            # What could not be read says nothing of the pace.
            return
        # All of it would have taken so long.
        whole_s = waited_s * fetch.num_entries / num_read if num_read else waited_s
        if is_late and fetch.compute_s is not None:
            slow_s = MOST_SLOW * fetch.compute_s if fetch.gives_parts else waited_s
            whole_s = min(whole_s, slow_s) if num_read else slow_s
        self.observe(fetch.size, whole_s)
        is_slow = fetch.compute_s is not None and whole_s >= fetch.compute_s
        is_slow |= is_late and not num_read
        self.retry_at_s = now_s + self._retry_s
        self._retry_s = min(MOST_RETRY_S, 2 * self._retry_s) if is_slow else RETRY_S


class FetchQueue:
    """Reads chains within a bound of host memory, in the order in which they were asked for.

    A read that takes longer than computing the same tokens is not begun, or given up.

    Attributes:
        computing: measures the tokens of prompts.
        encoding: measures the tokens of sources.
        num_reads: chains that were read or given up.
        num_late: how many were given up.
        wait_s: seconds that sequences waited for them together.
    """

    def __init__(self, block_bytes: int, clock: Callable[[], float]) -> None:
        """``block_bytes``: the size of a block; ``clock`` returns seconds."""
        self._block_bytes = block_bytes
        self._clock = clock
        self.computing = UnitPace()
        self.encoding = UnitPace()
        self._reading: defaultdict[frozenset[str], ReadPace] = defaultdict(ReadPace)
        self._queued: deque[ChainFetch] = deque()
        # Chains that were begun, until they are released.
        self._held: list[ChainFetch] = []
        self.num_reads = self.num_late = 0
        self.wait_s = 0.0

    def __len__(self) -> int:
        """Return how many chains are queued, are read, or are not filled yet."""
        return len(self._queued) + len(self._held)

    @property
    def num_reserved(self) -> int:
        """Return how many chains are awaited, or were just read, for sequences that do not run."""
        just_read = (not each.is_taken and each.num_chances <= 1 for each in self._held)
        return sum(each.is_awaited(0) for each in self._queued) + sum(just_read)

    @property
    def due_in_s(self) -> float | None:
        """Return the seconds until the next read is given up; None if nothing is awaited."""
        known = (*self._held, *self._queued)
        waiting = (each for each in known if not each.is_taken and not each.is_done)
        due_s = min((each.due_s for each in waiting), default=None)
        return None if due_s is None else due_s - self._clock()

    def add(
        self,
        runs: Sequence[Run],
        num_tokens: int,
        state: Run | None = None,
        *,
        pace: UnitPace | None = None,
        patience: float = 1.0,
    ) -> ChainFetch | None:
        """Read a chain as soon as there is room for it; None if that is likely to take too long.

        Args:
            runs: its blocks.
            num_tokens: those that are not computed then.
            state: the state after the last block, if the model has one.
            pace: measures such tokens; None for those of prompts.
            patience: times as long as computing takes that reading may take.
        """
        compute_s = (pace or self.computing).predict(patience * num_tokens)
        fetch = ChainFetch(runs, state, compute_s, self._clock, asked_s=self._clock())
        if not self._is_worth(fetch):
            return None
        self._queued.append(fetch)
        self._begin_next()
        return fetch

    def _is_worth(self, fetch: ChainFetch) -> bool:
        """Return True if a read is likely to be faster than computing, or was not tried lately."""
        pace = self._reading[fetch.places]
        read_s = pace.predict(fetch.size)
        if read_s is None or fetch.compute_s is None:
            return True
        most_s = math.inf if fetch.gives_parts else LONGEST_READ_S
        if read_s < min(fetch.compute_s, most_s):
            return True
        now_s = self._clock()
        if now_s <= pace.retry_at_s:
            return False
        pace.begin_trial(now_s)
        return True

    def take(self, fetch: ChainFetch) -> list[tuple[Buffer, str]]:
        """Return the result of a chain that is awaited no longer; ``release`` must follow."""
        fetch.is_taken = True
        if fetch.is_dropped:
            return []
        now_s = self._clock()
        # Exclude the time that its sequence waited for blocks of the pool.
        done_s = now_s if fetch.done_s is None else fetch.done_s
        result = fetch.result()
        waited_s = done_s - (fetch.begin_s if fetch.reads else fetch.asked_s)
        if fetch.reads:
            self._reading[fetch.places].note(fetch, len(result), waited_s, now_s)
        self.num_reads += 1
        self.num_late += not fetch.is_done
        self.wait_s += waited_s
        return result

    def release(self, fetch: ChainFetch) -> None:
        """Forget a chain: its blocks are filled, or its sequence waits no longer."""
        if fetch in self._held:
            self._held.remove(fetch)
            fetch.cancel()
            # Others may know the chain still, but not its bytes.
            fetch.reads = []
        elif fetch in self._queued:
            self._queued.remove(fetch)
        self._begin_next()

    def note_done(self) -> None:
        """Note when reads were done, or parts of them; a store's thread calls it."""
        for fetch in tuple(self._held):
            fetch.note_done()

    def note_plan(self) -> None:
        """Note that a step is planned, in which sequences whose chains are there may start."""
        for fetch in self._held:
            fetch.num_chances += not fetch.is_awaited(0)

    def drop_all(self) -> None:
        """Let nothing of what is queued, being read or read be used by a sequence to come."""
        for fetch in (*self._queued, *self._held):
            fetch.is_dropped = True
            fetch.cancel()

    def _begin_next(self) -> None:
        while self._queued:
            size = sum(each.size for each in [*self._held, self._queued[0]])
            if self._held and size * self._block_bytes > FETCH_BYTES:
                return
            fetch = self._queued.popleft()
            self._held.append(fetch)
            fetch.begin()

    def check_integrity(self, fetches: Sequence[ChainFetch]) -> None:
        """Assert that exactly these chains are queued or held."""
        assert set(map(id, fetches)) == set(map(id, [*self._queued, *self._held]))
