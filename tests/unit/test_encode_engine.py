"""An encoder's engine: answers go to whoever asked, and failures to nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from mlx_parallm.encode import EncodeInput, EncodeRequest, EncodeResults, EncoderInfo
from mlx_parallm.engine.encode_engine import EncodeEngine
from mlx_parallm.engine.encoder_metrics import EncoderFamilies, EncoderMetrics
from mlx_parallm.errors import OverloadedError, StepError

POISON, NAN = 666, 777


class SumEncoder:
    """Its vector of an input is the sum and the length."""

    info = EncoderInfo(
        architecture="sum",
        vocab_size=1000,
        max_model_len=64,
        dims=2,
        dtype="float32",
        weight_bytes=0,
    )

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, ...]]] = []

    def run(self, inputs: Sequence[EncodeInput]) -> list[np.ndarray]:
        batch = [one.token_ids for one in inputs]
        self.batches.append(batch)
        if any(POISON in one for one in batch):
            raise RuntimeError("out of memory")
        rows = [[np.nan if NAN in one else sum(one), len(one)] for one in batch]
        return list(np.array(rows, dtype=np.float32))

    def release(self) -> None:
        self.batches.clear()


def make(
    max_waiting: int = 100, cache_bytes: int = 0
) -> tuple[EncodeEngine, SumEncoder, dict[str, Any]]:
    encoder = SumEncoder()
    engine = EncodeEngine(
        encoder,
        max_tokens=64,
        max_tokens_beside=4,
        max_waiting=max_waiting,
        metrics=EncoderMetrics(EncoderFamilies(CollectorRegistry()), "m"),
        cache_bytes=cache_bytes,
    )
    return engine, encoder, {}


def ask(engine: EncodeEngine, answers: dict[str, Any], name: str, *inputs: tuple[int, ...]) -> None:
    request = EncodeRequest(request_id=name, model="m", inputs=tuple(map(EncodeInput, inputs)))
    engine.add(request, lambda found: answers.__setitem__(name, plain(found)))


def plain(found: Any) -> Any:
    return [one.tolist() for one in found] if isinstance(found, list) else found


def run(engine: EncodeEngine, *, beside: bool = False) -> None:
    while engine.has_work():
        engine.step(beside=beside)


def test_vectors_are_in_the_order_of_the_inputs() -> None:
    engine, encoder, answers = make()
    ask(engine, answers, "a", (5, 6, 7), (1,), (5, 6, 7))
    ask(engine, answers, "b", (1,), (2, 2))
    run(engine)
    assert answers["a"] == [[18, 3], [1, 1], [18, 3]]
    assert answers["b"] == [[1, 1], [4, 2]]
    assert sorted(one for batch in encoder.batches for one in batch) == [(1,), (2, 2), (5, 6, 7)]


def test_batches_are_small_beside_streams() -> None:
    engine, encoder, answers = make()
    ask(engine, answers, "a", *[(n, n) for n in range(8)])
    run(engine, beside=True)
    assert [len(batch) for batch in encoder.batches] == [2, 2, 2, 2]
    assert len(answers["a"]) == 8


def test_a_failed_batch_ends_the_requests_in_it() -> None:
    engine, _, answers = make()
    ask(engine, answers, "bad", (POISON,), tuple(range(60)))
    run(engine)
    ask(engine, answers, "good", (1, 2))
    run(engine)
    assert isinstance(answers["bad"], StepError)
    assert answers["good"] == [[3, 2]]


def test_vectors_that_are_no_numbers_end_their_request_alone() -> None:
    engine, _, answers = make()
    ask(engine, answers, "bad", (NAN,), (3,))
    ask(engine, answers, "good", (3,), (4,))
    run(engine)
    assert isinstance(answers["bad"], StepError)
    assert answers["good"] == [[3, 1], [4, 1]]


def test_an_aborted_request_is_not_computed() -> None:
    engine, encoder, answers = make()
    ask(engine, answers, "gone", (1,), (2,))
    ask(engine, answers, "here", (2,))
    assert engine.abort("gone")
    assert not engine.abort("gone")
    run(engine)
    assert list(answers) == ["here"]
    assert encoder.batches == [[(2,)]]


def test_results_are_kept_and_say_so() -> None:
    engine, encoder, answers = make(cache_bytes=10_000)
    given: list[EncodeResults] = []
    ask(engine, answers, "a", (1,), (2,), (1,))
    run(engine)
    request = EncodeRequest(
        request_id="b", model="m", inputs=(EncodeInput((2,)), EncodeInput((3,)))
    )
    engine.add(request, given.append)
    assert not given
    run(engine)
    engine.add(replace(request, request_id="c"), given.append)
    assert not engine.has_work()
    assert [plain(one) for one in given] == [[[2, 1], [3, 1]]] * 2
    assert [one.cache_hits for one in given] == [(True, False), (True, True)]
    assert sorted(one for batch in encoder.batches for one in batch) == [(1,), (2,), (3,)]
    assert not engine.abort("c")


def test_shared_results_cannot_be_written() -> None:
    engine, _, _ = make(cache_bytes=10_000)
    given: list[EncodeResults] = []
    engine.add(EncodeRequest(request_id="a", model="m", inputs=(EncodeInput((1,)),)), given.append)
    run(engine)
    with pytest.raises(ValueError, match="read-only"):
        given[0][0][0] = 5


def test_failures_and_nans_are_not_kept() -> None:
    engine, encoder, answers = make(cache_bytes=10_000)
    for name, wrong in (("a", POISON), ("b", NAN)):
        for attempt in range(2):
            ask(engine, answers, f"{name}{attempt}", (wrong,))
            run(engine)
            assert isinstance(answers[f"{name}{attempt}"], StepError)
    assert len(encoder.batches) == 4


def test_kept_inputs_need_no_room_in_the_queue() -> None:
    engine, _, answers = make(max_waiting=2, cache_bytes=10_000)
    ask(engine, answers, "a", (1,), (2,))
    run(engine)
    ask(engine, answers, "b", (3,), (4,))
    ask(engine, answers, "c", (1,), (2,))
    assert len(answers["c"]) == 2


def test_a_full_queue_refuses_but_one_large_request_runs() -> None:
    engine, _, answers = make(max_waiting=2)
    ask(engine, answers, "large", (1,), (2,), (3,))
    ask(engine, answers, "late", (4,))
    assert isinstance(answers["late"], OverloadedError)
    run(engine)
    assert len(answers["large"]) == 3
