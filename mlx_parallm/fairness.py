"""Clients' shares of what all requests of a process use: budgets, turns and paces.

Everything here is called on one event loop.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")
#: ``UNBOUNDED``: the amount of a budget that only bounds what one client has.
UNBOUNDED = sys.maxsize
#: ``Client``: a client's id; None: a request of no client, which may use a whole budget.
Client = str | None
#: ``Turn``: is done when what a task waits for is taken.
Turn = asyncio.Future[None]


class Stay:
    """A block while a client is somewhere; a generator would cost three times as much."""

    def __init__(self, place: Place, client: str) -> None:
        self._place = place
        self._client = client

    def __enter__(self) -> None:
        """Let the client enter."""
        self._place.enter(self._client)

    def __exit__(self, *_: object) -> None:
        """Let the client leave."""
        self._place.leave(self._client)


class Place(Protocol):
    """Counts who is there."""

    def enter(self, client: str) -> None:
        """Count a client."""
        ...

    def leave(self, client: str) -> None:
        """Count a client no more."""
        ...


class ClientPace:
    """A leaky bucket for each client: use fills it, it drains at a rate, and a full one delays.

    A client that is the only one here never waits, and its use is not counted.
    """

    def __init__(self, clock: Callable[[], float], *, rate: float, burst: float) -> None:
        """Prepare empty buckets.

        Args:
            clock: seconds from any beginning.
            rate: how much drains from each bucket in a second.
            burst: how much a bucket holds.
        """
        self._clock = clock
        self._rate = rate
        self._burst = burst
        self._here: Counter[str] = Counter()
        # When a client's bucket will be empty.
        self._empty_s: dict[str, float] = {}

    def present(self, client: str) -> Stay:
        """Count a request of a client as being here while the block runs."""
        return Stay(self, client)

    def enter(self, client: str) -> None:
        """Count a request of a client as being here, until ``leave``."""
        self._here[client] += 1

    def leave(self, client: str) -> None:
        """Count a request of a client as being here no more."""
        self._here[client] -= 1
        if not self._here[client]:
            del self._here[client]
            if self._empty_s.get(client, 0.0) <= self._clock():
                self._empty_s.pop(client, None)

    def delay(self, client: str, amount: float = 0.0) -> float:
        """Count a client's use, and return for how many seconds it must wait then."""
        if not self._here.keys() - {client}:
            return 0.0
        now_s = self._clock()
        empty_s = max(self._empty_s.get(client, 0.0), now_s) + amount / self._rate
        if empty_s > now_s:
            self._empty_s[client] = empty_s
        return max(0.0, empty_s - now_s - self._burst / self._rate)

    async def wait(self, client: str, amount: float) -> None:
        """Count a client's use, and wait as long as it must."""
        delay_s = self.delay(client, amount)
        if delay_s:
            await asyncio.sleep(delay_s)


