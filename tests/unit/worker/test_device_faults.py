"""All models of the worker recover when the device fails late, whichever op raises it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.types.errors import DeviceLostError, InvalidRequestError, OutOfMemoryError
from mlx_parallm.worker.device.faults import LATE, DeviceFaults, drain_device
from mlx_parallm.worker.ops import Load, Op, Pending
from mlx_parallm.worker.worker import Device, Tensors, Worker

LATE_ERROR = RuntimeError(f"{LATE}: Insufficient Memory.")
#: ``REASONS``: what users of MLX have seen behind the same words, as Metal describes it.
REASONS = (
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "Discarded (victim of GPU error/recovery) "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)",
    "Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
    "Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    "Invalid Resource (00000009:kIOGPUCommandBufferCallbackErrorInvalidResource)",
    "Internal Error (0000000e:Internal Error)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work(Op[str]):
    """An op of two stages; ``fails`` is the call that raises ``error``."""

    model: str
    fails: str = ""
    error: Exception = LATE_ERROR


@dataclass
class Job:
    work: Work
    num_stages: int = 2

    def advance(self) -> None:
        self.num_stages -= 1
        self._maybe_fail("advance")

    def wait(self) -> str:
        self._maybe_fail("wait")
        return "done"

    def _maybe_fail(self, call: str) -> None:
        if self.work.fails == call:
            raise self.work.error


@dataclass
class FakeModel:
    """Implements ``WorkerModel``."""

    num_recovered: int = 0

    def begin(self, op: Any, tensors: Mapping[str, Tensors]) -> Pending[Any]:
        if op.fails == "begin":
            raise op.error
        return Job(op)

    def recover(self) -> None:
        self.num_recovered += 1

    def release(self) -> None:
        pass


class FakeLoader:
    """Implements ``Loader``; the model's load may fail as ``spec`` says."""

    def begin(self, op: Load, device: Device) -> FakeLoad:
        return FakeLoad(Work(model=op.model, fails=op.spec.fails, error=op.spec.error))


class FakeLoad(Job):
    """Implements ``PendingLoad``."""

    num_bytes = 7

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self.model: FakeModel | None = None

    def wait(self) -> str:
        plan = super().wait()
        self.model = FakeModel()
        return plan


@dataclass(frozen=True)
class Spec:
    fails: str = ""
    error: Exception = LATE_ERROR


def worker_of(*names: str) -> Worker:
    worker = Worker()
    worker.install(Spec, FakeLoader())
    for name in names:
        worker.execute(Load(model=name, spec=Spec()))
    return worker


def recovered(worker: Worker) -> list[int]:
    return [model.num_recovered for model in worker._models.values()]  # type: ignore[attr-defined]


def run(worker: Worker, op: Op[Any]) -> None:
    pending = worker.begin(op)
    pending.advance()
    pending.wait()


@pytest.mark.parametrize("fails", ["begin", "advance", "wait"])
@pytest.mark.parametrize("error", [LATE_ERROR, OutOfMemoryError("no memory")])
def test_all_models_recover_wherever_the_device_fails(fails: str, error: Exception) -> None:
    error.__cause__ = None if error is LATE_ERROR else LATE_ERROR
    worker = worker_of("a", "b")
    before = worker.begin(Work(model="a"))
    with pytest.raises(type(error)):
        run(worker, Work(model="b", fails=fails, error=error))
    assert recovered(worker) == [1, 1]
    assert worker.faults.count == 1
    # An op that waits for each of its stages has the results that it waited for.
    assert before.wait() == "done"
    assert recovered(worker) == [1, 1]


@pytest.mark.parametrize("reason", REASONS)
def test_every_failure_of_a_command_buffer_comes_late(reason: str) -> None:
    worker = worker_of("a", "b")
    error = RuntimeError(f"[METAL] Command buffer execution failed: {reason}.")
    with pytest.raises(RuntimeError):
        run(worker, Work(model="b", fails="wait", error=error))
    assert recovered(worker) == [1, 1]


