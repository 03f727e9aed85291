"""Commands to the engine thread, and a loop that falls behind, or is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlx_parallm.engine import mailbox as mailboxes
from mlx_parallm.engine.commands import Abort
from mlx_parallm.engine.mailbox import MAX_BEHIND, Mailbox


async def known_to(mailbox: Mailbox) -> None:
    """Let a mailbox know this loop."""

    def command(reply):
        reply(None)
        return Abort(request_id="a")

    await mailbox.ask(command)


async def test_a_thread_waits_for_a_loop_that_is_behind() -> None:
    mailbox, seen, delivered = Mailbox(lambda command: None), [], []
    await known_to(mailbox)

    def deliver() -> None:
        for number in range(3 * MAX_BEHIND):
            mailbox.deliver(seen.append, number)
            delivered.append(number)

    thread = threading.Thread(target=deliver)
    thread.start()
    while len(delivered) < MAX_BEHIND:
        # The loop does nothing meanwhile.
        threading.Event().wait(0.001)  # time limit: of one question
    assert (seen, len(delivered)) == ([], MAX_BEHIND)
    await asyncio.to_thread(thread.join)
    await asyncio.sleep(0)
    assert seen == list(range(3 * MAX_BEHIND))


async def test_a_loop_that_waits_for_the_thread_keeps_it_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailboxes, "MAX_WAIT_S", 1e6)
    mailbox, seen = Mailbox(lambda command: None), []
    await known_to(mailbox)
    begun = threading.Event()

    def deliver() -> None:
        for number in range(3 * MAX_BEHIND):
            mailbox.deliver(seen.append, number)
            begun.set()

    thread = threading.Thread(target=deliver)
    thread.start()
    begun.wait()
    mailbox.stop_pacing()
    thread.join()


def test_nothing_is_delivered_to_a_loop_that_is_gone() -> None:
    mailbox, seen = Mailbox(lambda command: None), []
    mailbox.deliver(seen.append, 0)
    asyncio.run(known_to(mailbox))
    for number in range(2 * MAX_BEHIND):
        mailbox.deliver(seen.append, number)
        mailbox.post(seen.append, number)
    assert seen == []


def test_another_loop_does_not_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailboxes, "MAX_WAIT_S", 1e6)
    mailbox, seen = Mailbox(lambda command: None), []

    async def deliver() -> None:
        await known_to(mailbox)
        for number in range(MAX_BEHIND):
            mailbox.deliver(seen.append, number)

    # The first ends before it has seen to anything.
    asyncio.run(deliver())
    asyncio.run(deliver())
