"""Which of several engines of the same models gets a request. Pure Python, without a clock.

The costs are counted in rows: a row is one token of a prompt in a step. A request goes where the
prompts that wait, the part of its own that is not cached, and the samples that run are least.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlx_parallm.engine.parallel.division import Candidate, Share, divide, divide_inputs
from mlx_parallm.engine.parallel.prefixes import CacheMirror, WorkKeys, keys_of
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.work import Ends, RequestWork, StateCache

# FIRST_OUTPUT: the length of a sample, in tokens, while none has ended.
FIRST_OUTPUT = 128.0
# MEMORY: how much of the mean length of samples stays when one more ends.
MEMORY = 0.95
# DECODE_SHARE: what a generated token counts in rows. Samples share their steps, for each of which
# the weights are read once.
DECODE_SHARE = 0.25
# STEP: what a step counts in rows at least: it reads all weights, however few rows it has.
STEP = 64
# MAX_LOOKED_AT: requests of one engine that are looked at for one that another could begin.
MAX_LOOKED_AT = 16
# UNCACHED: what a token of the request's own prompt counts that has to be computed: once for the
# request, which waits for it, and once for the others, whose steps it takes.
UNCACHED = 2
# MAX_NAMES: names that are remembered; beyond that, the least recently used one is forgotten.
MAX_NAMES = 65_536


@dataclass(slots=True)
class Placement:
    """A request that an engine has, and that has not ended.

    Attributes:
        work: what it asks.
        keys: the cache keys of its prompt and inputs.
        rank: the engine's number.
        uncached: tokens that the engine had to compute, by the router's estimate.
        num_open: samples that have not ended.
        is_computed: True once this engine has answered anything of it.
        has_begun: True once any engine has, so that its reader knows that the prompt was computed.
        num_tokens: generated tokens of all its samples so far.
    """

    work: RequestWork
    keys: WorkKeys
    rank: int
    uncached: int
    num_open: int
    is_computed: bool = False
    has_begun: bool = False
    num_tokens: int = 0


@dataclass(slots=True)
class EngineLoad:
    """The requests of one engine, and how much work they are.

    Attributes:
        cache: what it keeps of earlier requests.
        is_alive: False while it can be given nothing.
        is_silent: True while it does not answer, and may be dead soon.
        waiting_tokens: tokens of prompts that it has yet to compute.
        num_open: samples that have not ended, those of prompts that wait included.
        clients: samples that have not ended, by client.
        requests: its requests, oldest first.
    """

    cache: CacheMirror
    is_alive: bool = True
    is_silent: bool = False
    waiting_tokens: int = 0
    num_open: int = 0
    clients: Counter[str] = field(default_factory=Counter[str])
    requests: dict[str, Placement] = field(default_factory=dict[str, Placement])

    def close(self, client: str, count: int) -> None:
        """Count samples of a client less."""
        self.num_open -= count
        self.clients[client] -= count
        if not self.clients[client]:
            del self.clients[client]


@dataclass(frozen=True, slots=True)
class Move:
    """A request that has given nothing yet, and the engine that could begin it at once."""

    request_id: str
    source: int
    target: int


class Router:
    """Chooses engines, and keeps count of what each of them has to do.

    Attributes:
        loads: by the engines' numbers.
        placements: the requests that have not ended, by their ids.
    """

    def __init__(self, num_engines: int, *, max_num_seqs: int, cache_tokens: int = 0) -> None:
        """Begin with engines that have nothing to do.

        Args:
            num_engines: how many there are.
            max_num_seqs: samples that one engine runs at the same time.
            cache_tokens: tokens in the KV pool of one engine.
        """
        self._max_num_seqs = max_num_seqs
        self._new_cache = partial(CacheMirror, cache_tokens)
        self._mean_output = FIRST_OUTPUT
        self._turn = 0
        self._homes = Homes()
        self.loads = [EngineLoad(self._new_cache()) for _ in range(num_engines)]
        self.placements: dict[str, Placement] = {}

    def set_cache(self, cache_tokens: int, states: Mapping[str, StateCache] | None = None) -> None:
        """Note how much each engine keeps; nothing is cached yet.

        Args:
            cache_tokens: tokens that its KV pool holds.
            states: by the first names of models with a state, what is kept of these.
        """
        self._new_cache = partial(CacheMirror, cache_tokens, states)
        for load in self.loads:
            load.cache = self._new_cache()

    def place(self, request_id: str, work: RequestWork, *, has_begun: bool = False) -> int:
        """Choose an engine for a request, and count the request there.

        Args:
            request_id: unique among the requests in flight.
            work: what it asks.
            has_begun: True if an earlier engine has computed its prompt, as its reader knows.

        Returns:
            The engine's number. One of them must be alive.
        """
        keys = keys_of(work)
        rank = self._choose(self._able(work), work, keys)
        self._put(request_id, work, rank, keys, has_begun=has_begun)
        return rank

    def divide(self, work: RequestWork) -> Sequence[Share]:
        """Choose engines for the samples or inputs of a request, which is counted nowhere yet.

        One engine must be alive. See ``division``.
        """
        keys = keys_of(work)
        first = self._choose(self._able(work), work, keys)
        is_free = work.rank is None and work.sticky is None
        if not work.is_divisible or not is_free:
            return [Share(first, range(work.num_samples))]
        if work.num_samples == 1:
            ranks = [first, *(rank for rank in self._alive() if rank != first)]
            loads = {rank: self.loads[rank] for rank in ranks}
            before = {rank: self._rows_before(load, work) for rank, load in loads.items()}
            costs = {rank: load.cache.missing(keys) for rank, load in loads.items()}
            return divide_inputs(before, costs)
        whole = self._candidate(first, work, keys)
        others = [self._candidate(rank, work, keys) for rank in self._alive() if rank != first]
        rows = self._length(work) * DECODE_SHARE
        others.sort(key=lambda candidate: candidate.end(1, rows))
        return divide([whole, *others], work.num_samples, rows)

    def refusal(self, work: RequestWork) -> ParallmError | None:
        """Return why a request cannot go on: the engine that kept what it names has died."""
        return work.lost if self._homes.is_lost(work.sticky) else None

    def put(self, request_id: str, work: RequestWork, rank: int) -> None:
        """Count a request, or a part of one, at an engine that was chosen."""
        self._put(request_id, work, rank, keys_of(work))

    def _alive(self) -> list[int]:
        """Return the engines that live; if some of them answer, those only."""
        alive = [rank for rank, load in enumerate(self.loads) if load.is_alive]
        return [rank for rank in alive if not self.loads[rank].is_silent] or alive

    def _able(self, work: RequestWork) -> list[int]:
        """Return the engines that may have a request.

        It is the engine that keeps what the request names, or else the one that the client chose;
        all of them if that one is dead or silent.
        """
        home = self._homes.rank_of(work.sticky)
        if home is not None:
            return [home]
        alive = self._alive()
        return [work.rank] if work.rank in alive else alive

    def _choose(self, alive: list[int], work: RequestWork, keys: WorkKeys) -> int:
        """Return the engine of least cost."""
        if any(not self.loads[rank].requests for rank in alive):
            # What is cached is not worth a place in a queue while another engine does nothing.
            alive = [rank for rank in alive if self._has_room(self.loads[rank], work)]
        count = len(self.loads)
        costs = {rank: self._cost(self.loads[rank], work, keys) for rank in alive}
        # Engines of equal cost take turns.
        rank = min(alive, key=lambda rank: (costs[rank], (rank - self._turn) % count))
        self._turn = (rank + 1) % count
        return rank

    def _candidate(self, rank: int, work: RequestWork, keys: WorkKeys) -> Candidate:
        load = self.loads[rank]
        uncached, sample_rows = self._uncached(load, work, keys), self._mean_output * DECODE_SHARE
        return Candidate(
            rank, load.waiting_tokens, uncached, load.num_open, self._max_num_seqs, sample_rows
        )

    def _length(self, work: RequestWork) -> float:
        """Return how long a sample of a request will be, in tokens."""
        limit = work.max_output
        return self._mean_output if limit is None else min(self._mean_output, limit)

    def on_event(self, request_id: str, rank: int, num_tokens: int, ends: Ends) -> bool:
        """Count what an engine has answered.

        Returns:
            False if the reader is not to see it: the request is not this engine's any more, or
            another engine has reported that its prompt was computed.
        """
        placed = self.placements.get(request_id)
        if placed is None or placed.rank != rank:
            return False
        load = self.loads[rank]
        is_known = placed.has_begun and not placed.is_computed
        if not placed.is_computed:
            placed.is_computed = placed.has_begun = True
            load.waiting_tokens -= placed.uncached
        placed.num_tokens += num_tokens
        if ends is Ends.SAMPLE:
            placed.num_open -= 1
            load.close(placed.work.client, 1)
        if ends is Ends.REQUEST or placed.num_open == 0:
            self._learn(placed)
            self.remove(request_id)
        return not (is_known and num_tokens == 0 and ends is Ends.NOTHING)

    def remove(self, request_id: str) -> Placement | None:
        """Forget a request and return where it was, if it is at an engine."""
        placed = self.placements.pop(request_id, None)
        if placed is None:
            return None
        load = self.loads[placed.rank]
        del load.requests[request_id]
        load.close(placed.work.client, placed.num_open)
        if not placed.is_computed:
            load.waiting_tokens -= placed.uncached
        return placed

    def next_move(self) -> Move | None:
        """Return a request that waits and would begin sooner at an engine that does nothing.

        None if there is none. The youngest of an engine's requests is moved first: most likely,
        nothing of it has been computed.
        """
        idle = [load for load in enumerate(self.loads) if _is_idle(load[1])]
        for source, load in enumerate(self.loads):
            if not idle or len(load.requests) < 2:
                continue
            waiting = [each for each in load.requests.items() if not each[1].is_computed]
            rows = sum(placed.uncached for _, placed in waiting)
            # Clients take turns, so only later requests of the same client surely come later.
            later = Counter[str]()
            for request_id, placed in reversed(waiting[-MAX_LOOKED_AT:]):
                target, own = self._nearest(idle, placed)
                client = placed.work.client
                is_free = placed.work.rank is None and placed.work.sticky is None
                is_crowded = load.num_open > self._max_num_seqs
                if is_free and (is_crowded or rows - later[client] > own):
                    return Move(request_id, source, target)
                later[client] += placed.uncached
        return None

    def _nearest(
        self, loads: Sequence[tuple[int, EngineLoad]], placed: Placement
    ) -> tuple[int, int]:
        """Return the engine that would compute least of a request's prompt, and how many tokens."""
        own = {rank: self._uncached(load, placed.work, placed.keys) for rank, load in loads}
        target = min(own, key=own.__getitem__)
        return target, own[target]

    def move(self, move: Move) -> None:
        """Count a request at another engine."""
        placed = self.placements[move.request_id]
        self.remove(move.request_id)
        self._put(
            move.request_id, placed.work, move.target, placed.keys, has_begun=placed.has_begun
        )

    def on_death(self, rank: int) -> tuple[dict[str, bool], list[str]]:
        """Count nothing at an engine until ``on_start``.

        Returns:
            The ids of its requests that another engine can begin anew, with True for those that the
            dead one may have been computing; and the ids of those that are lost: some of their
            tokens have been read already.
        """
        load = self.loads[rank]
        load.is_alive = False
        self._homes.drop(rank)
        load.cache = self._new_cache()
        anew, lost = dict[str, bool](), list[str]()
        # Each request that has begun takes a place or more, so others of its line waited for one.
        before = Counter[Hashable]()
        for name, placed in load.requests.items():
            line = placed.work.line
            if placed.num_tokens:
                lost.append(name)
            else:
                anew[name] = line is None or before[line] < self._max_num_seqs
            before[line] += 1
        return anew, lost

    def on_start(self, rank: int) -> None:
        """Count an engine again, which has nothing to do and has computed nothing."""
        self.loads[rank].is_alive = True

    def _cost(self, load: EngineLoad, work: RequestWork, keys: WorkKeys) -> float:
        """Return the rows to compute before a request would end at an engine."""
        rows = self._rows_before(load, work) + UNCACHED * self._uncached(load, work, keys)
        return rows + self._own_queue(load, work)

    def _rows_before(self, load: EngineLoad, work: RequestWork) -> float:
        """Return the rows of other requests that an engine has."""
        beyond = max(0, load.num_open + work.num_samples - self._max_num_seqs)
        # A sample that runs is half over, in the mean; those beyond the limit wait for others.
        samples = load.num_open / 2 + min(beyond, load.num_open)
        return load.waiting_tokens + samples * self._mean_output * DECODE_SHARE

    def _own_queue(self, load: EngineLoad, work: RequestWork) -> float:
        """Return what it costs that a request waits for samples of its own client.

        Clients share the places of an engine, so that a client whose requests are all at one engine
        would get less than its share of all engines. Nothing waits so with one client, or while
        there are places for all.
        """
        own = load.clients[work.client]
        others = len(load.clients) - (own > 0)
        if not others or load.num_open + work.num_samples <= self._max_num_seqs:
            return 0.0
        share = self._max_num_seqs / (others + 1)
        num_steps = max(0.0, own + work.num_samples - share) / share * self._mean_output
        return num_steps * STEP

    def _uncached(self, load: EngineLoad, work: RequestWork, keys: WorkKeys) -> int:
        """Return how many tokens of a request an engine would have to compute."""
        return work.num_tokens - min(load.cache.match(keys), work.num_tokens)

    def _has_room(self, load: EngineLoad, work: RequestWork) -> bool:
        """True if a request would not wait for samples of others to end."""
        return not load.requests or load.num_open + work.num_samples <= self._max_num_seqs

    def _put(
        self,
        request_id: str,
        work: RequestWork,
        rank: int,
        keys: WorkKeys,
        *,
        has_begun: bool = False,
    ) -> None:
        load = self.loads[rank]
        placed = Placement(
            work,
            keys,
            rank,
            self._uncached(load, work, keys),
            work.num_samples,
            has_begun=has_begun,
        )
        self.placements[request_id] = load.requests[request_id] = placed
        load.waiting_tokens += placed.uncached
        load.num_open += work.num_samples
        load.clients[work.client] += work.num_samples
        load.cache.add(keys)
        self._homes.note(work.sticky, rank)

    def _learn(self, placed: Placement) -> None:
        """Bring the mean length of samples up to date."""
        if placed.work.max_output != 0:
            length = placed.num_tokens / placed.work.num_samples
            self._mean_output = MEMORY * self._mean_output + (1 - MEMORY) * length


def _is_idle(load: EngineLoad) -> bool:
    return load.is_alive and not load.is_silent and not load.requests


class Homes:
    """The engines' numbers by the names of what they keep."""

    def __init__(self) -> None:
        # None for what an engine kept that has died.
        self._ranks: OrderedDict[Hashable, int | None] = OrderedDict()

    def rank_of(self, name: Hashable | None) -> int | None:
        """Return which engine keeps what has this name; None if none does."""
        return None if name is None else self._ranks.get(name)

    def is_lost(self, name: Hashable | None) -> bool:
        """True if the engine that kept what has this name has died, and no other keeps it."""
        return name in self._ranks and self._ranks[name] is None

    def note(self, name: Hashable | None, rank: int) -> None:
        """Note that an engine keeps what has this name, if it has one."""
        if name is None:
            return
        self._ranks[name] = rank
        self._ranks.move_to_end(name)
        if len(self._ranks) > MAX_NAMES:
            self._ranks.popitem(last=False)

    def drop(self, rank: int) -> None:
        """Note that what an engine keeps is lost, because it has died."""
        for name, kept_by in self._ranks.items():
            if kept_by == rank:
                self._ranks[name] = None
