"""From a recording to requests of the engine, one window after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import count

from mlx_parallm.api.http.request_counts import AudioHeard, RequestCounts
from mlx_parallm.api.turns.generation import WHOLE, Generation
from mlx_parallm.api.turns.prelude import NO_FIELDS, Admitted
from mlx_parallm.api.turns.samples import Sample
from mlx_parallm.audio.log_mel import FRAMES_PER_S
from mlx_parallm.audio.recording import Recording
from mlx_parallm.audio.transcriber import Heard, Transcriber, Window
from mlx_parallm.types.errors import (
    NoRoomError,
    OverloadedError,
    PausedError,
    RequestAbortedError,
)
from mlx_parallm.types.events import FinishReason, TokenEvent
from mlx_parallm.types.model_input import ModelInput
from mlx_parallm.types.request import GenerateRequest, SamplingParams


class Listener:
    """Asks the model of an admitted request; see ``transcriber.Ask``.

    Only its first request is refused where the queue is full, the models are paused or one has no
    memory. The later ones wait until they are taken: what was heard so far would be lost otherwise.
    """

    def __init__(self, admitted: Admitted, priority: int) -> None:
        self._admitted = admitted
        self._priority = priority
        self._numbers = count()

    async def __call__(
        self, prompt_ids: Sequence[int], source: ModelInput, params: SamplingParams, /
    ) -> Heard:
        """Return what the model makes of a source behind a prompt.

        Raises:
            ParallmError: the request was refused, failed or was aborted.
        """
        prelude, number = self._admitted.prelude, next(self._numbers)
        request = GenerateRequest(
            request_id=f"transcript-{prelude.answer_id}-{number}",
            model=self._admitted.model.names[0],
            prompt_ids=tuple(prompt_ids),
            inputs=(source,),
            params=params,
            priority=self._priority,
            client=prelude.client,
            group=f"transcript-{prelude.answer_id}",
        )
        generation = await self._start(request, waits=number > 0)
        sample = await _sample_of(generation)
        if sample.finish_reason == FinishReason.ABORT:
            raise RequestAbortedError("The request was aborted before the recording was heard.")
        return Heard(tuple(sample.token_ids), tuple(sample.logprobs), len(prompt_ids))

    def count(self, seconds: float) -> None:
        """Count seconds that were heard, for ``GET /metrics``."""
        counts: RequestCounts = self._admitted.prelude.request.app.state.counts
        counts.count(AudioHeard(self._admitted.model.names[0]), seconds)

    async def _start(self, request: GenerateRequest, *, waits: bool) -> Generation:
        while True:
            try:
                return await self._admitted.start([request], NO_FIELDS)
            except (OverloadedError, NoRoomError, PausedError) as refusal:
                if not waits:
                    raise
                await asyncio.sleep(refusal.retry_after_s)


async def _sample_of(generation: Generation) -> Sample:
    """Return the only sample of a generation, which is aborted if this task is cancelled."""
    sample = Sample()
    generation.gather(WHOLE)
    try:
        async for _, event in generation.events():
            if isinstance(event, TokenEvent):
                sample.add(event)
    finally:
        await generation.abort()
    return sample


async def heard_windows(
    transcriber: Transcriber, recording: Recording, listener: Listener
) -> AsyncGenerator[Window]:
    """Yield the windows of a recording, and count its seconds as they are heard."""
    heard_s = 0.0
    async with aclosing(transcriber.windows()) as windows:
        async for window in windows:
            # What is before a window is not heard again.
            start_s = window.first_frame / FRAMES_PER_S
            listener.count(start_s - heard_s)
            heard_s = start_s
            yield window
    listener.count(recording.seconds - heard_s)
