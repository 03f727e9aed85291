"""Rank 0 writes uploads to the log, and ends all ranks if sharing them fails."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.distributed.leader import LeadingWorker
from mlx_parallm.distributed.log import LeaderLog
from mlx_parallm.types.errors import InvalidRequestError, RankLostError
from mlx_parallm.types.step import ScheduledBatch, ScheduledSequence
from mlx_parallm.worker.device.faults import LATE
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.shared_tensors import LARGE_BYTES_OF, SharedTensor
from mlx_parallm.worker.ops import (
    AddAdapter,
    DropPrepared,
    Load,
    Pending,
    PrepareWeights,
    PutTensors,
    Step,
)
from mlx_parallm.worker.worker import Device

LARGE = LARGE_BYTES_OF["nccl"] + 4
TENSORS = {"large": HostTensor(np.full(LARGE, 7, np.uint8)), "small": HostTensor(np.ones(3))}


class FakeModel:
    """Keeps the tensors of the ops, and raises what it is given."""

    num_bytes, num_stages = 0, 1
    problem: Exception | None = None
    #: ``fails_in``: the call of a step that raises the problem.
    fails_in = ""

    def __init__(self) -> None:
        self.model = self
        self.tensors: dict[str, HostTensor] = {}

    def begin(self, op: Any, tensors: Any) -> Pending[Any]:
        """Return the pending op, which is complete."""
        if isinstance(tensors, Mapping) and not isinstance(op, DropPrepared):
            self.tensors = dict(tensors["h"])
        if isinstance(op, PrepareWeights) and self.problem is not None:
            raise self.problem
        if isinstance(op, Step):
            self._maybe_fail("begin")
        return self

    def _maybe_fail(self, call: str) -> None:
        if self.fails_in == call:
            assert self.problem is not None
            raise self.problem

    def advance(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Return the plan, or a verdict: there is none."""
        self._maybe_fail("wait")

    def recover(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


class FakeLoader:
    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def begin(self, op: Load, device: Device) -> Any:
        return self._model


class Log:
    """The other rank, which accepts everything."""

    def __init__(self) -> None:
        self.ops: list[Any] = []
        self.ends: list[str] = []

    def send(self, kind: int, payload: Any) -> int:
        self.ops.append(pickle.loads(pickle.dumps(payload)))
        return len(self.ops)

    def fail(self, reason: str) -> None:
        self.ends.append(reason)

    def replies(self, number: int) -> list[Any]:
        return [None]

    def begin(self, limit_s: float | None = None) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def worker(log: Log, model: FakeModel) -> LeadingWorker:
    """Return a worker with a model that two ranks share, and a large and a small tensor for it."""
    ranks = Ranks(0, 2, "nccl", mx.distributed.init())
    worker = LeadingWorker(ranks, LeaderLog(log, log, log.fail), (str,))
    worker.install(str, FakeLoader(model))
    worker.execute(Load(model="m", spec="spec"))
    worker.execute(PutTensors(model="m", handle="h", tensors=TENSORS))
    return worker


def test_numbers_of_large_tensors_do_not_travel_in_the_log(
    worker: LeadingWorker, log: Log, model: FakeModel
) -> None:
    sent = log.ops[-1].tensors
    assert isinstance(sent["large"], SharedTensor)
    assert sent["large"].shape == (LARGE,)
    assert not sent["large"].array.any()
    assert sent["small"].array.tolist() == [1, 1, 1]
    assert worker.execute(PrepareWeights(model="m", handle="h")) is None
    assert isinstance(model.tensors["large"], SharedTensor)
    assert model.tensors["large"].array is TENSORS["large"].array


def test_an_adapter_gets_its_numbers_in_host_memory(
    worker: LeadingWorker, model: FakeModel
) -> None:
    layout: Any = None
    worker.execute(AddAdapter(model="m", content="c", layout=layout, handle="h"))
    assert not isinstance(model.tensors["large"], SharedTensor)
    assert model.tensors["large"].array is TENSORS["large"].array


def test_a_refusal_drops_what_others_have_prepared(
    worker: LeadingWorker, log: Log, model: FakeModel
) -> None:
    model.problem = InvalidRequestError("does not fit")
    with pytest.raises(InvalidRequestError, match="does not fit"):
        worker.execute(PrepareWeights(model="m", handle="h"))
    assert log.ops[-1] == DropPrepared(model="m")
    assert log.ends == []


def test_a_rank_that_cannot_share_tensors_ends_all(
    worker: LeadingWorker, log: Log, model: FakeModel
) -> None:
    model.problem = RankLostError(0, "cannot share tensors: no memory")
    with pytest.raises(RankLostError):
        worker.execute(PrepareWeights(model="m", handle="h"))
    assert log.ends == ["Rank 0 cannot share tensors: no memory."]


def test_a_batch_that_cannot_be_encoded_ends_all(worker: LeadingWorker, log: Log) -> None:
    # Followers lack what the encoder took of it, and would misread the next batch.
    row = ScheduledSequence(seq_id=1, slot=0, start=0, token_ids=(1 << 64,), block_table=(3,))
    with pytest.raises(OverflowError):
        worker.begin(Step(model="m", batch=ScheduledBatch(step_id=1, sequences=(row,))))
    assert len(log.ends) == 1
    assert log.ends[0].startswith("a step failed on rank 0: OverflowError")


@pytest.mark.parametrize("problem", ["Unable to allocate", f"{LATE}: Insufficient Memory."])
@pytest.mark.parametrize("fails_in", ["begin", "wait"])
def test_a_step_that_fails_ends_all_without_waiting_for_the_device(
    worker: LeadingWorker,
    log: Log,
    model: FakeModel,
    monkeypatch: pytest.MonkeyPatch,
    fails_in: str,
    problem: str,
) -> None:
    # The device waits for the sum of a rank that is lost.
    def never_return(*_: Any) -> None:
        raise AssertionError("the device never ends")

    monkeypatch.setattr(mx, "synchronize", never_return)
    monkeypatch.setattr(mx, "eval", never_return)
    model.fails_in, model.problem = fails_in, RuntimeError(problem)
    row = ScheduledSequence(seq_id=1, slot=0, start=0, token_ids=(5,), block_table=(3,))
    with pytest.raises(RuntimeError, match=problem.split(":")[0].split("]")[-1]):
        worker.begin(Step(model="m", batch=ScheduledBatch(step_id=1, sequences=(row,)))).wait()
    assert log.ends == [f"a step failed on rank 0: RuntimeError: {problem}"]
