"""The engine of a net: who shares a forward, whose sequence goes on, and what fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import generate_latest
from typing_extensions import override

from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import Policies
from mlx_parallm.engine.turns import SHORT_S, TurnClass, Turns, TurnTaker
from mlx_parallm.nets.engine import MAX_ROWS, MAX_WAITING, ForwardCost, NetEngine
from mlx_parallm.nets.metrics import NetMetrics
from mlx_parallm.nets.states import StateLimits
from mlx_parallm.types.errors import (
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    RequestAbortedError,
    StepError,
)
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.nets import (
    ANY,
    ActParams,
    NetEvent,
    NetRequest,
    NetSignature,
    SequenceUse,
    TensorSpec,
)
from mlx_parallm.types.work import Event
from mlx_parallm.worker.ops import NetBatch, NetOutputs, Unload

SIGNATURE = NetSignature(
    inputs=(TensorSpec("x", "float32", (ANY, ANY, 1)),),
    outputs=(TensorSpec("y", "float32", (ANY, ANY, 1)),),
    states=(TensorSpec("sum.h", "float32", (ANY, 1)),),
)


class SumWorker:
    """Adds up each row's numbers over time; a number of 13 breaks the forward."""

    def __init__(self) -> None:
        self.batches: list[NetBatch] = []

    def execute(self, op: Any) -> Any:
        if isinstance(op, Unload):
            return None
        self.batches.append(op)
        x = op.inputs["x"]
        if (x == 13).any():
            raise ValueError("13")
        before = np.zeros((len(x), 1)) if op.states is None else op.states["sum.h"]
        sums = before[:, None] + np.cumsum(x, axis=1)
        return NetOutputs(outputs={"y": sums}, states={"sum.h": sums[:, -1]})


class Served:
    def __init__(self, worker: SumWorker | None = None, **settings: Any) -> None:
        self.worker, self.families = worker or SumWorker(), MetricFamilies()
        self.policies = Policies(model="n")
        self.engine = NetEngine(
            cast("Any", self.worker),
            "n",
            SIGNATURE,
            policies=self.policies,
            metrics=NetMetrics(self.families, "n"),
            **settings,
        )

    def ask(self, name: str, *numbers: float, rows: int = 1, **fields: Any) -> None:
        x = np.repeat(np.array(numbers, np.float32)[None, :, None], rows, axis=0)
        request = NetRequest(request_id=name, model="n", inputs={"x": x}, num_rows=rows, **fields)
        assert self.engine.submit(request) == ()

    def answers(self) -> dict[str, Any]:
        """Run until nothing waits; the last number of each answer, or its error."""
        answers: dict[str, Any] = {}
        while self.engine.has_work():
            for event in self.engine.step() or ():
                if isinstance(event, ErrorEvent):
                    answers[event.request_id] = event.error
                else:
                    answers[event.request_id] = float(event.results.outputs["y"][0, -1, 0])
        return answers


def of(name: str, owner: str = "a", **flags: bool) -> SequenceUse:
    return SequenceUse(owner=owner, sequence_id=name, **flags)


def test_all_that_waits_shares_a_forward() -> None:
    served = Served()
    numbers = [number for number in range(39) if number != 13]
    for number in numbers:
        served.ask(str(number), number)
    assert served.answers() == {str(number): float(number) for number in numbers}
    assert [len(batch.inputs["x"]) for batch in served.worker.batches] == [38]


def test_a_forward_that_fails_fails_its_requests_alone() -> None:
    served = Served()
    served.ask("bad", 13)
    assert isinstance(served.answers()["bad"], StepError)
    served.ask("good", 1)
    assert served.answers() == {"good": 1.0}


def test_results_that_are_not_finite_fail_alone() -> None:
    served = Served()
    served.ask("bad", float("nan"))
    served.ask("good", 1)
    answers = served.answers()
    assert answers["good"] == 1.0
    assert "NaN" in str(answers["bad"])


