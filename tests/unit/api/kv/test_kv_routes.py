"""Answers to other servers that ask for KV."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pickle import PickleBuffer
from typing import Any

import pytest

from mlx_parallm.api.kv import routes
from mlx_parallm.api.kv.schema import BlocksRequest
from mlx_parallm.generation.kv_cache.peer.frames import unpack_frames
from tests.kv_peers import OWNER

CONTENTS = [bytes([number]) * 32 for number in range(3)]
BLOCKS = [bytes([number]) * 1000 for number in range(3)]


class Engine:
    """Answers each question with blocks."""

    def ask(self, question: object) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result([PickleBuffer(memoryview(block)) for block in BLOCKS])
        return answer


async def test_blocks_are_hashed_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    pack = routes.pack_frame

    def noting(content: bytes, data: memoryview) -> bytes:
        threads.append(threading.current_thread())
        return pack(content, data)

    monkeypatch.setattr(routes, "pack_frame", noting)
    body = BlocksRequest(owner=OWNER, contents=[each.hex() for each in CONTENTS], waits=False)
    answer = await routes._send_blocks(body, Engine())  # type: ignore[arg-type]
    assert list(unpack_frames(bytes(answer.body), OWNER, CONTENTS, 1000)) == BLOCKS
    assert len(threads) == 3
    assert threading.current_thread() not in threads
