"""Answers to other servers that ask for KV."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from mlx_parallm.api.kv import routes
from mlx_parallm.api.kv.schema import BlocksRequest
from mlx_parallm.generation.kv_cache.peer.exports import SentBlock
from mlx_parallm.generation.kv_cache.peer.filters import UID_BYTES, ContentFilter, filter_bytes
from mlx_parallm.generation.kv_cache.peer.frames import unpack_frames
from mlx_parallm.types.errors import EngineDeadError, EngineSilentError, NotFoundError
from tests.kv_peers import OWNER

CONTENTS = [bytes([number]) * 32 for number in range(3)]
BLOCKS = [bytes([number]) * 1000 for number in range(3)]


class Engines:
    """Answers each question as several engines do: now, never (None), or by raising."""

    def __init__(self, *answers: Any) -> None:
        self._answers = answers
        self.asked: list[Future[Any]] = []

    def ask_each(self, question: object) -> list[Future[Any]]:
        self.asked = [Future() for _ in self._answers]
        for future, answer in zip(self.asked, self._answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            elif answer is not None:
                future.set_result(answer)
        return self.asked


def blocks(count: int) -> list[SentBlock]:
    return [SentBlock(memoryview(block)) for block in BLOCKS[:count]]


async def sent(engines: Engines, *, waits: bool = False) -> list[bytes]:
    """Return the blocks of an answer."""
    body = BlocksRequest(owner=OWNER, contents=[each.hex() for each in CONTENTS], waits=waits)
    answer = await routes._send_blocks(body, engines)  # type: ignore[arg-type]
    return [bytes(block) for block in unpack_frames(bytes(answer.body), OWNER, CONTENTS, 1000)]


async def test_blocks_are_hashed_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    pack = routes.pack_frame

    def noting(content: bytes, data: memoryview) -> bytes:
        threads.append(threading.current_thread())
        return pack(content, data)

    monkeypatch.setattr(routes, "pack_frame", noting)
    assert await sent(Engines(blocks(3))) == BLOCKS
    assert len(threads) == 3
    assert threading.current_thread() not in threads


GONE = EngineDeadError("It is gone.")


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        ((blocks(1), blocks(2), blocks(0)), 2),
        ((GONE, blocks(1)), 1),
        # One that has all is enough.
        ((None, blocks(3)), 3),
    ],
)
async def test_the_longest_run_of_all_engines_is_sent(answers: Any, count: int) -> None:
    assert await sent(Engines(*answers)) == BLOCKS[:count]


async def test_the_engine_that_computes_a_prompt_is_enough() -> None:
    engines = Engines(None, blocks(1), None)
    assert await sent(engines, waits=True) == BLOCKS[:1]
    assert [each.cancelled() for each in engines.asked] == [True, False, True]


async def test_an_engine_that_is_silent_keeps_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Once one has answered, the others have no more than a moment, however long the first may take.
    monkeypatch.setattr(routes, "OTHERS_S", 0.1)
    assert await sent(Engines(blocks(2), None)) == BLOCKS[:2]
    monkeypatch.setattr(routes, "ASK_S", 0.1)
    with pytest.raises(EngineSilentError):
        await sent(Engines(None))


@pytest.mark.parametrize("waits", [False, True])
async def test_an_engine_that_has_nothing_hurries_no_other(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "OTHERS_S", 0.0)
    engines = Engines(blocks(0), None)
    answer = asyncio.ensure_future(sent(engines, waits=waits))
    for _ in range(10):
        await asyncio.sleep(0)
    engines.asked[1].set_result(blocks(2))
    assert await answer == BLOCKS[:2]


async def test_what_all_engines_refuse_is_refused() -> None:
    with pytest.raises(NotFoundError):
        await sent(Engines(NotFoundError("no"), NotFoundError("no")))


async def test_the_filter_has_what_any_engine_has() -> None:
    *contents, other = (hashlib.sha256(bytes([number])).digest() for number in range(4))
    parts = [bytes(UID_BYTES) + filter_bytes([content]) for content in contents]
    answer = await routes.kv_filter(Engines(*parts, GONE), OWNER)  # type: ignore[arg-type]
    known = ContentFilter(bytes(answer.body)[UID_BYTES:])
    assert all(content in known for content in contents)
    assert other not in known