class SharedBudget:
    """A bounded amount, of which one client has half at most.

    A client that has nothing may take a single amount that is larger. Tasks that wait begin in
    turns of their clients, those of a client in the order of their arrival. A task whose client is
    beyond its share, or its pace, is passed by those of others; one that finds no room is not, or
    smaller amounts could keep it waiting forever.

    A task must not wait for a second amount while it holds a first: two such tasks could wait
    for each other.
    """

    def __init__(
        self, amount: int, *, share: int | None = None, pace: ClientPace | None = None
    ) -> None:
        """Prepare; nothing is taken.

        Args:
            amount: the sum over all clients; ``UNBOUNDED`` for none.
            share: the most of one client; None: half of ``amount``.
            pace: must let a client's tasks begin; with one, every task has a client.
        """
        self.amount = amount
        self._share = amount // 2 if share is None else share
        self._pace = pace
        self._taken: Counter[Client] = Counter()
        #: What is in use.
        self.num_taken = 0
        # The tasks that wait, by client: the one that had no turn for longest comes first.
        self._waiting: dict[Client, deque[_Waiting]] = {}
        # Timers of clients whose tasks wait for their pace.
        self._paced: dict[str, asyncio.TimerHandle] = {}

    @property
    def num_free(self) -> int:
        """The amount that is not in use; below 0 if more was taken than there is."""
        return self.amount - self.num_taken

    def has_room(self, amount: int, client: Client = None, *, own: int = 0) -> bool:
        """True if a client may take an amount beside what it has; see ``Holding`` for ``own``."""
        return amount <= self.num_free and not self._is_beyond_share(amount, client, own)

    def take(self, amount: int, client: Client = None) -> None:
        """Count an amount, whether or not there is room for it."""
        self._taken[client] += amount
        self.num_taken += amount

    def release(self, amount: int, client: Client = None) -> None:
        """Give back an amount that was taken."""
        self._taken[client] -= amount
        self.num_taken -= amount
        if not self._taken[client]:
            del self._taken[client]
        self._begin()

    async def acquire(self, amount: int, client: Client = None) -> None:
        """Take an amount once it is the task's turn; a cancelled task has taken nothing.

        ``amount`` must not be more than the budget's ``amount``.
        """
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(_Waiting(amount, turn))
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                # A large amount whose task leaves may have kept smaller ones waiting.
                self._begin()
            else:
                self.release(amount, client)
            raise

    @asynccontextmanager
    async def acquired(self, amount: int, client: Client = None) -> AsyncGenerator[None]:
        """Take an amount as ``acquire`` does, until the block ends."""
        await self.acquire(amount, client)
        try:
            yield
        finally:
            self.release(amount, client)

    @asynccontextmanager
    async def product(
        self, amount: int, client: Client, make: Callable[[], Awaitable[T]]
    ) -> AsyncGenerator[T]:
        """Provide what ``make`` returns; it takes an amount, as ``acquire``, until the block ends.

        If the task is cancelled before, the amount is taken until ``make`` has ended, which goes
        on: a thread cannot be cancelled.
        """
        await self.acquire(amount, client)
        making = asyncio.ensure_future(make())
        # What it is made from may be large.
        del make
        try:
            yield await asyncio.shield(making)
        finally:
            if making.done():
                self.release(amount, client)
            else:
                making.add_done_callback(functools.partial(self._end, amount, client))

    def _end(self, amount: int, client: Client, making: asyncio.Future[Any]) -> None:
        self.release(amount, client)
        if not making.cancelled():
            # An exception that is not retrieved would be logged.
            making.exception()

    def enter(self, client: str) -> None:
        """Count a client as being here for the pace of others, until ``leave``."""
        assert self._pace is not None, "the budget has a pace"
        self._pace.enter(client)

    def leave(self, client: str) -> None:
        """Count a client as being here no more."""
        assert self._pace is not None, "the budget has a pace"
        self._pace.leave(client)
        # A client that is alone from now on stops waiting.
        self._begin()

    def _begin(self) -> None:
        """Let those begin that may, in turns of their clients."""
        clients = deque(self._waiting)
        while clients:
            client = clients.popleft()
            amount = self._next_amount(client)
            if amount is None or self._must_pass(amount, client):
                continue
            if amount > self.num_free:
                return
            self.take(amount, client)
            line = self._waiting.pop(client)
            line.popleft().turn.set_result(None)
            self._waiting[client] = line
            clients.append(client)

    def _next_amount(self, client: Client) -> int | None:
        """Return what a client's next task waits for; None if none waits any more."""
        line = self._waiting[client]
        while line and line[0].turn.done():
            line.popleft()
        if line:
            return line[0].amount
        del self._waiting[client]
        return None

    def _must_pass(self, amount: int, client: Client) -> bool:
        """True if a client's next task lets those of others begin before it."""
        return self._is_beyond_share(amount, client) or self._is_too_fast(client)

    def _is_beyond_share(self, amount: int, client: Client, own: int = 0) -> bool:
        taken = self._taken[client]
        return client is not None and taken > own and taken + amount > self._share

    def _is_too_fast(self, client: Client) -> bool:
        """True if a client's pace holds it back; its timer runs then."""
        if self._pace is None or client is None:
            return False
        delay_s = self._pace.delay(client)
        if delay_s and client not in self._paced:
            again = functools.partial(self._after_delay, client)
            self._paced[client] = asyncio.get_running_loop().call_later(delay_s, again)
        return delay_s > 0

    def _after_delay(self, client: str) -> None:
        del self._paced[client]
        self._begin()


class _Waiting(NamedTuple):
    """An amount that a task waits for."""

    amount: int
    turn: Turn


class Holding:
    """Share of a budget that one task takes, maybe piece by piece, and gives back at once.

    A client with no other request may take more than its share.
    """

    def __init__(self, budget: SharedBudget, client: Client) -> None:
        self._budget = budget
        self._client = client
        #: What is taken.
        self.amount = 0

    def another(self) -> Holding:
        """Return an empty holding of the same client's in the same budget."""
        return Holding(self._budget, self._client)

    def grow(self, amount: int) -> bool:
        """Take a further amount; False if there is no room for it."""
        if not self._budget.has_room(amount, self._client, own=self.amount):
            return False
        self._budget.take(amount, self._client)
        self.amount += amount
        return True

    async def acquire(self, amount: int) -> None:
        """Take an amount once it is the task's turn; nothing may be taken before."""
        await self._budget.acquire(amount, self._client)
        self.amount += amount

    def release(self) -> None:
        """Give everything back."""
        self._budget.release(self.amount, self._client)
        self.amount = 0


class EntryTurns:
    """One request of each client enters per round of the event loop.

    Parsing, checking and encoding a request holds the event loop for a millisecond or more. A
    hundred that come together would hold it for their whole time; so they enter one after another,
    and the work of other clients runs in between.
    """

    def __init__(self) -> None:
        # The requests that enter in the next rounds, of each client that entered in this one.
        self._lines: dict[str, deque[Turn]] = {}

    async def take(self, client: str) -> None:
        """Wait for a turn; a client's first request of a round does not wait."""
        loop = asyncio.get_running_loop()
        if not self._lines:
            loop.call_soon(self._next_round)
        line = self._lines.get(client)
        if line is None:
            self._lines[client] = deque()
            return
        turn: Turn = loop.create_future()
        line.append(turn)
        await turn

    def _next_round(self) -> None:
        for client, line in list(self._lines.items()):
            # Cancelled requests have no turn.
            while line and line[0].done():
                line.popleft()
            if line:
                line.popleft().set_result(None)
            else:
                del self._lines[client]
        if self._lines:
            asyncio.get_running_loop().call_soon(self._next_round)