@pytest.mark.parametrize(
    ("sent", "where"),
    [
        ({}, "inputs.x"),
        ({"act": ActParams()}, "observations.x"),
        ({"states": {"sum.h": np.full((1, 1), 3e38)}}, "hidden_states.sum.h"),
    ],
)
def test_numbers_that_are_too_large_for_the_net_are_refused(
    sent: dict[str, Any], where: str
) -> None:
    class Overflowing(SumWorker):
        @override
        def execute(self, op: Any) -> Any:
            results = super().execute(op)
            with np.errstate(over="ignore"):
                return replace(results, outputs={"y": results.outputs["y"].astype(np.float16)})

    served = Served(Overflowing())
    served.ask("large", -1e38, **sent)
    served.ask("usual", 1, act=sent.get("act"))
    answers = served.answers()
    assert answers["usual"] == 1.0
    assert isinstance(answers["large"], InvalidRequestError)
    assert str(answers["large"]).startswith(f"{where} has numbers up to ")
    assert answers["large"].param == where.partition(".")[0]


def test_other_numbers_of_times_run_apart() -> None:
    served = Served()
    served.ask("one", 1)
    served.ask("three", 1, 2, 3)
    served.ask("other", 2)
    assert served.answers() == {"one": 1.0, "other": 2.0, "three": 6.0}
    assert [batch.inputs["x"].shape[:2] for batch in served.worker.batches] == [(2, 1), (1, 3)]


def test_a_sequence_runs_in_order_even_if_all_of_it_waits() -> None:
    served = Served()
    served.ask("1", 1, sequence=of("s", is_start=True))
    served.ask("2", 2, sequence=of("s"))
    served.ask("3", 3, 4, sequence=of("s", is_end=True))
    served.ask("x", 5, sequence=of("t", is_start=True))
    served.ask("4", 1, sequence=of("s"))
    answers = served.answers()
    assert isinstance(answers.pop("4"), ConflictError)
    assert answers == {"1": 1.0, "x": 5.0, "2": 3.0, "3": 10.0}


def test_no_client_sees_the_state_of_another() -> None:
    served = Served()
    served.ask("1", 1, sequence=of("s", is_start=True))
    served.ask("2", 1, sequence=of("s", "b"))
    assert isinstance(served.answers()["2"], ConflictError)


def test_a_failed_forward_leaves_the_state_before_it() -> None:
    served = Served()
    served.ask("1", 1, sequence=of("s", is_start=True))
    served.answers()
    served.ask("2", 13, sequence=of("s"))
    assert isinstance(served.answers()["2"], StepError)
    served.ask("3", 2, sequence=of("s"))
    assert served.answers() == {"3": 3.0}


def test_an_answer_says_that_other_weights_made_its_state() -> None:
    served = Served()
    seen: list[tuple[str, bool]] = []
    for number, version in enumerate(["v1", "v1", "v2", "v2"]):
        served.policies.base.version = replace(served.policies.base.version, label=version)
        served.ask("r", 1, sequence=of("s", is_start=not number))
        (event,) = list(served.engine.step() or ())
        assert isinstance(event, NetEvent)
        seen.append((event.results.version, event.results.has_other_weights))
    assert seen == [("v1", False), ("v1", False), ("v2", True), ("v2", True)]


def test_large_requests_run_alone_and_the_queue_is_bounded() -> None:
    served = Served()
    served.ask("all", 1, rows=MAX_ROWS)
    served.ask("one", 2)
    served.answers()
    assert [len(batch.inputs["x"]) for batch in served.worker.batches] == [MAX_ROWS, 1]
    for number in range(MAX_WAITING // MAX_ROWS):
        served.ask(str(number), 1, rows=MAX_ROWS)
    with pytest.raises(OverloadedError):
        served.ask("more", 1)
    assert served.engine.num_requests == MAX_WAITING // MAX_ROWS


def test_ended_requests_do_not_run() -> None:
    served = Served()
    served.ask("aborted", 1)
    served.ask("cancelled", 1)
    assert served.engine.abort("aborted")
    (event,) = served.engine.cancel("cancelled")
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, RequestAbortedError)
    assert not served.engine.abort("aborted")
    assert not served.engine.has_work()


