"""Recordings wait for room, of which one client has half, and give it back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from mlx_parallm.api.audio.recordings import BYTES_PER_S, Recordings
from mlx_parallm.api.http.offload import TextThreads
from mlx_parallm.types.errors import InvalidRequestError
from tests.audio_files import clip

NUM_MELS = 80


async def test_one_client_has_half_of_the_room() -> None:
    recordings = Recordings(3.0, max_bytes=8 * BYTES_PER_S)
    threads, end = TextThreads(), asyncio.Event()
    begun: asyncio.Queue[str] = asyncio.Queue()

    async def hold(client: str) -> None:
        with threads.serving(client):
            async with recordings.recorded(clip(2), NUM_MELS, param="file") as recording:
                assert recording.seconds == 2
                begun.put_nowait(client)
                await end.wait()

    async with asyncio.TaskGroup() as group:
        for client in ("a", "a", "a", "b"):
            group.create_task(hold(client))
        assert sorted([await begun.get() for _ in range(3)]) == ["a", "a", "b"]
        # The third of the first client waits, though there is room for it.
        assert recordings.num_bytes == 6 * BYTES_PER_S
        end.set()
    assert begun.qsize() == 1
    assert recordings.num_bytes == 0


async def test_bad_files_leave_nothing_counted() -> None:
    recordings = Recordings(1.0)
    for data in (b"no audio", clip(2), clip(1)[:5000]):
        with pytest.raises(InvalidRequestError) as refusal:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(
                    recordings.recorded(data, NUM_MELS, param="file_url")
                )
        assert refusal.value.param == "file_url"
        assert recordings.num_bytes == 0


async def test_errors_of_those_who_hear_keep_their_names() -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        async with Recordings(1.0).recorded(clip(1), NUM_MELS, param="file"):
            raise InvalidRequestError("no", param="prompt")
    assert refusal.value.param == "prompt"
