"""Recordings of requests: files become features on threads, within the memory for them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated

from fastapi import Depends, Request

from mlx_parallm.api.http.offload import current_client, in_thread
from mlx_parallm.api.turns.images import max_held_bytes
from mlx_parallm.audio.log_mel import SAMPLE_RATE
from mlx_parallm.audio.recording import Recording, recorded
from mlx_parallm.fairness import SharedBudget
from mlx_parallm.media.audio.decode import decode_audio, seconds_of
from mlx_parallm.media.audio.limits import AudioLimits
from mlx_parallm.media.reader import naming

# BYTES_PER_S: memory of a second, samples and 128 features of each frame in float32, while its
# features are computed.
BYTES_PER_S = 120_000


class Recordings:
    """Decodes the recordings of requests, for all models of a process.

    The recordings that are heard at the same time take a bounded amount of memory, of which one
    client has half at most; further ones wait for their turn.
    """

    def __init__(self, max_seconds: float, *, max_bytes: int | None = None) -> None:
        """Prepare.

        Args:
            max_seconds: the longest recording.
            max_bytes: memory of all together; None: as for images. The longest one fits always.
        """
        self._limits = AudioLimits(max_seconds=max_seconds)
        longest = math.ceil(max_seconds * BYTES_PER_S)
        self._budget = SharedBudget(max(max_bytes or max_held_bytes(), longest))

    @property
    def num_bytes(self) -> int:
        """Memory that is counted now."""
        return self._budget.num_taken

    @asynccontextmanager
    async def recorded(
        self, data: bytes, num_mels: int, *, param: str
    ) -> AsyncGenerator[Recording]:
        """Provide the recording of a file, when there is room for it.

        Args:
            data: the file.
            num_mels: numbers of a frame of features.
            param: the field that has the file, for errors.

        Raises:
            InvalidRequestError: it is no audio file, or beyond the limits.
        """
        async with contextlib.AsyncExitStack() as stack:
            with naming(param):
                seconds = await in_thread(partial(seconds_of, data, self._limits))
                decoding = self._budget.product(
                    math.ceil(seconds * BYTES_PER_S),
                    current_client() or None,
                    partial(in_thread, partial(self._decoded, data, num_mels)),
                )
                recording = await stack.enter_async_context(decoding)
            yield recording

    def _decoded(self, data: bytes, num_mels: int) -> Recording:
        return recorded(decode_audio(data, self._limits, SAMPLE_RATE), num_mels)


async def get_recordings(request: Request) -> Recordings:
    """Return the recordings of this application."""
    return request.app.state.recordings


RecordingsDep = Annotated[Recordings, Depends(get_recordings)]