def test_metrics_count_rows_forwards_and_states() -> None:
    served = Served(limits=StateLimits(count=2))
    for number in range(3):
        served.ask(str(number), 1, rows=2, sequence=of(str(number), is_start=True))
    served.answers()
    text = generate_latest(served.families.registry).decode()
    for line in (
        'mlx_parallm:net_requests_total{model_name="n"} 3.0',
        'mlx_parallm:net_rows_total{model_name="n"} 6.0',
        'mlx_parallm:net_forward_rows_count{model_name="n"} 1.0',
        'mlx_parallm:net_sequences{model_name="n"} 1.0',
        'mlx_parallm:net_state_bytes{model_name="n"} 16.0',
        'mlx_parallm:net_dropped_sequences_total{model_name="n"} 2.0',
    ):
        assert line in text


def test_costs_are_bounded_by_those_of_other_sizes() -> None:
    cost = ForwardCost()
    assert cost.seconds(1, 1) == float("inf")
    cost.observe(8, 1, 0.004)
    assert cost.seconds(1, 1) == 0.004
    cost.observe(1, 1, 0.001)
    assert cost.seconds(1, 1) == 0.001
    cost.observe(1, 1, 0.101)
    assert 0.001 < cost.seconds(1, 1) < 0.0011
    cost.observe(1, 1, 0.001)
    assert cost.seconds(1, 1) == 0.001
    for _ in range(20):
        cost.observe(1, 1, 0.002)
    assert cost.seconds(1, 1) == 0.002


def test_costs_of_new_sizes_grow_with_rows_and_times() -> None:
    cost = ForwardCost()
    cost.observe(1, 1, 0.001)
    assert cost.seconds(4, 1) == 0.004
    assert cost.seconds(1, 4) == 0.004
    assert cost.seconds(4, 4) == 0.016
    # Many rows of one time say nothing about one row of many times.
    cost.observe(4096, 1, 0.002)
    assert cost.seconds(1, 4096) == 0.001 * 4096


class Stream(TurnTaker):
    """A model that decodes, and counts how often its step in flight was ended for others."""

    turn_class = TurnClass.STREAMS

    def __init__(self) -> None:
        self.num_settled = 0

    def has_work(self) -> bool:
        return True

    @property
    def waiting_since_s(self) -> float:
        return 0.0

    def step(self, within_s: float | None = None) -> Sequence[Event]:
        return ()

    def settle(self) -> Sequence[Event]:
        self.num_settled += 1
        return ()


def timed(step_s: float) -> Served:
    """Return an engine whose clock moves by a time for each step of a row."""
    now = [0.0]

    class TimedWorker(SumWorker):
        @override
        def execute(self, op: Any) -> Any:
            rows, times, _ = op.inputs["x"].shape
            now[0] += step_s * rows * times
            return super().execute(op)

    return Served(TimedWorker(), clock=lambda: now[0])


def test_a_long_chunk_takes_a_turn_though_single_steps_are_short() -> None:
    served, stream = timed(SHORT_S / 4), Stream()
    served.ask("first", 1)
    served.answers()
    turns = Turns(lambda events: None)
    served.ask("act", 1)
    turns.take([stream, served.engine])
    assert (stream.num_settled, served.engine.has_work()) == (0, False)
    served.ask("chunk", *range(20, 20 + 4096))
    assert served.engine.settles_others
    turns.take([stream, served.engine])
    assert (stream.num_settled, served.engine.has_work()) == (1, False)


def test_joined_chunks_are_bounded_by_rows_times_their_times() -> None:
    served = Served()
    for number in range(10):
        served.ask(str(number), *([1] * (MAX_ROWS // 4)))
    # A request is computed however long it is.
    served.ask("long", *([1] * 1000), rows=64)
    assert len(served.answers()) == 11
    shapes = [batch.inputs["x"].shape[:2] for batch in served.worker.batches]
    assert shapes == [(4, 1024), (4, 1024), (2, 1024), (64, 1000)]


def test_joined_chunks_are_bounded_by_what_streams_wait_for() -> None:
    served = timed(0.001)
    served.ask("first", 1, 1)
    served.answers()
    for number in range(8):
        served.ask(str(number), 1, 1)
    num_rows: list[int] = []
    for within_s in (0.0, 0.005, None):
        served.engine.step(within_s)
        num_rows.append(len(served.worker.batches[-1].inputs["x"]))
    assert num_rows == [1, 2, 5]
