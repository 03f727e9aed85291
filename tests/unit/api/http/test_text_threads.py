"""Long texts are worked on by threads that clients share, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from mlx_parallm.api.http.offload import (
    BURST_S,
    LONG_TEXT_CHARS,
    PACED_SHARE,
    TextThreads,
    in_thread,
    maybe_in_thread,
)
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.types.token_limit import TokenLimit
from tests.fake_engine import FakeEngine, serve_fake
from tests.fakes import ByteTokenizer

#: The threads of a test that has failed end at last.
WAIT_S = 600.0
LONG = "a" * (LONG_TEXT_CHARS + 1)
HELD = "b" * (LONG_TEXT_CHARS + 1)
KEYS = ("one", "other")


class HeldTokenizer(ByteTokenizer):
    """Encodes texts of ``b`` only once it is released."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.released = threading.Event()
        self.threads: set[str] = set()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if text == HELD:
            self.begun.release()
            assert self.released.wait(WAIT_S)
        return super().encode(text)


@contextmanager
def _served(tokenizer: HeldTokenizer) -> Iterator[str]:
    with serve_fake(FakeEngine(tokenizer), ServerConfig(api_keys=KEYS)) as url:
        try:
            yield url
        finally:
            tokenizer.released.set()


def _complete(url: str, key: str, prompt: str) -> int:
    body = {"model": "org/fake", "prompt": prompt}
    headers = {"authorization": f"Bearer {key}"}
    return httpx2.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S
    ).status_code


@pytest.mark.parametrize("prompt", ["short", LONG])
def test_nobody_waits_for_the_long_texts_of_another_key(prompt: str) -> None:
    tokenizer = HeldTokenizer()
    with _served(tokenizer) as url, ThreadPoolExecutor(16) as clients:
        held = [clients.submit(_complete, url, "one", HELD) for _ in range(16)]
        assert tokenizer.begun.acquire(timeout=WAIT_S)
        assert httpx2.get(f"{url}/health", timeout=WAIT_S).status_code == 200
        assert _complete(url, "other", prompt) == 200
        assert not any(answer.done() for answer in held)
        tokenizer.released.set()
        assert [answer.result(WAIT_S) for answer in held] == [200] * 16


def test_a_key_waits_for_its_own_short_texts_never() -> None:
    tokenizer = HeldTokenizer()
    with _served(tokenizer) as url, ThreadPoolExecutor(8) as clients:
        held = [clients.submit(_complete, url, "one", HELD) for _ in range(8)]
        assert tokenizer.begun.acquire(timeout=WAIT_S)
        assert _complete(url, "one", "short") == 200
        tokenizer.released.set()
        assert [answer.result(WAIT_S) for answer in held] == [200] * 8


def test_long_texts_are_encoded_on_threads_of_their_own() -> None:
    tokenizer = HeldTokenizer()
    with _served(tokenizer) as url:
        assert _complete(url, "one", LONG) == 200
    assert all(name.startswith("texts") for name in tokenizer.threads)


def _run(main: Coroutine[None, None, None]) -> None:
    asyncio.run(main)


def test_one_client_has_half_of_the_threads() -> None:
    async def main() -> None:
        threads, free = TextThreads(4), threading.Event()
        begun = threading.Semaphore(0)

        def hold() -> bool:
            begun.release()
            return free.wait(WAIT_S)

        held = [asyncio.ensure_future(threads.run("one", hold)) for _ in range(8)]
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
        assert await threads.run("other", lambda: "at once") == "at once"
        assert not begun.acquire(blocking=False)
        free.set()
        assert await asyncio.gather(*held) == [True] * 8

    _run(main())


def test_clients_that_wait_begin_by_turns() -> None:
    async def main() -> None:
        threads, order = TextThreads(2), list[str]()
        first, second = threading.Event(), threading.Event()
        holders = [
            asyncio.ensure_future(threads.run(client, lambda event=event: event.wait(WAIT_S)))
            for client, event in (("x", first), ("y", second))
        ]
        await asyncio.sleep(0)
        waiting = [
            asyncio.ensure_future(threads.run(client, lambda name=client: order.append(name)))
            for client in ("a", "a", "a", "b", "c")
        ]
        await asyncio.sleep(0)
        # One thread is free from now on.
        first.set()
        await asyncio.gather(holders[0], *waiting)
        second.set()
        await holders[1]
        assert order == ["a", "b", "c", "a", "a"]

    _run(main())


