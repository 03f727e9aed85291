"""Batches of inputs: everything runs once, within the budget, the longest waiting first."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.pooling.queue import FREE_PADDING, MAX_PADDING_SHARE, PoolingQueue, WaitingInput
from mlx_parallm.types.pooling import PoolingInput, PoolRequest

INPUTS = st.lists(st.integers(1, 200).map(lambda n: tuple(range(n))), min_size=1, max_size=30)


def request(request_id: str, *inputs: tuple[int, ...]) -> PoolRequest:
    return PoolRequest(request_id=request_id, model="m", inputs=tuple(map(PoolingInput, inputs)))


def drained(queue: PoolingQueue, max_tokens: int) -> list[list[WaitingInput]]:
    batches = []
    while len(queue):
        batches.append(queue.take(max_tokens))
    return batches


@given(st.lists(INPUTS, min_size=1, max_size=6), st.integers(1, 600))
def test_every_place_of_every_request_runs_once(
    requests: list[list[tuple[int, ...]]], max_tokens: int
) -> None:
    queue = PoolingQueue()
    for number, inputs in enumerate(requests):
        queue.add(request(str(number), *inputs))
    computed = {}
    for batch in drained(queue, max_tokens):
        lengths = [len(waiting.input.token_ids) for waiting in batch]
        assert lengths == sorted(lengths)
        assert len(batch) == 1 or len(batch) * max(lengths) <= max_tokens
        assert max(lengths) - min(lengths) <= max(FREE_PADDING, max(lengths) // MAX_PADDING_SHARE)
        for waiting in batch:
            for asker in waiting.askers:
                assert asker not in computed
                computed[asker] = waiting.input.token_ids
    wanted = {
        (str(number), place): item
        for number, inputs in enumerate(requests)
        for place, item in enumerate(inputs)
    }
    assert computed == wanted
    assert queue.take(max_tokens) == []


@given(INPUTS, st.integers(1, 600))
def test_the_longest_waiting_is_in_the_next_batch(
    inputs: list[tuple[int, ...]], max_tokens: int
) -> None:
    queue = PoolingQueue()
    queue.add(request("first", *inputs))
    waiting = list(dict.fromkeys(inputs))
    while waiting:
        batch = [taken.input.token_ids for taken in queue.take(max_tokens)]
        assert waiting[0] in batch
        waiting = [item for item in waiting if item not in batch]


def launch_and_tokens(launch: float) -> Callable[[int, int], float]:
    """Return the cost of batches whose launch costs as much as ``launch`` tokens."""
    return lambda count, length: launch + count * length


@given(INPUTS, st.integers(1, 600), st.integers(0, 2000))
def test_groups_of_other_lengths_join_where_that_costs_less(
    inputs: list[tuple[int, ...]], max_tokens: int, launch: int
) -> None:
    """Never more than the batches that there are without, and never dearer."""
    costs, counts = [], []
    for seconds in (None, launch_and_tokens(launch)):
        queue = PoolingQueue()
        queue.add(request("a", *inputs))
        batches = []
        while len(queue):
            batch = queue.take(max_tokens, seconds=seconds)
            batches.append([len(waiting.input.token_ids) for waiting in batch])
            assert len(batch) == 1 or len(batch) * max(batches[-1]) <= max_tokens
        assert sum(map(len, batches)) == len(set(inputs))
        costs.append(
            sum(launch + len(batch_lengths) * max(batch_lengths) for batch_lengths in batches)
        )
        counts.append(len(batches))
    assert counts[1] <= counts[0]
    assert costs[1] <= costs[0] + launch


def test_one_batch_takes_all_where_padding_costs_less_than_launches() -> None:
    lengths = (1, 30, 60, 120)
    for launch, wanted in ((0, 4), (28, 4), (30, 3), (269, 1)):
        queue = PoolingQueue()
        queue.add(request("a", *(tuple(range(length)) for length in lengths)))
        batches = 0
        while len(queue):
            queue.take(1000, seconds=launch_and_tokens(launch))
            batches += 1
        assert batches == wanted, launch


def test_no_part_of_a_group_joins_since_that_saves_no_launch() -> None:
    queue = PoolingQueue()
    texts = [(number, *range(7)) for number in range(1, 60)]
    queue.add(request("a", tuple(range(250)), *texts))
    (batch,) = [queue.take(512, seconds=launch_and_tokens(10_000))]
    assert len(batch) == 1
    assert len(queue.take(512, seconds=launch_and_tokens(10_000))) == 59


def test_groups_that_join_bring_no_more_adapters_than_there_may_be() -> None:
    for max_adapters, wanted in ((1, 1), (2, 2)):
        queue = PoolingQueue()
        for name, length in (("a", 5), ("b", 90)):
            item = PoolingInput(tuple(range(length)), adapter=name)
            queue.add(PoolRequest(request_id=name, model="m", inputs=(item,)))
        batch = queue.take(1000, max_adapters=max_adapters, seconds=launch_and_tokens(1e6))
        assert len(batch) == wanted


def test_an_input_that_several_ask_for_runs_once() -> None:
    queue = PoolingQueue()
    queue.add(request("a", (1, 2), (3,), (1, 2)))
    queue.add(request("b", (1, 2)))
    assert len(queue) == 2
    (batch,) = drained(queue, 100)
    assert [waiting.askers for waiting in batch] == [[("a", 1)], [("a", 0), ("a", 2), ("b", 0)]]


@given(INPUTS, INPUTS)
def test_what_is_removed_does_not_run_and_others_do(
    kept: list[tuple[int, ...]], removed: list[tuple[int, ...]]
) -> None:
    queue = PoolingQueue()
    queue.add(request("removed", *removed))
    queue.add(request("kept", *kept))
    queue.remove(request("removed", *removed))
    askers = [
        asker for batch in drained(queue, 400) for waiting in batch for asker in waiting.askers
    ]
    assert sorted(askers) == sorted(("kept", place) for place in range(len(kept)))
