"""Replies of one process to another, by the numbers of the messages that they answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from itertools import count
from typing import Any

from mlx_parallm.peers.channel import Packed
from mlx_parallm.peers.messages import Reply
from mlx_parallm.types.errors import ControlError, ParallmError

logger = logging.getLogger(__name__)

#: Takes a reply. A future gets an error as its exception; a function gets it as its argument.
Recipient = Callable[[Any], None] | Future[Any] | asyncio.Future[Any]


class Replies:
    """Who gets the reply to each message that was sent, by the message's number.

    One thread sends, and another may settle.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._pending: dict[int, Recipient] = {}

    def ask(
        self,
        recipient: Recipient,
        make: Callable[[], Packed],
        send: Callable[[Packed, int], None],
    ) -> int:
        """Send a message whose reply goes to ``recipient``; return its number.

        The recipient gets the error if the message cannot be pickled.
        """
        number = next(self._numbers)
        self._pending[number] = recipient
        try:
            message = make()
        except ControlError as refusal:
            logger.exception("a message cannot be sent")
            self.settle(number, refusal)
        else:
            send(message, number)
        return number

    def forget(self, number: int) -> None:
        """Ignore the reply to this message."""
        self._pending.pop(number, None)

    def settle(self, number: int, value: Any) -> None:
        """Give a reply, which may be an error, to its recipient."""
        recipient = self._pending.pop(number, None)
        if callable(recipient):
            recipient(value)
        elif recipient is not None:
            _set(recipient, value)

    def fail(self, error: ParallmError) -> None:
        """Fail the futures; functions are left to those who wait for them."""
        for number, recipient in list(self._pending.items()):
            if not callable(recipient):
                self.settle(number, error)


def send_reply(send: Callable[[Reply, int], None], number: int, value: Any) -> None:
    """Send a reply, or why it cannot be pickled, by a function that takes it and its number."""
    try:
        send(Reply(value), number)
    except ControlError as refusal:
        logger.exception("a reply cannot be sent")
        send(Reply(refusal), number)


def _set(future: Future[Any] | asyncio.Future[Any], value: Any) -> None:
    try:
        if isinstance(value, ParallmError):
            future.set_exception(value)
        else:
            future.set_result(value)
    except (InvalidStateError, asyncio.InvalidStateError):
        logger.debug("an answer came after its caller was cancelled")