def test_what_failed_or_was_given_up_leaves_its_thread() -> None:
    async def main() -> None:
        threads, free = TextThreads(2), threading.Event()

        def fail() -> None:
            raise ValueError("as it should")

        for _ in range(3):
            with pytest.raises(ValueError, match="as it should"):
                await threads.run("one", fail)
        given_up = [
            asyncio.ensure_future(threads.run("one", lambda: free.wait(WAIT_S))) for _ in range(3)
        ]
        await asyncio.sleep(0)
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        free.set()
        assert await threads.run("one", lambda: 7) == 7

    _run(main())


def test_short_work_stays_on_the_loop_and_long_work_leaves_it() -> None:
    async def main() -> None:
        threads, here = TextThreads(2), threading.get_ident()
        with threads.serving("one"):
            assert await maybe_in_thread(threading.get_ident, LONG_TEXT_CHARS) == here
            assert await maybe_in_thread(threading.get_ident, LONG_TEXT_CHARS + 1) != here
            name = await in_thread(lambda: threading.current_thread().name)
        assert name.startswith("texts")
        assert not (await in_thread(lambda: threading.current_thread().name)).startswith("texts")

    _run(main())


# Seconds for which a client waits that has just taken twice its burst.
DRAIN_S = BURST_S / (PACED_SHARE * (os.cpu_count() or 1))


class FrozenLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still until a test advances it."""

    now_s = 1000.0

    def time(self) -> float:
        return self.now_s


@contextmanager
def _frozen() -> Iterator[tuple[FrozenLoop, TextThreads]]:
    """Yield a loop and two threads that run by its time."""
    loop = FrozenLoop()
    try:
        yield loop, TextThreads(2, clock=loop.time)
    finally:
        loop.close()


def _taking(loop: FrozenLoop, seconds: float) -> Callable[[], None]:
    """Work that takes so long."""

    def work() -> None:
        loop.now_s += seconds

    return work


async def _settle() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_client_whose_texts_take_long_waits_beside_others_and_they_do_not() -> None:
    with _frozen() as (loop, threads):

        async def main() -> None:
            with threads.serving("greedy"), threads.serving("other"):
                await threads.run("greedy", _taking(loop, 2 * BURST_S))
                paced = asyncio.ensure_future(threads.run("greedy", lambda: "late"))
                for _ in range(3):
                    assert await threads.run("other", lambda: "at once") == "at once"
                assert not paced.done()
                loop.now_s += DRAIN_S * 0.8
                await _settle()
                assert not paced.done()
                loop.now_s += DRAIN_S * 0.3
                assert await paced == "late"

        loop.run_until_complete(main())


def test_texts_that_wait_for_the_pace_begin_one_by_one() -> None:
    with _frozen() as (loop, threads):

        async def main() -> None:
            with threads.serving("greedy"), threads.serving("other"):
                await threads.run("greedy", _taking(loop, 2 * BURST_S))
                works = [
                    asyncio.ensure_future(threads.run("greedy", _taking(loop, BURST_S)))
                    for _ in range(4)
                ]
                while works:
                    loop.now_s += DRAIN_S * 1.01
                    ended, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                    await _settle()
                    assert [work for work in works if work.done()] == list(ended)
                    works = [work for work in works if not work.done()]

        loop.run_until_complete(main())


def test_a_client_that_is_alone_never_waits() -> None:
    with _frozen() as (loop, threads):

        async def main() -> None:
            with threads.serving("one"):
                for _ in range(5):
                    await threads.run("one", _taking(loop, BURST_S))

        loop.run_until_complete(main())


def test_a_client_waits_no_longer_once_the_others_have_left() -> None:
    with _frozen() as (loop, threads):

        async def main() -> None:
            with threads.serving("greedy"):
                with threads.serving("other"):
                    await threads.run("greedy", _taking(loop, 3 * BURST_S))
                    paced = asyncio.ensure_future(threads.run("greedy", lambda: "alone"))
                    await _settle()
                    assert not paced.done()
                assert await paced == "alone"

        loop.run_until_complete(main())


def test_a_text_that_is_given_up_while_it_waits_leaves_no_trace() -> None:
    begun = list[str]()
    with _frozen() as (loop, threads):

        async def main() -> None:
            with ExitStack() as here:
                here.enter_context(threads.serving("other"))
                with threads.serving("greedy"):
                    await threads.run("greedy", _taking(loop, 2 * BURST_S))
                    given_up = [
                        asyncio.ensure_future(threads.run("greedy", lambda: begun.append("no")))
                        for _ in range(3)
                    ]
                    await _settle()
                    for work in given_up:
                        work.cancel()
                    await asyncio.gather(*given_up, return_exceptions=True)
                assert not threads._threads._waiting
                loop.now_s += DRAIN_S * 1.01
                await _settle()
                assert not begun
                assert not threads._threads._paced
                assert not threads._threads.num_taken
                assert await threads.run("greedy", lambda: "next") == "next"

        loop.run_until_complete(main())
