"""Commands and queries on their way out, and who waits for what comes of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from itertools import count
from typing import Any

from mlx_parallm.engine.commands import Abort, Command, Stop
from mlx_parallm.engine.remote.channel import PICKLE_ERRORS, Channel
from mlx_parallm.engine.remote.messages import Numbered, Query
from mlx_parallm.engine.state import EngineState
from mlx_parallm.errors import ControlError, EngineDeadError, ParallmError

logger = logging.getLogger(__name__)


class Link:
    """The channel to one process, for as long as it lives.

    One thread sends, and the one that receives settles.

    Attributes:
        is_ending: whether the process was told to stop.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = count()
        self._replies: dict[int, Callable[[Any], None]] = {}
        self._queries: dict[int, Future[Any]] = {}
        self.is_ending = False

    def send(self, message: Command | Asked) -> None:
        """Send a command or a query; raise OSError if the process is gone."""
        number = next(self._numbers)
        if isinstance(message, Asked):
            self._queries[number] = message.answer
            self._send(number, Query(number, message.ask))
        elif isinstance(message, Abort | Stop):
            self.is_ending = self.is_ending or isinstance(message, Stop)
            self._send(number, Numbered(number, message))
        else:
            self._replies[number] = message.reply
            self._send(number, Numbered(number, replace(message, reply=_nobody)))

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

    def _send(self, number: int, message: Numbered | Query) -> None:
        try:
            self._channel.send(message)
        except PICKLE_ERRORS as cause:
            logger.exception("a command cannot be sent")
            self.settle(number, ControlError(f"{type(cause).__name__}: {cause}"))


class Asked:
    """A question about the engines' state, and who waits for the answer."""

    def __init__(self, ask: Callable[[EngineState], Any]) -> None:
        self.ask = ask
        self.answer: Future[Any] = Future()


def _settle(future: Future[Any], value: Any) -> None:
    try:
        if isinstance(value, ParallmError):
            future.set_exception(value)
        else:
            future.set_result(value)
    except InvalidStateError:
        # Nobody waits any more.
        logger.debug("an answer came too late")


def _nobody(_: Any) -> None:
    """In place of a reply, which cannot be sent."""
