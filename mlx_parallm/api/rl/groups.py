"""Runs the prompts of one rollout, each with its group of samples."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from mlx_parallm.api.turns.generation import WHOLE, Generation
from mlx_parallm.api.turns.samples import LazySequence, Sample
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent, FinishReason, PromptEvent
from mlx_parallm.types.request import GenerateRequest


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a sample: a reward, or why there is none."""

    reward: float | None = None
    error: str | None = None


@dataclass(slots=True)
class Group:
    """A prompt and its samples.

    Attributes:
        number: which prompt.
        request: the engine's.
        samples: as far as they are known.
        finished: indices of those that have ended.
        verdicts: of the verifier or the reward model, by index.
        prompt: what the engine said of the prompt.
        error: what ended the group early; samples that had ended by then count.
    """

    number: int
    request: GenerateRequest
    samples: Sequence[Sample] = field(init=False)
    finished: set[int] = field(default_factory=set[int])
    verdicts: dict[int, Verdict] = field(default_factory=dict[int, Verdict])
    prompt: PromptEvent | None = None
    error: ParallmError | None = None

    def __post_init__(self) -> None:
        self.samples = LazySequence(self.request.params.n, lambda _index: Sample())


class Judge(ABC):
    """Says what samples are worth. What goes wrong is part of the verdict, and fails no rollout."""

    @abstractmethod
    async def judge(self, group: Group, index: int) -> Verdict:
        """Return the reward of a sample, or why there is none."""

    async def close(self) -> None:
        """Free what judging needed."""
        return


# A group, and which of its samples has ended; None where the group has failed.
Ended = tuple[Group, int | None]


class Groups:
    """The engine's requests of one rollout.

    A group that fails does not end the others: what was sampled is not lost.
    """

    def __init__(
        self,
        engine: RequestClient,
        requests: Sequence[GenerateRequest],
        generation: Generation,
        *,
        judge: Judge | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """``judge`` is asked about samples that were not aborted; after ``timeout_s`` all end."""
        self.all = [Group(number, request) for number, request in enumerate(requests)]
        self._engine = engine
        self._generation = generation
        self._judge = judge
        self._timeout_s = timeout_s
        # Samples that have ended, at most all of the rollout's; None where a group has ended.
        self._queue: asyncio.Queue[Ended | Exception | None] = asyncio.Queue()
        self._timer: asyncio.Task[None] | None = None

    async def ended(self) -> AsyncIterator[Ended]:
        """Every sample when it has ended, and every group that failed, as they come."""
        tasks = [
            asyncio.ensure_future(self._collect(group, handle))
            for group, handle in zip(self.all, self._generation.handles, strict=True)
        ]
        if self._timeout_s is not None:
            self._timer = asyncio.ensure_future(self._end_after(self._timeout_s))
        try:
            left = len(tasks)
            while left:
                match await self._queue.get():
                    case None:
                        left -= 1
                    case Exception() as bug:
                        raise bug
                    case ended:
                        yield ended
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """End what still runs, and who judges it."""
        if self._timer is not None:
            self._timer.cancel()
        await self._generation.abort()
        if self._judge is not None:
            await self._judge.close()

    async def _end_after(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        for handle in self._generation.handles:
            await self._engine.cancel(handle.request_id)

    async def _collect(self, group: Group, handle: RequestHandle) -> None:
        checks: list[asyncio.Task[None]] = []
        handle.gather(WHOLE)
        try:
            async for event in handle.events:
                if isinstance(event, ErrorEvent):
                    group.error = event.error
                elif isinstance(event, PromptEvent):
                    group.prompt = event
                else:
                    group.samples[event.index].add(event)
                    if event.finish_reason is not None:
                        checks.append(asyncio.ensure_future(self._finish(group, event.index)))
            await asyncio.gather(*checks)
            if group.error is not None:
                self._queue.put_nowait((group, None))
        except Exception as bug:  # noqa: BLE001 - raised again where the samples are read
            self._queue.put_nowait(bug)
        finally:
            for check in checks:
                check.cancel()
        self._queue.put_nowait(None)

    async def _finish(self, group: Group, index: int) -> None:
        is_whole = group.samples[index].finish_reason != FinishReason.ABORT
        if self._judge is not None and is_whole:
            group.verdicts[index] = await self._judge.judge(group, index)
        group.finished.add(index)
        self._queue.put_nowait((group, index))
