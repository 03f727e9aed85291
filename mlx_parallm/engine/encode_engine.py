"""One encoder's engine: batches of inputs in, a result for each out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlx_parallm.encode import Encoder, EncodeRequest
from mlx_parallm.encoding.queue import EncodeQueue, WaitingInput
from mlx_parallm.errors import OverloadedError, StepError

logger = logging.getLogger(__name__)

Reply = Callable[[Any], None]


class _Open:
    """A request that is not answered yet."""

    def __init__(self, request: EncodeRequest, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.results: list[Any] = [None] * len(request.inputs)
        self.missing = len(request.inputs)


class EncodeEngine:
    """Steps one encoder. Not thread-safe: everything runs on the engine thread."""

    def __init__(
        self, encoder: Encoder, *, max_tokens: int, max_tokens_beside: int, max_waiting: int
    ) -> None:
        """Prepare.

        Args:
            encoder: the model.
            max_tokens: of a batch, padding included.
            max_tokens_beside: the same while a model of this process generates, whose streams wait
                for the batch.
            max_waiting: distinct inputs that may wait.
        """
        self._encoder = encoder
        self._queue = EncodeQueue()
        self._open: dict[str, _Open] = {}
        self._max_tokens = max_tokens
        self._max_tokens_beside = max_tokens_beside
        self._max_waiting = max_waiting

    def add(self, request: EncodeRequest, reply: Reply) -> None:
        """Queue a request; ``reply`` gets a list with a result for each input, or the error."""
        if self._open and len(self._queue) + len(request.inputs) > self._max_waiting:
            reply(OverloadedError("Too many inputs wait for this model; try again later."))
            return
        self._open[request.request_id] = _Open(request, reply)
        self._queue.add(request)

    def abort(self, request_id: str) -> bool:
        """Compute nothing more for a request, whose caller has gone; False if it is not here."""
        one = self._open.pop(request_id, None)
        if one is None:
            return False
        self._queue.remove(one.request)
        return True

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return len(self._queue) > 0

    def step(self, *, beside: bool) -> None:
        """Run one batch and answer the requests that it completes.

        ``beside``: while a model of this process generates.
        """
        batch = self._queue.take(self._max_tokens_beside if beside else self._max_tokens)
        try:
            results = self._encoder.run([one.input for one in batch])
        except Exception as cause:
            logger.exception("a batch of %d inputs failed", len(batch))
            self._fail(batch, f"{type(cause).__name__}: {cause}")
            return
        given = list(zip(batch, results, strict=True))
        wrong = [waiting for waiting, result in given if not np.isfinite(result).all()]
        self._fail(wrong, "The model's result is not made of numbers.")
        for waiting, result in given:
            self._give(waiting, result)

    def _give(self, waiting: WaitingInput, result: np.ndarray) -> None:
        for request_id, place in waiting.askers:
            one = self._open.get(request_id)
            if one is None:
                continue
            one.results[place] = result
            one.missing -= 1
            if not one.missing:
                del self._open[request_id]
                one.reply(one.results)

    def _fail(self, batch: Iterable[WaitingInput], why: str) -> None:
        """End the requests that wait for any of these inputs."""
        for request_id in {asker for waiting in batch for asker, _ in waiting.askers}:
            one = self._open.get(request_id)
            if one is not None:
                self.abort(request_id)
                one.reply(StepError(why))
