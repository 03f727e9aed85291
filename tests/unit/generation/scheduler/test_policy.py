"""Who runs, who waits, who is preempted, and who never shares."""

from __future__ import annotations

import pytest

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.running import RunningSet
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.types.errors import ContextLengthError, OverloadedError
from mlx_parallm.types.request import GenerateRequest, PolicyWeights, SamplingParams, WeightsVersion
from mlx_parallm.types.step import SampledToken, ScheduledBatch, StepOutput


def make_scheduler(num_blocks: int = 64, **limits: int | None) -> Scheduler:
    kv = KVCacheManager(num_blocks, 4, enable_prefix_caching=True)
    return Scheduler(SchedulerConfig(**limits), kv, max_model_len=128)  # type: ignore[arg-type]


def add(
    scheduler: Scheduler,
    name: str,
    length: int = 9,
    *,
    weights: PolicyWeights | None = None,
    **options: object,
) -> None:
    request = GenerateRequest(
        request_id=name,
        model="m",
        prompt_ids=tuple(range(length)),
        params=SamplingParams(max_tokens=64 if length < 60 else 8),
        **options,  # type: ignore[arg-type]
    )
    weights = weights or PolicyWeights()
    scheduler.add(request, seed=0, end_ids=frozenset(), weights=weights)


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    tokens = tuple(
        SampledToken(seq_id=row.seq_id, token_id=7) for row in batch.sequences if row.sample
    )
    scheduler.update(batch, StepOutput(tokens=tokens))
    scheduler.check_integrity()
    return batch


def first_start(scheduler: Scheduler) -> int:
    return step(scheduler).sequences[-1].start


@pytest.mark.parametrize(("length", "held", "spare"), [(9, 0, 13), (9, 8, 13), (8, 8, 14)])
def test_blocks_that_a_running_prompt_still_needs_are_not_spare(
    length: int, held: int, spare: int
) -> None:
    kv = KVCacheManager(16, 4)
    running = RunningSet(SchedulerConfig(), kv)
    request = GenerateRequest(request_id="a", model="m", prompt_ids=(1,) * length)
    sequence = Sequence(0, RequestGroup(request, frozenset(), 0), 0, 0, [1] * length)
    table = kv.new_table(sequence.token_ids, b"", use_cache=False)
    assert kv.grow(table, held)
    running.start(sequence, table, held)
    assert running.count_spare() == spare


def test_equal_prompts_share_blocks_only_under_the_same_salt() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", cache_salt="one")
    assert first_start(scheduler) == 0
    add(scheduler, "b", cache_salt="two")
    assert first_start(scheduler) == 0
    add(scheduler, "c", cache_salt="one")
    assert first_start(scheduler) == 8


def test_blocks_of_weights_that_are_not_cached_are_never_found() -> None:
    scheduler = make_scheduler()
    changing = WeightsVersion("session", "1", is_cached=False)
    for name in ("a", "b"):
        add(scheduler, name, weights=PolicyWeights(adapter=changing))
        assert first_start(scheduler) == 0
        scheduler.abort(name)
        scheduler.check_integrity()
    # Nor would they be if what they were computed with were the same by its id.
    add(scheduler, "c", weights=PolicyWeights(adapter=WeightsVersion("session", "1")))
    assert first_start(scheduler) == 0
    add(scheduler, "d", weights=PolicyWeights(adapter=WeightsVersion("session", "1")))
    assert first_start(scheduler) == 8


def test_a_client_runs_no_more_sequences_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs_per_client=1)
    for name in ("a1", "a2", "b1"):
        add(scheduler, name, client=name[0])
    step(scheduler)
    assert scheduler.stats().num_running == 2
    scheduler.abort("a1")
    step(scheduler)
    assert scheduler.stats().num_running == 2
    assert scheduler.stats().num_waiting == 0


def test_the_worst_sequence_is_preempted_and_the_best_runs_on() -> None:
    scheduler = make_scheduler(num_blocks=22)
    add(scheduler, "best", length=20, priority=-1)
    add(scheduler, "worst", length=22, priority=1)
    best = step(scheduler).sequences[0].seq_id
    rows: set[int] = set()
    while not scheduler.stats().num_preemptions:
        rows = {row.seq_id for row in step(scheduler).sequences}
        assert best in rows
    assert rows == {best}


def test_clients_take_turns() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name in ("a1", "a2", "b1"):
        add(scheduler, name, client=name[0])
    order = []
    for _ in range(3):
        step(scheduler)
        order += scheduler.take_started()
        scheduler.abort(order[-1])
    assert order == ["a1", "b1", "a2"]


def test_what_can_never_fit_and_what_is_too_many_are_refused() -> None:
    scheduler = make_scheduler(num_blocks=8, max_waiting=1)
    with pytest.raises(ContextLengthError, match="maximum context length is 32 tokens"):
        add(scheduler, "long", length=40)
    scheduler = make_scheduler(max_waiting=1)
    add(scheduler, "a")
    with pytest.raises(OverloadedError):
        add(scheduler, "b")


def test_a_queue_of_0_has_no_limit() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_waiting=0)
    for number in range(3000):
        add(scheduler, str(number))
    assert scheduler.stats().num_waiting == 3000


def test_a_client_that_fills_the_queue_leaves_the_others_their_share() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_waiting=6)
    for number in range(6):
        add(scheduler, f"hostile {number}", client="hostile")
    with pytest.raises(OverloadedError):
        add(scheduler, "one more", client="hostile")
    for number in range(3):
        add(scheduler, f"normal {number}", client="normal")
    with pytest.raises(OverloadedError):
        add(scheduler, "past its half", client="normal")
    add(scheduler, "a third client", client="third")
    assert scheduler.stats().num_waiting == 10


def test_samples_share_the_prompt_until_they_have_output() -> None:
    prompt = [1, 2, 3]
    params = SamplingParams(n=2, max_tokens=4)
    request = GenerateRequest(request_id="r", model="m", prompt_ids=(1, 2, 3), params=params)
    group = RequestGroup(request, frozenset(), 0)
    first, second = (Sequence(index, group, index, 0, prompt) for index in range(2))
    for token_id in (7, 8):
        first.add_token(SampledToken(seq_id=0, token_id=token_id), 64)
    assert first.token_ids == [1, 2, 3, 7, 8]
    assert second.token_ids is prompt
    assert prompt == [1, 2, 3]
