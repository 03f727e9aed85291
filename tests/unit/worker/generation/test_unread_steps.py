"""A step waits for all that it computes, whichever of it is read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.device.dispatcher import Dispatcher
from mlx_parallm.worker.device.faults import LATE, DeviceFaults
from mlx_parallm.worker.generation.inputs.runs import InputComputer
from mlx_parallm.worker.generation.model_step import ModelStep
from mlx_parallm.worker.generation.step_rows import StepRows
from mlx_parallm.worker.sampling.sampler import SampleResult

CHUNK = ScheduledSequence(seq_id=1, slot=0, start=0, token_ids=(5, 6), block_table=(0,))


class Recovery:
    """Keeps the errors that the runner would recover from."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @contextmanager
    def recovering(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            self.errors.append(error)
            raise


def step_of(recovery: Recovery, sampled: SampleResult | None = None) -> ModelStep:
    return ModelStep(
        StepRows([CHUNK]), sampled, {}, faults=DeviceFaults(), recovering=recovery.recovering
    )


def features_of(computer: InputComputer) -> list[mx.array]:
    rows = HostTensor(np.ones((2, 4), np.float32))
    computer.begin([0], InputKind.PROMPT_EMBEDS, [{"rows": rows}]).wait()
    return computer.take_begun()


@pytest.mark.parametrize("samples", [False, True])
def test_features_that_the_device_could_not_compute_fail_the_step(
    samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = features_of(InputComputer(None, mx.float32, two_way=None, waits=False))
    assert [array.shape for array in features] == [(2, 4)]
    recovery = Recovery()
    sampled = SampleResult(mx.zeros((0,), mx.uint32)) if samples else None
    step = step_of(recovery, sampled)
    step.start([mx.ones(1)], features, Dispatcher())
    error = RuntimeError(f"{LATE}: Insufficient Memory.")

    def wait(*arrays: list[mx.array]) -> None:
        if any(array is features[0] for each in arrays for array in each):
            raise error

    monkeypatch.setattr(mx, "eval", wait)
    with pytest.raises(RuntimeError, match="Insufficient"):
        step.wait()
    assert recovery.errors == [error]


def test_features_that_are_computed_at_once_are_not_waited_for() -> None:
    assert not features_of(InputComputer(None, mx.float32, two_way=None, waits=True))


@pytest.mark.parametrize("case", ["unread", "ended before", "sampled", "computed at once"])
def test_the_device_is_asked_where_nothing_is_read_and_no_step_follows(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append("synchronize"))
    sampled = SampleResult(mx.zeros((0,), mx.uint32)) if case == "sampled" else None
    step = step_of(Recovery(), sampled)
    if case == "computed at once":
        step.run([mx.ones(1)])
    else:
        step.start([mx.ones(1)], [], Dispatcher())
    if case == "ended before":
        step.end()
    step.wait()
    assert calls == (["synchronize"] if case == "unread" else [])
