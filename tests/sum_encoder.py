"""A pooling model of a few lines that takes its time on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.pooling.adapters import EncoderAdapterSet
from mlx_parallm.pooling.engine import PoolingEngine
from mlx_parallm.pooling.metrics import PoolingMetrics
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.pooling import PoolingEvent, PoolingInfo, PoolingInput, PoolRequest

POISON, NAN = 666, 777
NUM_STAGES = 4
LAUNCH_S, TOKEN_S = 0.001, 0.0001


class FakeClock:
    """Stands still but for what is added."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SumJob:
    """Takes its time in equal stages."""

    def __init__(self, clock: FakeClock, seconds: float, results: list[np.ndarray]) -> None:
        self.num_stages = NUM_STAGES
        self._clock = clock
        self._stage_s = seconds / NUM_STAGES
        self._results = results

    def advance(self) -> None:
        assert self.num_stages > 1
        self._clock.now_s += self._stage_s
        self.num_stages -= 1

    def wait(self) -> list[np.ndarray]:
        self._clock.now_s += self._stage_s * self.num_stages
        return self._results


def shift_of(adapter: str | None) -> int:
    """Return what an adapter such as ``digest-3`` adds to a sum."""
    return 0 if adapter is None else 1000 * int(adapter.rpartition("-")[2])


class SumEncoder:
    """Its vector of an input is the sum and the length."""

    info = PoolingInfo(
        architecture="sum",
        vocab_size=1000,
        max_model_len=64,
        dims=2,
        dtype="float32",
        weight_bytes=0,
    )

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.batches: list[list[tuple[int, ...]]] = []

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> SumJob:
        assert {item.adapter for item in inputs} - {None} == set(slots)
        batch = [item.token_ids for item in inputs]
        self.batches.append(batch)
        if any(POISON in ids for ids in batch):
            raise RuntimeError("out of memory")
        rows = [
            [np.nan if NAN in ids else sum(ids) + shift_of(item.adapter), len(ids)]
            for ids, item in zip(batch, inputs, strict=True)
        ]
        return SumJob(self.clock, seconds_of(batch), list(np.array(rows, dtype=np.float32)))

    def release(self) -> None:
        self.batches.clear()


def seconds_of(batch: Sequence[tuple[int, ...]]) -> float:
    """Return the seconds that a batch takes."""
    return LAUNCH_S + TOKEN_S * len(batch) * max(map(len, batch))


class RepliedEngine(PoolingEngine):
    """An engine that passes each answer or error to the reply of its request."""

    def __init__(self, *parts: Any, **more: Any) -> None:
        super().__init__(*parts, **more)
        self.replies: dict[str, Callable[[Any], None]] = {}

    def add(self, request: PoolRequest, reply: Callable[[Any], None]) -> None:
        self.replies[request.request_id] = reply
        try:
            self._tell(self.submit(request))
        except ParallmError as refusal:
            self.replies.pop(request.request_id)(refusal)

    def step(self, within_s: float | None = None) -> list[PoolingEvent | ErrorEvent] | None:
        events = super().step(within_s)
        self._tell(events or ())
        return events

    def abort(self, request_id: str) -> bool:
        events = self.cancel(request_id)
        self._tell(events)
        return bool(events)

    def _tell(self, events: Iterable[PoolingEvent | ErrorEvent]) -> None:
        for event in events:
            reply = self.replies.pop(event.request_id, None)
            if reply is not None:
                reply(event.error if isinstance(event, ErrorEvent) else event.results)


def engine_of(
    encoder: SumEncoder,
    *,
    max_tokens: int = 64,
    max_waiting: int = 100,
    cache_bytes: int = 0,
    max_wait_s: float = 0.0,
    joins_lengths: bool = False,
    adapters: EncoderAdapterSet | None = None,
) -> RepliedEngine:
    return RepliedEngine(
        encoder,
        max_tokens=max_tokens,
        max_waiting=max_waiting,
        metrics=PoolingMetrics(MetricFamilies(), "m"),
        max_wait_s=max_wait_s,
        cache_bytes=cache_bytes,
        joins_lengths=joins_lengths,
        adapters=adapters,
        clock=encoder.clock,
    )


def request_of(
    name: str, *inputs: tuple[int, ...], model: str = "m", adapter: str | None = None
) -> PoolRequest:
    return PoolRequest(
        request_id=name, model=model, inputs=tuple(map(PoolingInput, inputs)), adapter=adapter
    )
