"""One encoder's engine: batches of inputs in, a result for each out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from mlx_parallm.encode import Encoder, EncodeRequest, EncodeResults
from mlx_parallm.encoding.queue import EncodeQueue, WaitingInput
from mlx_parallm.encoding.result_cache import ResultCache
from mlx_parallm.engine.encoder_metrics import EncoderMetrics
from mlx_parallm.errors import OverloadedError, StepError

logger = logging.getLogger(__name__)

Reply = Callable[[Any], None]


class _Open:
    """A request that is not answered yet.

    Attributes:
        results: by the inputs' places, as far as they are known.
        hits: places of those that were kept from earlier requests.
    """

    def __init__(
        self, request: EncodeRequest, reply: Reply, known: dict[int, np.ndarray], arrival_s: float
    ) -> None:
        self.request = request
        self.reply = reply
        self.hits = frozenset(known)
        self.results = dict(known)
        self.arrival_s = arrival_s

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.request.inputs)

    def answer(self) -> None:
        places = range(len(self.request.inputs))
        hits = (place in self.hits for place in places)
        self.reply(EncodeResults((self.results[place] for place in places), hits))


class EncodeEngine:
    """Steps one encoder. Not thread-safe: everything runs on the engine thread."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        max_tokens: int,
        max_tokens_beside: int,
        max_waiting: int,
        metrics: EncoderMetrics,
        cache_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare.

        Args:
            encoder: the model.
            max_tokens: of a batch, padding included.
            max_tokens_beside: the same while a model of this process generates, whose streams wait
                for the batch.
            max_waiting: distinct inputs that may wait.
            metrics: is told what happens.
            cache_bytes: most memory of results that are kept for equal inputs.
            clock: seconds from any beginning.
        """
        self._encoder = encoder
        self._queue = EncodeQueue()
        self._cache = ResultCache(cache_bytes)
        self._open: dict[str, _Open] = {}
        self._max_tokens = max_tokens
        self._max_tokens_beside = max_tokens_beside
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._clock = clock

    def add(self, request: EncodeRequest, reply: Reply) -> None:
        """Queue a request; ``reply`` gets ``EncodeResults``, or the error."""
        found = ((place, self._cache.get(one)) for place, one in enumerate(request.inputs))
        known = {place: result for place, result in found if result is not None}
        num_missing = len(request.inputs) - len(known)
        if num_missing and self._open and len(self._queue) + num_missing > self._max_waiting:
            reply(OverloadedError("Too many inputs wait for this model; try again later."))
            return
        self._metrics.on_request(len(request.inputs), len(known))
        one = self._open[request.request_id] = _Open(request, reply, known, self._clock())
        self._queue.add(request, known)
        self._metrics.on_waiting(len(self._queue))
        if one.is_complete:
            self._answer(one)

    def abort(self, request_id: str) -> bool:
        """Compute nothing more for a request, whose caller has gone; False if it is not here."""
        one = self._open.pop(request_id, None)
        if one is None:
            return False
        self._queue.remove(one.request)
        self._metrics.on_waiting(len(self._queue))
        return True

    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return len(self._queue) > 0

    def step(self, *, beside: bool) -> None:
        """Run one batch and answer the requests that it completes.

        ``beside``: while a model of this process generates.
        """
        batch = self._queue.take(self._max_tokens_beside if beside else self._max_tokens)
        begin_s = self._clock()
        try:
            results = self._encoder.run([one.input for one in batch])
        except Exception as cause:
            logger.exception("a batch of %d inputs failed", len(batch))
            self._fail(batch, f"{type(cause).__name__}: {cause}")
            return
        lengths = [len(one.input.token_ids) for one in batch]
        self._metrics.on_batch(lengths, self._clock() - begin_s)
        self._metrics.on_waiting(len(self._queue))
        given = list(zip(batch, results, strict=True))
        wrong = [waiting for waiting, result in given if not np.isfinite(result).all()]
        self._fail(wrong, "The model's result is not made of numbers.")
        for waiting, result in given:
            if waiting not in wrong:
                self._give(waiting, result)

    def release(self) -> None:
        """Give back the memory of the model, which runs no more; nothing may wait."""
        self._encoder.release()

    def _give(self, waiting: WaitingInput, result: np.ndarray) -> None:
        # Several requests may get it, and later ones from the cache.
        result.setflags(write=False)
        self._cache.put(waiting.input, result)
        for request_id, place in waiting.askers:
            one = self._open.get(request_id)
            if one is None:
                continue
            one.results[place] = result
            if one.is_complete:
                self._answer(one)

    def _answer(self, one: _Open) -> None:
        del self._open[one.request.request_id]
        self._metrics.on_answer(self._clock() - one.arrival_s)
        one.answer()

    def _fail(self, batch: Iterable[WaitingInput], why: str) -> None:
        """End the requests that wait for any of these inputs."""
        for request_id in {asker for waiting in batch for asker, _ in waiting.askers}:
            one = self._open.get(request_id)
            if one is not None:
                self.abort(request_id)
                one.reply(StepError(why))
