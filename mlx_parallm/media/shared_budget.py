"""A bound that the clients of a process share: on decoded pixels, and on connections."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import NamedTuple

#: ``Turn``: is done when what was asked for is taken.
Turn = asyncio.Future[None]


class SharedBudget:
    """Lets tasks take amounts while they fit, in the order of their arrival.

    One client takes half at most, or a single amount that is larger; others pass it meanwhile. The
    client "" is everybody without a key and may take all.

    A task must not wait for a second amount while it holds a first: two such tasks could wait
    for each other. The methods are called on one event loop.
    """

    def __init__(self, amount: int) -> None:
        """``amount`` is the sum over all tasks."""
        self._num_free = amount
        self._share = amount // 2
        self._taken: Counter[str] = Counter()
        self._waiting: deque[_Waiting] = deque()

    @property
    def num_free(self) -> int:
        """The amount that no task uses."""
        return self._num_free

    async def acquire(self, amount: int, client: str = "") -> None:
        """Wait until there is room for an amount of a client, and for those that came before it."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(amount, client, turn))
        self._begin()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.release(amount, client)
            else:
                # A large amount whose task leaves may have kept smaller ones waiting.
                self._begin()
            raise

    def release(self, amount: int, client: str = "") -> None:
        """Give back what a task took."""
        self._num_free += amount
        self._taken[client] -= amount
        if not self._taken[client]:
            del self._taken[client]
        self._begin()

    def _begin(self) -> None:
        """Let those begin that fit, in order; later ones of a client do not pass its first."""
        passed: deque[_Waiting] = deque()
        held_up: set[str] = set()
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting.turn.done():
                continue
            if waiting.client in held_up or self._is_beyond_share(waiting):
                held_up.add(waiting.client)
                passed.append(waiting)
            elif waiting.amount > self._num_free:
                passed.append(waiting)
                break
            else:
                self._num_free -= waiting.amount
                self._taken[waiting.client] += waiting.amount
                waiting.turn.set_result(None)
        self._waiting.extendleft(reversed(passed))

    def _is_beyond_share(self, waiting: _Waiting) -> bool:
        taken = self._taken[waiting.client]
        return bool(waiting.client) and taken > 0 and taken + waiting.amount > self._share


class _Waiting(NamedTuple):
    """An amount that a client's task waits for."""

    amount: int
    client: str
    turn: Turn
