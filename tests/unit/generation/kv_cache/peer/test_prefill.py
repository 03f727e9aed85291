"""Prompts that a peer computes: what comes is used, and everything else is computed here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from mlx_parallm.generation.kv_cache.peer.exports import ANSWER_S
from mlx_parallm.generation.kv_cache.peer.link import LinkError
from mlx_parallm.generation.kv_cache.peer.peers import PeerFetch
from mlx_parallm.generation.kv_cache.peer.prefill import REST_S, Prefiller, PrefillLink, Prompt
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.work import CacheScope
from tests.kv_peers import OWNER, frames
from tests.stored_prompts import NUM_FOUND, OTHER, PROMPT, SIZE, ask, num_computed, num_filled
from tests.unit.generation.kv_cache.peer.test_exports import Server

# BLOCK_BYTES: blocks of the simulated model are JSON, which may end with spaces.
BLOCK_BYTES = 400


def padded(block: Any) -> bytes:
    return bytes(block).ljust(BLOCK_BYTES)


class NowThread:
    """Runs a reading to its end at once."""

    def read(self, reading: Coroutine[Any, Any, None], fetch: PeerFetch) -> PeerFetch:
        asyncio.run(reading)
        return fetch

    def close(self) -> None:
        """Do nothing: there is no thread."""


class HeldThread(NowThread):
    """Begins no reading; a test gives the blocks."""

    def __init__(self) -> None:
        self.fetches: list[PeerFetch] = []

    def read(self, reading: Coroutine[Any, Any, None], fetch: PeerFetch) -> PeerFetch:
        reading.close()
        self.fetches.append(fetch)
        return fetch


@dataclass
class ServerLink(PrefillLink):
    """A peer in this process; ``fault`` is called with each number of an answer."""

    server: Server
    fault: Callable[[int], None] = lambda number: None
    change: Callable[[bytes], bytes] = bytes
    prompts: list[Prompt] = field(default_factory=list[Prompt])
    num_answers: int = 0
    name: str = "http://peer:1"

    async def prefill(self, prompt: Prompt) -> None:
        self.prompts.append(prompt)
        name = f"prefill {len(self.prompts)}"
        harness = self.server.harness
        harness.add(
            GenerateRequest(
                request_id=name,
                model="m",
                prompt_ids=tuple(prompt.token_ids),
                params=SamplingParams(max_tokens=1, ignore_eos=True),
                cache_salt=prompt.cache_salt,
                extra_key=prompt.extra_key,
                scope=CacheScope(prompt.scope),
                is_local=True,
            )
        )
        while name in harness.tracked:
            self.server.turn()
            await asyncio.sleep(0)

    async def await_blocks(self, contents: Sequence[bytes]) -> bytes:
        self.num_answers += 1
        self.fault(self.num_answers)
        answer = self.server.exports.ask(contents, waits=True)
        for _ in range(100):
            if answer.done():
                break
            self.server.turn()
            await asyncio.sleep(0)
        blocks: Sequence[Any] = answer.result() if answer.done() else []
        pairs = zip(contents, map(padded, blocks), strict=False)
        return self.change(frames(list(pairs)))


class Decoder(Server):
    """A server whose long prompts a peer computes."""

    def __init__(
        self, link: PrefillLink, thread: NowThread | None = None, min_tokens: int = 16
    ) -> None:
        super().__init__()
        self.thread: Any = thread or NowThread()
        self.prefiller = self.tiers.prefiller = Prefiller(
            link,
            self.thread,
            owner=OWNER,
            num_bytes=BLOCK_BYTES,
            min_tokens=min_tokens,
            clock=lambda: self.harness.now_s,
        )

    def complete(self, prompt: Sequence[int] = PROMPT, **more: Any) -> None:
        """Run a request; the harness compares its tokens with those of the model."""
        ask(self.harness, "r", prompt, **more)
        self.harness.drain()


@pytest.fixture
def peer() -> Server:
    return Server()


def test_a_long_prompt_is_computed_by_a_peer(peer: Server) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link)
    decoder.complete(max_tokens=5)
    assert num_filled(decoder.harness) == NUM_FOUND
    assert num_computed(decoder.harness) == len(PROMPT) - NUM_FOUND * SIZE + 4
    assert num_computed(peer.harness) == len(PROMPT) - 1
    stats = decoder.tiers.stats().prefill
    assert stats is not None
    assert (stats.used, stats.hit_tokens, stats.declined) == (1, NUM_FOUND * SIZE, {})
    # The blocks come while the peer goes on.
    assert link.num_answers > 1
    # Memory has them now.
    decoder.complete()
    assert len(link.prompts) == 1


def test_what_is_here_is_not_computed_again(peer: Server) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link)
    decoder.complete(PROMPT[: 3 * SIZE])
    assert not link.prompts
    decoder.complete()
    assert num_filled(decoder.harness) == NUM_FOUND - 3


def test_a_short_prompt_is_computed_here(peer: Server) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link, min_tokens=len(PROMPT))
    decoder.complete()
    assert not link.prompts
    assert num_filled(decoder.harness) == 0


def test_a_prompt_of_a_peer_is_not_sent_on(peer: Server) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link)
    asked_back = ServerLink(decoder)
    asyncio.run(asked_back.prefill(Prompt(weights="w", token_ids=PROMPT)))
    assert not link.prompts


def test_salt_and_scope_go_with_a_prompt(peer: Server) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link)
    decoder.complete(salt="a tenant's", scope=CacheScope("a key's"))
    (prompt,) = link.prompts
    assert (prompt.cache_salt, prompt.scope) == ("a tenant's", "a key's")
    assert num_filled(decoder.harness) == NUM_FOUND
    # Others find nothing of it.
    decoder.complete(salt="another's")
    assert len(link.prompts) == 2


def refuse(_number: int) -> None:
    raise LinkError("its queue is full", "busy")


def die(number: int) -> None:
    if number > 1:
        raise LinkError("it does not answer")


@pytest.mark.parametrize(
    ("fault", "change", "reason", "is_part"),
    [
        (refuse, bytes, "busy", False),
        (die, bytes, "unreachable", True),
        (lambda _: None, lambda _: b"<html>nothing here</html>", "damaged", False),
        (lambda _: None, lambda answer: answer[:24], "missing", False),
        (lambda _: None, lambda answer: answer[:-1], "damaged", True),
    ],
)
def test_a_faulty_peer_costs_time_only(
    peer: Server,
    fault: Callable[[int], None],
    change: Callable[[bytes], bytes],
    reason: str,
    is_part: bool,
) -> None:
    link = ServerLink(peer, fault, change)
    decoder = Decoder(link)
    decoder.complete(max_tokens=3)
    assert decoder.prefiller.declined == {reason: 1}
    assert 0 <= num_filled(decoder.harness) < NUM_FOUND
    assert (num_filled(decoder.harness) > 0) == (decoder.prefiller.used > 0) == is_part
    # It rests for a while.
    decoder.complete(OTHER)
    assert decoder.prefiller.declined["resting"] == 1
    assert len(link.prompts) == 1
    decoder.harness.now_s += REST_S
    decoder.complete(OTHER[1:])
    assert len(link.prompts) == 2


def test_what_has_come_of_a_late_prompt_is_used(peer: Server) -> None:
    ask(peer.harness, "first")
    peer.harness.drain()
    thread = HeldThread()
    decoder = Decoder(ServerLink(peer), thread)
    decoder.tiers.fetches.computing.observe(1, 0.01)
    ask(decoder.harness, "r", max_tokens=3)
    assert decoder.harness.step() is None
    (fetch,) = thread.fetches
    root = next(iter(decoder.exports._roots))
    contents = [each for each in peer.exports.contents() if each.startswith(root)]
    blocks = peer.read(contents[:3])
    fetch.blocks.extend(map(padded, blocks))
    decoder.harness.now_s += 60
    decoder.harness.drain()
    assert num_filled(decoder.harness) == 3
    assert decoder.tiers.fetches.num_late == 1
    assert decoder.prefiller.used == 1
    # At that pace all of it would have taken more than twice as long, and so will the next one.
    for _ in range(50):
        decoder.tiers.fetches.computing.observe(1, 0.02)
    decoder.complete(OTHER)
    assert len(thread.fetches) == 1
    assert decoder.prefiller.declined == {"late": 1, "slow": 1}


@dataclass
class QueuedLink(ServerLink):
    """A peer that computes other prompts before."""

    turn: asyncio.Event = field(default_factory=asyncio.Event)

    async def prefill(self, prompt: Prompt) -> None:
        await self.turn.wait()
        await super().prefill(prompt)

    async def await_blocks(self, contents: Sequence[bytes]) -> bytes:
        self.num_answers += 1
        self.fault(self.num_answers)
        if self.num_answers < 4:
            return frames([])
        self.turn.set()
        return await super().await_blocks(contents)


@pytest.mark.parametrize("answer_s", [ANSWER_S, 0.0])
def test_a_peer_that_has_no_block_in_time_is_asked_again(peer: Server, answer_s: float) -> None:
    def pass_time(number: int) -> None:
        decoder.harness.now_s += answer_s if number < 4 else 0.0

    decoder = Decoder(QueuedLink(peer, pass_time))
    decoder.tiers.fetches.computing.observe(1, 1.0)
    decoder.complete(max_tokens=3)
    assert decoder.prefiller.declined == ({} if answer_s else {"missing": 1})
    assert num_filled(decoder.harness) == (NUM_FOUND if answer_s else 0)


def test_a_peer_that_takes_longer_than_computing_is_declined(peer: Server) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link)
    decoder.tiers.fetches.computing.observe(1, 0.001)

    def pass_time(_number: int) -> None:
        decoder.harness.now_s += 1.0

    link.fault = pass_time
    decoder.complete()
    assert decoder.prefiller.used == 1
    decoder.complete(OTHER)
    assert len(link.prompts) == 1
    assert decoder.prefiller.declined == {"slow": 1}


@pytest.mark.parametrize("has_stream", [False, True])
@pytest.mark.parametrize("times", [0.9, 1.5, 2.5])
def test_a_peer_may_take_twice_as_long_as_computing_while_streams_run(
    peer: Server, has_stream: bool, times: float
) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link)
    computing = decoder.tiers.fetches.computing

    def pass_time(number: int) -> None:
        decoder.harness.now_s += times if number == 1 else 0.0

    link.fault = pass_time
    computing.observe(NUM_FOUND * SIZE, 1.0)
    decoder.complete()
    assert decoder.prefiller.used == 1
    if has_stream:
        ask(decoder.harness, "stream", [9], max_tokens=50)
        decoder.harness.step()
    decoder.complete(OTHER)
    is_used = times < (2.0 if has_stream else 1.0)
    assert decoder.prefiller.used == 1 + is_used
    assert decoder.prefiller.declined == ({} if is_used else {"slow": 1})


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE])
def test_a_prompt_of_few_tokens_does_not_wait(peer: Server, length: int) -> None:
    link = ServerLink(peer)
    decoder = Decoder(link, min_tokens=1)
    decoder.complete(PROMPT[:length])
    assert len(link.prompts) == (length > SIZE)
    assert not decoder.prefiller.declined


def test_a_request_that_ends_while_its_peer_computes_leaves_nothing(peer: Server) -> None:
    thread = HeldThread()
    decoder = Decoder(ServerLink(peer), thread)
    ask(decoder.harness, "r")
    assert decoder.harness.step() is None
    (fetch,) = thread.fetches
    stopped: list[bool] = []
    fetch.stop = lambda: stopped.append(True)
    assert decoder.harness.scheduler.stats().num_free_blocks == decoder.harness.num_blocks
    decoder.harness.abort("r")
    assert stopped
    decoder.harness.drain()
    # The peer was not late.
    assert not decoder.prefiller.declined


async def test_a_prompt_whose_request_ends_is_not_late(peer: Server) -> None:
    link = ServerLink(peer)
    prefiller = Decoder(link).prefiller
    prompt = Prompt(weights="w", token_ids=PROMPT)
    reading = asyncio.ensure_future(prefiller.read(prompt, [b"x" * 32], PeerFetch()))
    for _ in range(3):
        await asyncio.sleep(0)
    assert link.num_answers
    reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    assert not prefiller.declined


def test_blocks_of_another_prompt_are_not_used(peer: Server) -> None:
    other = frames([(b"x" * 32, b" " * BLOCK_BYTES)] * 3)
    link = ServerLink(peer, change=lambda _: other)
    decoder = Decoder(link)
    decoder.complete()
    assert num_filled(decoder.harness) == 0
    assert decoder.prefiller.declined == {"damaged": 1}


def test_a_peer_that_stays_slow_is_asked_more_and_more_rarely(peer: Server) -> None:
    thread = HeldThread()
    decoder = Decoder(ServerLink(peer), thread)
    asked_at_s: list[float] = []
    for number in range(300):
        decoder.tiers.fetches.computing.observe(1, 0.01)
        name, before = str(number), len(thread.fetches)
        ask(decoder.harness, name, [number % 50, *PROMPT[1:]], salt=name)
        decoder.harness.step()
        if len(thread.fetches) > before:
            asked_at_s.append(decoder.harness.now_s)
            decoder.harness.now_s += 1.0
        decoder.harness.drain()
        decoder.harness.now_s += 10.0
    waits_s = [after - before for before, after in pairwise(asked_at_s)]
    assert waits_s == sorted(waits_s)
    assert waits_s[0] < 45
    assert 600 <= waits_s[-1] < 630
