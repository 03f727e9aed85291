"""Commands and queries on their way out, and who waits for what comes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from itertools import count
from typing import Any

from mlx_parallm.engine.commands import Abort, Command, Stop
from mlx_parallm.engine.remote.channel import Channel
from mlx_parallm.engine.remote.messages import Query, Withdraw
from mlx_parallm.engine.state import EngineState
from mlx_parallm.types.errors import ControlError, EngineDeadError, ParallmError

logger = logging.getLogger(__name__)


class Asked:
    """A question about the engines' state, and who waits for the answer."""

    def __init__(self, ask: Callable[[EngineState], Any]) -> None:
        self.ask = ask
        self.answer: Future[Any] = Future()
        self.number = 0


class Withdrawn:
    """A question whose answer nobody waits for any more."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked


class Link:
    """The channel to one process, for as long as it lives.

    One thread sends, and the one that receives settles.

    Attributes:
        is_ending: whether the process was told to stop.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count(1)
        self._replies: dict[int, Callable[[Any], None]] = {}
        self._queries: dict[int, Future[Any]] = {}
        self.is_ending = False

    def send(self, message: Command | Asked | Withdrawn) -> None:
        """Send a command or a query; raise OSError if the process is gone."""
        if isinstance(message, Asked):
            number = message.number = next(self._numbers)
            self._queries[number] = message.answer
            self._send(Query(message.ask), number)
        elif isinstance(message, Withdrawn):
            self._queries.pop(message.asked.number, None)
            self._channel.send(Withdraw(), message.asked.number)
        elif isinstance(message, Abort | Stop):
            self.is_ending = self.is_ending or isinstance(message, Stop)
            self._channel.send(message)
        else:
            number = next(self._numbers)
            self._replies[number] = message.reply
            self._send(replace(message, reply=_nobody), number)

    def settle(self, number: int, value: Any) -> None:
        """Give whoever waits for this number what came of it."""
        query = self._queries.pop(number, None)
        if query is not None:
            _settle(query, value)
        elif (reply := self._replies.pop(number, None)) is not None:
            reply(value)

    def fail(self) -> None:
        """The process is gone: answer the queries. Who waits for a reply is told elsewhere."""
        while self._queries:
            _, query = self._queries.popitem()
            _settle(query, EngineDeadError("The engine's process is gone."))

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
        logger.debug("an answer that nobody waits for")


def _nobody(_: Any) -> None:
    """In place of a reply, which cannot be sent."""
