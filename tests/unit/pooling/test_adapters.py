"""Adapters of a pooling engine: each request meets the bytes that its name had when it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.config import AdapterConfig, EngineConfig, SchedulerConfig
from mlx_parallm.engine.adapter_staging import AdapterStaging
from mlx_parallm.engine.device import DeviceAdapters
from mlx_parallm.engine.policies import AdapterInfo
from mlx_parallm.pooling.adapters import EncoderAdapterSet
from mlx_parallm.pooling.queue import PoolingQueue
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    RequestAbortedError,
)
from mlx_parallm.types.pooling import OwnHead, PoolingInput
from tests.sum_encoder import RepliedEngine, SumEncoder, SumJob, engine_of, request_of, shift_of
from tests.version_harness import SlotRecord, adapter

MAX_LORAS = 2
Answers = dict[str, Any]


class AdaptedSums(SumEncoder):
    """Reads what is in the slots that a batch names."""

    def __init__(self, store: SlotRecord) -> None:
        super().__init__()
        self._store = store
        self.most = 0

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> SumJob:
        self.most = max(self.most, len(slots))
        self._store.place({slot: content for content, slot in slots.items()})
        contents = {content: self._store.slots[slot] for content, slot in slots.items()}
        in_slots = [
            item if item.adapter is None else replace(item, adapter=contents[item.adapter])
            for item in inputs
        ]
        return super().begin(in_slots, dict.fromkeys(contents.values(), 0))


def make(max_loaded: int = 8) -> tuple[RepliedEngine, EncoderAdapterSet, SlotRecord, AdaptedSums]:
    store = SlotRecord()
    config = EngineConfig(
        scheduler=SchedulerConfig(max_loras=MAX_LORAS),
        adapters=AdapterConfig(max_loaded=max_loaded),
    )
    adapters = EncoderAdapterSet("m", cast("DeviceAdapters", store), config)
    encoder = AdaptedSums(store)
    return engine_of(encoder, cache_bytes=10_000, adapters=adapters), adapters, store, encoder


def load(adapters: EncoderAdapterSet, name: str, number: int) -> None:
    adapters.policies.load(adapter(name, f"digest-{number}", None))


def ask(
    engine: RepliedEngine,
    answers: Answers,
    key: str,
    *inputs: tuple[int, ...],
    name: str | None = None,
    head: OwnHead | None = None,
) -> None:
    def reply(answer: Any) -> None:
        answers[key] = (
            [vector.tolist() for vector in answer] if isinstance(answer, list) else answer
        )

    engine.add(replace(request_of(key, *inputs, adapter=name), head=head), reply)


def run(engine: RepliedEngine) -> None:
    while engine.has_work():
        engine.step()


def test_the_same_name_with_other_bytes_never_meets_old_results() -> None:
    engine, adapters, store, encoder = make()
    answers: Answers = {}
    load(adapters, "a", 1)
    ask(engine, answers, "first", (1, 2), name="a")
    # It waits, and it keeps its bytes.
    load(adapters, "a", 2)
    ask(engine, answers, "second", (1, 2), name="a")
    ask(engine, answers, "base", (1, 2))
    assert store.contents == {"digest-1", "digest-2"}
    run(engine)
    assert answers == {"first": [[1003, 2]], "second": [[2003, 2]], "base": [[3, 2]]}
    assert store.contents == {"digest-2"}
    assert len(encoder.batches) == 1
    # Under whatever name, kept results are those of the bytes.
    load(adapters, "other", 2)
    ask(engine, answers, "third", (1, 2), name="other")
    assert answers["third"] == [[2003, 2]]
    assert not engine.has_work()


def test_what_is_being_computed_is_shared_by_equal_bytes_only() -> None:
    engine, adapters, _, encoder = make()
    answers: Answers = {}
    load(adapters, "a", 1)
    load(adapters, "b", 1)
    load(adapters, "c", 2)
    ask(engine, answers, "a", (5,) * 9, name="a")
    engine.step(0.0)
    for name in ("b", "c"):
        ask(engine, answers, name, (5,) * 9, name=name)
    run(engine)
    assert [answers[name][0][0] for name in "abc"] == [1045, 1045, 2045]
    assert [len(batch) for batch in encoder.batches] == [1, 1]


def test_a_request_that_was_made_for_another_head_is_refused() -> None:
    engine, adapters, store, _ = make()
    heads = {number: OwnHead(("classify",), number) for number in (2, 3)}
    answers: Answers = {}
    for number, head in heads.items():
        store.heads[f"digest-{number}"] = head
        load(adapters, "a", number)
        for name, own in {"none": None, **heads}.items():
            ask(engine, answers, f"{number}-{name}", (1, 2), name="a", head=own)
    run(engine)
    good = {"2-2": [[2003, 2]], "3-3": [[3003, 2]]}
    assert {key: answer for key, answer in answers.items() if isinstance(answer, list)} == good
    refused = [answer for key, answer in answers.items() if key not in good]
    assert [type(answer) for answer in refused] == [ModelLoadingError] * 4
    # They left nothing open.
    assert store.contents == {"digest-3"}


def test_unknown_names_and_those_that_are_gone_are_refused() -> None:
    engine, adapters, store, _ = make()
    answers: Answers = {}
    load(adapters, "a", 1)
    ask(engine, answers, "here", (1,), name="a")
    adapters.policies.unload("a")
    ask(engine, answers, "gone", (1,), name="a")
    assert isinstance(answers["gone"], ModelNotFoundError)
    assert store.contents == {"digest-1"}
    assert adapters.num_running("digest-1") == 1
    assert engine.abort("here")
    assert store.contents == set()
    assert adapters.num_running("digest-1") == 0


def test_adapters_without_a_place_wait_for_the_next_batch() -> None:
    engine, adapters, _, encoder = make()
    answers: Answers = {}
    for number in range(1, 7):
        load(adapters, f"a{number}", number)
        ask(engine, answers, f"a{number}", (1, number), name=f"a{number}")
    ask(engine, answers, "base", (1, 1))
    run(engine)
    for number in range(1, 7):
        assert answers[f"a{number}"] == [[1001 * number + 1, 2]]
    assert answers["base"] == [[2, 2]]
    assert encoder.most == MAX_LORAS + 1


def test_batches_keep_a_slot_while_adapters_are_put() -> None:
    engine, adapters, _, encoder = make()
    answers: Answers = {}
    for number in range(1, 4):
        load(adapters, f"a{number}", number)
    uploads = [adapter(f"b{n}", f"digest-{n}", None) for n in range(4, 8)]
    stagings = [AdapterStaging(upload, adapters.policies) for upload in uploads]
    loaded = [advance(staging) for staging in stagings]
    # What found no slot is loaded without one, until a batch names it.
    assert [info is None for info in loaded] == [True, True, False, False]
    for number in range(1, 4):
        ask(engine, answers, f"a{number}", (number,), name=f"a{number}")
    run(engine)
    assert [answers[f"a{number}"][0][0] for number in range(1, 4)] == [1001, 2002, 3003]
    assert encoder.most == 1
    for staging in stagings[:2]:
        assert advance(staging) is not None
    ask(engine, answers, "b5", (1,), name="b5")
    run(engine)
    assert answers["b5"] == [[5001, 1]]


def advance(staging: AdapterStaging) -> AdapterInfo | None:
    """Put the next part; return what is loaded once all is there."""
    if staging.advance():
        return None
    info = staging.commit()
    staging.drop()
    return info


def test_an_evicted_model_comes_back_with_its_adapters() -> None:
    engine, adapters, store, encoder = make()
    answers: Answers = {}
    load(adapters, "a", 1)
    ask(engine, answers, "before", (1,), name="a")
    run(engine)
    engine.release()
    assert store.slots == {}
    assert not adapters.policies.infos()[0].is_resident
    again = engine_of(encoder, adapters=adapters)
    ask(again, answers, "after", (1,), name="a")
    run(again)
    assert answers["before"] == answers["after"] == [[1001, 1]]


def test_one_that_does_not_fit_leaves_the_one_before() -> None:
    engine, adapters, store, _ = make()
    answers: Answers = {}
    load(adapters, "a", 1)
    with pytest.raises(InvalidRequestError):
        adapters.policies.load(adapter("a", "bad", None))
    ask(engine, answers, "a", (1,), name="a")
    run(engine)
    assert answers["a"] == [[1001, 1]]
    assert store.contents == {"digest-1"}


NAMES = ("a", "b", "c")
INPUTS = st.lists(st.integers(1, 5).map(lambda n: tuple(range(n))), min_size=1, max_size=4)
ACTIONS = st.one_of(
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.integers(1, 5)),
    st.tuples(st.just("unload"), st.sampled_from(NAMES), st.none()),
    st.tuples(st.just("ask"), st.sampled_from((*NAMES, None)), INPUTS),
    st.tuples(st.just("step"), st.none(), st.sampled_from((None, 0.0))),
    st.tuples(st.just("ask"), st.sampled_from(NAMES[:2]), st.just([(7, 8)])),
    st.tuples(st.just("abort"), st.none(), st.integers(0, 40)),
)


@given(st.lists(ACTIONS, min_size=5, max_size=40))
def test_every_answer_is_of_the_bytes_at_its_admission(actions: list[tuple[Any, Any, Any]]) -> None:
    engine, adapters, store, encoder = make()
    answers: Answers = {}
    wanted: Answers = {}
    loaded = {name: f"digest-{number}" for number, name in enumerate(NAMES[:2])}
    for number, name in enumerate(loaded):
        load(adapters, name, number)
    for number, (kind, name, value) in enumerate(actions):
        if kind == "load":
            load(adapters, name, value)
            loaded[name] = f"digest-{value}"
        elif kind == "unload" and name in loaded:
            adapters.policies.unload(name)
            del loaded[name]
        elif kind == "ask":
            ask(engine, answers, str(number), *value, name=name)
            if name is not None and name not in loaded:
                assert isinstance(answers.pop(str(number)), ModelNotFoundError)
            else:
                shift = shift_of(loaded.get(name or ""))
                wanted[str(number)] = [
                    [sum(token_ids) + shift, len(token_ids)] for token_ids in value
                ]
        elif kind == "step" and engine.has_work():
            engine.step(value)
        elif kind == "abort" and engine.abort(str(value)):
            del wanted[str(value)]
            assert isinstance(answers.pop(str(value)), RequestAbortedError)
    run(engine)
    assert answers == wanted
    assert store.contents == set(loaded.values())
    assert encoder.most <= MAX_LORAS + 1
    assert adapters.adapters.num_used == 0


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 4)), min_size=1), st.integers(0, 3))
def test_a_batch_has_no_more_adapters_than_there_are_slots(
    inputs: list[tuple[int, int]], most: int
) -> None:
    queue = PoolingQueue()
    for number, (length, which) in enumerate(inputs):
        item = PoolingInput((number, *range(length)), adapter=f"digest-{which}" if which else None)
        queue.add(replace(request_of(str(number), (0,)), inputs=(item,)))
    while len(queue):
        batch = queue.take(100, max_adapters=most)
        adapters = {waiting.input.adapter for waiting in batch} - {None}
        assert len(adapters) <= most
        if not batch:
            # The one that waits longest has an adapter, for which there is no slot.
            assert not most
            break
