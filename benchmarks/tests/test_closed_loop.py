"""Times and gaps of a closed loop, from an engine that answers as scripted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.closed_loop import Load, run_load
from benchmarks.gpu import mixed_steps
from mlx_parallm.types.events import FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest


class ScriptedEngine:
    """Answers one request at a time, with so many tokens in each step; None: no step runs."""

    def __init__(self, *script: int | None) -> None:
        self.now_s = 0.0
        self._script = script
        self._queue: list[str] = []
        self._place = 0

    def submit(self, request: GenerateRequest) -> Sequence[GenerateEvent]:
        self._queue.append(request.request_id)
        return ()

    def step(self) -> Sequence[GenerateEvent] | None:
        tokens = self._script[self._place % len(self._script)]
        self._place += 1
        self.now_s += 1.0
        if tokens is None:
            return None
        is_last = self._place % len(self._script) == 0
        name = self._queue.pop(0) if is_last else self._queue[0]
        return [
            TokenEvent(
                request_id=name,
                index=0,
                token_ids=tuple(range(tokens)),
                text="",
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
        ]

    def clock(self) -> float:
        return self.now_s


def test_answers_of_one_token_have_no_gaps() -> None:
    engine = ScriptedEngine(1)
    times = run_load(engine, Load(1, 4, 1, 3), vocab_size=9, clock=engine.clock)
    assert times.first == [1.0] * 3
    assert times.gaps == []
    assert times.tokens == 3
    assert times.figures()["gap max"] == 0.0


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    engine = ScriptedEngine(2, 4, 0, 1)
    times = run_load(engine, Load(1, 4, 7, 2), vocab_size=9, clock=engine.clock)
    assert times.gaps == [0.25, 0.25, 0.25, 0.25, 2.0] * 2
    assert times.first == [1.0] * 2
    assert times.tokens == 14
    assert times.seconds == 8.0


def test_a_load_that_comes_to_a_standstill_ends_with_an_error() -> None:
    engine = ScriptedEngine(1, None, *[None] * 20_000)
    with pytest.raises(RuntimeError, match="2 requests wait"):
        run_load(engine, Load(2, 4, 9, 5), vocab_size=9, clock=engine.clock)


def test_a_load_waits_for_a_step_that_runs_later() -> None:
    engine = ScriptedEngine(1, *[None] * 9, 1)
    times = run_load(engine, Load(2, 4, 2, 2000), vocab_size=9, clock=engine.clock)
    assert len(times.first) == 2000


def test_a_load_ends_when_the_clock_says_so() -> None:
    engine = ScriptedEngine(*[1] * 100)
    times = run_load(engine, Load(1, 4, 100, 1), vocab_size=9, clock=engine.clock, until_s=10.0)
    assert times.gaps == [1.0] * 9
    assert math.isclose(times.seconds, 10.0)


def test_prompts_of_a_name_are_those_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def prompts(_: object, lengths: list[int], seed: int) -> list[list[int]]:
        seeds.append(seed)
        return [[1] * length for length in lengths]

    monkeypatch.setattr(mixed_steps, "random_prompts", prompts)
    queued: list[GenerateRequest] = []
    engine = SimpleNamespace(engine=SimpleNamespace(submit=queued.append))
    stepped: Any = SimpleNamespace(model=None, engine=engine)
    mixed_steps._submit(stepped, mixed_steps.PROMPT + 3, "chunk-512")
    assert seeds == [0x9CD7C391]
    assert [len(request.prompt_ids) for request in queued] == [mixed_steps.PROMPT, 3]
