"""One encoder's engine: batches of inputs in, a vector for each out."""

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

    def __init__(self, request: EncodeRequest, dims: int, reply: Reply) -> None:
        self.request = request
        self.reply = reply
        self.vectors = np.empty((len(request.inputs), dims), dtype=np.float32)
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
        """Queue a request; ``reply`` gets its vectors, float32 ``[inputs, dims]``, or its error."""
        if self._open and len(self._queue) + len(request.inputs) > self._max_waiting:
            reply(OverloadedError("Too many inputs wait for this model; try again later."))
            return
        self._open[request.request_id] = _Open(request, self._encoder.info.dims, reply)
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
            vectors = self._encoder.embed([one.token_ids for one in batch])
        except Exception as cause:
            logger.exception("a batch of %d inputs failed", len(batch))
            self._fail(batch, f"{type(cause).__name__}: {cause}")
            return
        wrong = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        self._fail([batch[row] for row in wrong], "The model's vector is not made of numbers.")
        for waiting, vector in zip(batch, vectors, strict=True):
            self._give(waiting, vector)

    def _give(self, waiting: WaitingInput, vector: np.ndarray) -> None:
        for request_id, place in waiting.askers:
            one = self._open.get(request_id)
            if one is None:
                continue
            one.vectors[place] = vector
            one.missing -= 1
            if not one.missing:
                del self._open[request_id]
                one.reply(one.vectors)

    def _fail(self, batch: Iterable[WaitingInput], why: str) -> None:
        """End the requests that wait for any of these inputs."""
        for request_id in {asker for waiting in batch for asker, _ in waiting.askers}:
            one = self._open.get(request_id)
            if one is not None:
                self.abort(request_id)
                one.reply(StepError(why))
