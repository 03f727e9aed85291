"""Commands and queries that were sent, and the callers that wait for their results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from itertools import count
from typing import Any

from mlx_parallm.engine.commands import Abort, Command, Stop
from mlx_parallm.engine.state import EngineState
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.messages import Query, Withdraw
from mlx_parallm.types.errors import ControlError, EngineDeadError, ParallmError

logger = logging.getLogger(__name__)


class PendingQuery:
    """A query of the engines' state, and the future of its answer."""

    def __init__(self, ask: Callable[[EngineState], Any]) -> None:
        self.ask = ask
        self.answer: Future[Any] = Future()
        self.number = 0


class WithdrawnQuery:
    """A query whose caller was cancelled."""

    def __init__(self, query: PendingQuery) -> None:
        self.query = query


class Link:
    """The channel to one process, for as long as it lives.

    One thread sends, and the one that receives settles.

    Attributes:
        is_ending: True if the process was told to stop.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count(1)
        self._replies: dict[int, Callable[[Any], None]] = {}
        self._queries: dict[int, Future[Any]] = {}
        self.is_ending = False

    def send(self, message: Command | PendingQuery | WithdrawnQuery) -> None:
        """Send a command or a query; raise OSError if the process is gone."""
        if isinstance(message, PendingQuery):
            number = message.number = next(self._numbers)
            self._queries[number] = message.answer
            self._send(Query(message.ask), number)
        elif isinstance(message, WithdrawnQuery):
            self._queries.pop(message.query.number, None)
            self._channel.send(Withdraw(), message.query.number)
        elif isinstance(message, Abort | Stop):
            self.is_ending = self.is_ending or isinstance(message, Stop)
            self._channel.send(message)
        else:
            number = next(self._numbers)
            self._replies[number] = message.reply
            self._send(replace(message, reply=_ignore), number)

    def settle(self, number: int, value: Any) -> None:
        """Give the result of the command or query of this number to its caller."""
        query = self._queries.pop(number, None)
        if query is not None:
            _settle(query, value)
        elif (reply := self._replies.pop(number, None)) is not None:
            reply(value)

    def fail(self) -> None:
        """Fail the queries, because the process is gone. Commands are failed by the mailbox."""
        while self._queries:
            _, query = self._queries.popitem()
            _settle(query, EngineDeadError("The engine's process has ended."))

    def _send(self, message: Any, number: int) -> None:
        try:
            self._channel.send(message, number)
        except ControlError as refusal:
            logger.exception("a command cannot be sent")
            self.settle(number, refusal)


def _settle(future: Future[Any], value: Any) -> None:
    try:
        if isinstance(value, ParallmError):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        logger.debug("an answer came after its caller was cancelled")


def _ignore(_: Any) -> None:
    """In place of a reply, which cannot be sent."""
