"""Responses that are made in the background, with or without a reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import Any

from mlx_parallm.api.http import sse
from mlx_parallm.api.http.errors import BUG, failure_of
from mlx_parallm.api.responses.answer import ResponseAnswer
from mlx_parallm.api.turns.generation import Generation
from mlx_parallm.types.errors import ParallmError

logger = logging.getLogger(__name__)


class BackgroundJob:
    """One response, which is made from now on.

    Args:
        generation: what the engine makes of it.
        answer: what becomes of that.
        keeps_events: whether its events can be read, from the first on.
        on_growth: called with the bytes of further events that are kept.
        on_end: called with the response when it has ended.
    """

    def __init__(
        self,
        generation: Generation,
        answer: ResponseAnswer,
        *,
        keeps_events: bool,
        on_growth: Callable[[int], None],
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        self.keeps_events = keeps_events
        self._generation = generation
        self._answer = answer
        self._on_growth = on_growth
        self._on_end = on_end
        self._events: list[bytes] = []
        self._changed = asyncio.Event()
        self._has_ended = False
        self._task = asyncio.ensure_future(self._run())

    def response(self) -> dict[str, Any]:
        """Return the response as it is now."""
        return self._answer.response()

    async def cancel(self) -> None:
        """End the response; one that has ended stays as it is."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        answer = self._answer
        try:
            self._note(answer.opening(None))
            async for prompt, event in self._generation.events():
                self._note(answer.chunks(prompt, event))
            closing = answer.closing()
            await answer.settle()
            self._note(closing)
        except asyncio.CancelledError:
            self._note(answer.cancellation())
        except ParallmError as error:
            self._note(answer.failure({"error": asdict(failure_of(error))}))
        except Exception:
            logger.exception("a response in the background failed")
            self._note(answer.failure({"error": asdict(BUG)}))
        finally:
            self._has_ended = True
            self._changed.set()
            self._on_end(answer.response())
            await self._generation.abort()

    async def events(self, begin: int) -> AsyncIterator[bytes]:
        """Return the events from the sequence number ``begin`` on, until the response has ended."""
        while True:
            news, changed = self._events[begin:], self._changed
            if news:
                begin += len(news)
                yield b"".join(news)
            elif self._has_ended:
                return
            else:
                await changed.wait()

    def _note(self, events: list[dict[str, Any]]) -> None:
        if not self.keeps_events:
            return
        encoded = [sse.events(event) for event in events]
        self._events += encoded
        self._on_growth(sum(map(len, encoded)))
        self._changed.set()
        self._changed = asyncio.Event()
