"""Replies find their recipients by number."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from mlx_parallm.peers.channel import pack
from mlx_parallm.peers.replies import Recipient, Replies
from mlx_parallm.types.errors import ControlError, EngineDeadError

GONE = EngineDeadError("gone")


def ask(replies: Replies, recipient: Recipient) -> int:
    sent: list[int] = []
    number = replies.ask(
        recipient, partial(pack, "question"), lambda _, number: sent.append(number)
    )
    assert sent == [number]
    return number


async def futures() -> list[Future[Any] | asyncio.Future[Any]]:
    return [Future(), asyncio.get_running_loop().create_future()]


async def test_replies_come_in_any_order() -> None:
    replies, taken = Replies(), list[object]()
    waiting = await futures()
    numbers = [ask(replies, recipient) for recipient in [*waiting, taken.append]]
    assert len(set(numbers)) == 3
    for number in reversed(numbers):
        replies.settle(number, number)
        replies.settle(number, "a second one")
    assert [future.result() for future in waiting] + taken == numbers


async def test_an_error_is_an_exception_of_futures_and_an_argument_of_functions() -> None:
    replies, taken = Replies(), list[object]()
    waiting = await futures()
    for recipient in [*waiting, taken.append]:
        replies.settle(ask(replies, recipient), GONE)
    assert [future.exception() for future in waiting] + taken == [GONE] * 3


async def test_what_was_cancelled_or_forgotten_gets_nothing() -> None:
    replies = Replies()
    for future in await futures():
        number = ask(replies, future)
        future.cancel()
        replies.settle(number, "late")
        assert future.cancelled()
    for future in await futures():
        number = ask(replies, future)
        replies.forget(number)
        replies.settle(number, "late")
        assert not future.done()


async def test_a_loss_fails_futures_once_and_leaves_functions() -> None:
    replies, taken = Replies(), list[object]()
    waiting = await futures()
    numbers = [ask(replies, recipient) for recipient in [*waiting, taken.append]]
    replies.settle(numbers[0], "in time")
    replies.fail(GONE)
    assert waiting[0].result() == "in time"
    assert waiting[1].exception() is GONE
    assert taken == []


async def test_what_cannot_be_pickled_is_an_error_of_its_recipient() -> None:
    replies, taken = Replies(), list[object]()
    waiting = await futures()
    for recipient in [*waiting, taken.append]:
        replies.ask(
            recipient, partial(pack, lambda: None), lambda *_: pytest.fail("it cannot be sent")
        )
    errors = [*(future.exception() for future in waiting), *taken]
    assert [type(error) for error in errors] == [ControlError] * 3
