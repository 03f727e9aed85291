"""Recordings that are heard side by side have the tokens that each has alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.audio_files import clip
from tests.builders.speech_folders import write_speech
from tests.server_process import ServerProcess, serving

pytestmark = [pytest.mark.slow, pytest.mark.one_engine]

MODEL = "random"
SECONDS = (1, 30, 2.5, 28, 7, 25, 10, 22, 13, 19, 16, 4)
#: ``POOL``: KV of four windows and some tokens more of each, so that some are preempted.
BLOCK_BYTES, WINDOW_BLOCKS = 16 * 2 * 2 * 32 * 4, 94
POOL = (4 * WINDOW_BLOCKS + 8) * BLOCK_BYTES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_speech(tmp_path_factory.mktemp("speech") / MODEL)
    with serving({MODEL: folder}, "--kv-cache-memory-bytes", f"{POOL}") as process:
        yield process


async def tokens_of(api: openai.AsyncOpenAI, number: int) -> list[list[int]]:
    """Return the tokens of each segment of a clip, whose draws have its number as seed."""
    answer: Any = await api.audio.transcriptions.create(
        file=("speech.wav", clip(SECONDS[number], number)),
        model=MODEL,
        response_format="verbose_json",
        temperature=1.0,
        extra_body={"seed": number},
    )
    return [segment.tokens for segment in answer.segments]


async def test_joins_aborts_and_preemption_change_no_token(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        numbers = range(len(SECONDS))
        alone = [await tokens_of(api, number) for number in numbers]
        assert len({str(tokens) for tokens in alone}) > len(SECONDS) // 2
        for _ in range(2):
            leaving = [asyncio.ensure_future(tokens_of(api, number)) for number in numbers[::3]]
            staying = [asyncio.ensure_future(tokens_of(api, number)) for number in numbers]
            await staying[0]
            for task in leaving:
                task.cancel()
            assert await asyncio.gather(*staying) == alone
            for task in leaving:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        assert server.metric("vllm:num_preemptions_total") > 0