@pytest.mark.parametrize("fails", ["advance", "wait"])
def test_a_load_may_hear_of_it_too(fails: str) -> None:
    worker = worker_of("a")
    pending: Any = worker.begin(Load(model="b", spec=Spec(fails)))
    assert pending.num_bytes == 7
    if fails == "wait":
        pending.advance()
    with pytest.raises(RuntimeError, match="Insufficient"):
        getattr(pending, fails)()
    assert recovered(worker) == [1]


@pytest.mark.parametrize(
    "error", [RuntimeError("[malloc] Unable to allocate"), MemoryError(), ValueError("a bug")]
)
def test_an_error_that_came_at_once_is_its_own_ops(error: Exception) -> None:
    worker = worker_of("a", "b")
    with pytest.raises(type(error)):
        run(worker, Work(model="b", fails="wait", error=error))
    assert recovered(worker) == [0, 0]
    assert worker.faults.count == 0


def test_a_refusal_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda: drained.append("synchronize"))
    worker = worker_of("a")
    with pytest.raises(InvalidRequestError):
        run(worker, Work(model="a", fails="begin", error=InvalidRequestError("no")))
    assert not drained
    with pytest.raises(MemoryError):
        run(worker, Work(model="a", fails="begin", error=MemoryError()))
    assert drained == ["synchronize"]


def test_the_error_that_the_device_kept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # An op fails at once. What was in flight had failed too, which MLX raises when it is asked.
    calls: list[str] = []

    def synchronize() -> None:
        calls.append("synchronize")
        raise LATE_ERROR

    monkeypatch.setattr(mx, "synchronize", synchronize)
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append("clear_cache"))
    assert drain_device() is LATE_ERROR
    worker = worker_of("a")
    with pytest.raises(RuntimeError, match="Unable"):
        run(worker, Work(model="a", fails="wait", error=RuntimeError("Unable to allocate")))
    assert recovered(worker) == [1]
    assert calls == ["synchronize", "clear_cache"] * 2


@pytest.mark.parametrize("error", [RuntimeError("Unable to allocate"), LATE_ERROR])
def test_an_error_that_a_model_noted_is_not_noted_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append("synchronize"))
    worker = worker_of("a", "b")

    def note_and_fail() -> None:
        with worker._recovering():  # type: ignore[attr-defined]
            worker.faults.note(error)
            raise error

    with pytest.raises(RuntimeError):
        note_and_fail()
    assert calls == ["synchronize"]
    assert recovered(worker) == ([1, 1] if error is LATE_ERROR else [0, 0])


def test_a_host_without_memory_has_not_lost_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    worker = worker_of("a")
    monkeypatch.setattr(mx, "eval", fail)
    with pytest.raises(RuntimeError, match="no room"):
        run(worker, Work(model="a", fails="wait", error=RuntimeError("no room")))
    worker.faults.check()


def test_ranks_raise_what_failed_and_not_what_a_lost_device_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(mx, "clear_cache", fail)
    faults = DeviceFaults(may_wait=False)
    faults.note(RuntimeError("the step failed"))
    assert faults.num_noted == 1


@pytest.mark.parametrize("num_failures", [0, 1, 99])
def test_a_device_that_computes_nothing_any_more_is_lost(
    num_failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access of memory, every later call of CUDA in the process fails."""
    left = [num_failures]

    def fail(*_: object) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("an illegal memory access was encountered")

    worker = worker_of("a")
    error = RuntimeError("cudaGraphLaunch failed: an illegal memory access was encountered")
    names = ("eval",) if num_failures < 2 else ("eval", "synchronize", "clear_cache")
    for name in names:
        monkeypatch.setattr(mx, name, fail)
    with pytest.raises(RuntimeError):
        run(worker, Work(model="a", fails="wait", error=error))
    monkeypatch.undo()
    if num_failures > 1:
        # It stays lost, and all models have heard of it.
        assert recovered(worker) == [1]
        with pytest.raises(DeviceLostError, match="illegal memory access"):
            worker.faults.check()
    else:
        worker.faults.check()
