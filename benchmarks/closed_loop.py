"""A closed loop of clients on an engine that the caller steps, and what each client sees."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from typing_extensions import override

from mlx_parallm.bench.statistics import percentile, token_gaps_s
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import Phase, ScheduledBatch, StepTracer

# MAX_IDLE_STEPS: calls in a row that run nothing, after which a load has come to a standstill.
MAX_IDLE_STEPS = 10_000


class SteppedEngine(Protocol):
    """An engine that is stepped by hand."""

    def submit(self, request: GenerateRequest) -> Sequence[GenerateEvent]:
        """Queue a request."""
        ...

    def step(self) -> Sequence[GenerateEvent] | None:
        """Run a step; return its events, or None if nothing could run."""
        ...


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that each send their next request when the last one has ended.

    Attributes:
        clients: how many at once.
        prompt: tokens of every prompt.
        output: tokens of every answer.
        requests: in all.
        spread: prompts have up to this share more or fewer tokens.
    """

    clients: int
    prompt: int
    output: int
    requests: int
    spread: float = 0.0


@dataclass(slots=True)
class LoadTimes:
    """Seconds that clients saw.

    Attributes:
        first: from a request to its first token, of each request.
        gaps: between two tokens of a request, of all requests; tokens that come together share
            the gap before them equally.
        seconds: of the whole load.
        tokens: that all answers have.
    """

    first: list[float] = field(default_factory=list[float])
    gaps: list[float] = field(default_factory=list[float])
    seconds: float = 0.0
    tokens: int = 0

    def figures(self) -> dict[str, float]:
        """Return output tokens a second, and percentiles in milliseconds."""
        return {
            "output tokens/s": round(self.tokens / self.seconds, 1),
            "TTFT p50": round(1e3 * percentile(self.first, 50), 1),
            "TTFT p99": round(1e3 * percentile(self.first, 99), 1),
            "gap p50": round(1e3 * percentile(self.gaps, 50), 2),
            "gap p99": round(1e3 * percentile(self.gaps, 99), 2),
            "gap max": round(1e3 * max(self.gaps, default=0.0), 2),
        }


class _Clients:
    """Clients with requests left to send, and the times that they see.

    Attributes:
        sent: when each request that has not ended was sent.
        times: what was seen so far.
    """

    def __init__(
        self, engine: SteppedEngine, requests: list[GenerateRequest], clock: Callable[[], float]
    ) -> None:
        self.sent: dict[str, float] = {}
        self.times = LoadTimes()
        self._engine, self._requests, self._clock = engine, requests, clock
        self._latest: dict[str, float] = {}

    def send(self) -> None:
        """Send the next request, if there is one."""
        if self._requests:
            request = self._requests.pop()
            self.sent[request.request_id] = self._clock()
            self._engine.submit(request)

    def receive(self, event: GenerateEvent) -> None:
        """Note an event; send the next request if it ends one."""
        if isinstance(event, ErrorEvent):
            raise event.error
        if not isinstance(event, TokenEvent):
            return
        now_s, name = self._clock(), event.request_id
        if name not in self._latest:
            self.times.first.append(now_s - self.sent[name])
            self._latest[name] = now_s
        elif event.num_tokens:
            self.times.gaps += token_gaps_s([self._latest[name], now_s], [0, event.num_tokens])
            self._latest[name] = now_s
        self.times.tokens += event.num_tokens
        if event.finish_reason is not None:
            del self.sent[name], self._latest[name]
            self.send()


def run_load(
    engine: SteppedEngine,
    load: Load,
    *,
    vocab_size: int,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    until_s: float = float("inf"),
) -> LoadTimes:
    """Step the engine until the load has ended, or the clock shows ``until_s``.

    Raises:
        StepError: a request failed.
        RuntimeError: requests wait, but no step runs.
    """
    clients, begin_s = _Clients(engine, _requests(load, vocab_size, seed), clock), clock()
    for _ in range(load.clients):
        clients.send()
    idle = 0
    while clients.sent and clock() < until_s:
        events = engine.step()
        idle = idle + 1 if events is None else 0
        if idle == MAX_IDLE_STEPS:
            raise RuntimeError(f"no step runs, but {len(clients.sent)} requests wait")
        for event in events or ():
            clients.receive(event)
    clients.times.seconds = clock() - begin_s
    return clients.times


def _requests(load: Load, vocab_size: int, seed: int) -> list[GenerateRequest]:
    """Return the requests, the last one first."""
    draw = random.Random(seed)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=load.output)
    lengths = [
        max(1, round(load.prompt * draw.uniform(1 - load.spread, 1 + load.spread)))
        for _ in range(load.requests)
    ]
    return [
        GenerateRequest(
            request_id=f"load-{seed}-{number}",
            model="bench",
            prompt_ids=tuple(draw.choices(range(vocab_size), k=length)),
            params=params,
        )
        for number, length in enumerate(lengths)
    ]


class StepLog(StepTracer):
    """Notes the rows of each step, and the phases of the engine thread.

    Attributes:
        steps: the rows of one token, the other tokens, and the other rows of each step, by its id.
        spans: the phases in the order of their ends: name, step or None, begin and end in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps: dict[int, tuple[int, int, int]] = {}
        self.spans: list[tuple[Phase, int | None, float, float]] = []
        self._clock = clock

    def clear(self) -> None:
        """Forget all steps."""
        self.steps.clear()
        self.spans.clear()

    @contextmanager
    @override
    def span(self, phase: Phase, batch: ScheduledBatch | None = None) -> Generator[None]:
        begin_s = self._clock()
        try:
            yield
        finally:
            end_s = self._clock()
            if batch is not None and batch.step_id not in self.steps:
                counts = [len(row.token_ids) for row in batch.sequences]
                chunks = [count for count in counts if count > 1]
                rows = len(counts) - len(chunks), sum(chunks), len(chunks)
                self.steps[batch.step_id] = rows
            step_id = None if batch is None else batch.step_id
            self.spans.append((phase, step_id, begin_s, end_s))

    def ends_s(self) -> dict[int, float]:
        """Return when the results of each step were there, by its id."""
        return {
            step_id: end_s
            for phase, step_id, _, end_s in self.spans
            if phase is Phase.WAIT and step_id is not None
        }

    def record(self) -> dict[str, Any]:
        """Return everything for a file; times are milliseconds since the first phase began."""
        origin = min((begin_s for *_, begin_s, _ in self.spans), default=0.0)
        return {
            "steps": [[step_id, *rows] for step_id, rows in self.steps.items()],
            "spans": [
                [str(phase), step_id, *(round(1e3 * (at - origin), 2) for at in ends)]
                for phase, step_id, *ends in self.spans
            ],
        }
