"""The steps that run before the first request are such as requests may have."""

from __future__ import annotations

from functools import cache

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_parallm.types.shape_buckets import padded_rows, padded_tokens
from mlx_parallm.types.step import ScheduledBatch
from mlx_parallm.worker.attention.kernel_plan import HeldTables
from mlx_parallm.worker.generation.paths.base import is_decode
from mlx_parallm.worker.generation.warm_up import (
    MIN_CHUNK,
    StepLimits,
    on_block,
    warm_up_batches,
)

LIMITS = st.builds(
    StepLimits,
    num_seqs=st.integers(1, 300),
    tokens=st.integers(300, 3000),
    model_len=st.integers(2, 9000),
    block_size=st.sampled_from([1, 16, 64]),
    source_len=st.sampled_from([0, 1, 20, 5000]),
)


def decodes(batch: ScheduledBatch) -> bool:
    return is_decode(batch.sequences, range(len(batch.sequences)))


@settings(max_examples=8)
@given(limits=LIMITS)
def test_they_are_within_the_limits_and_meet_every_shape(limits: StepLimits) -> None:
    # Making them takes longest.
    batches = list(warm_up_batches(limits))
    check_limits(limits, batches)
    steps = [batch for batch in batches if decodes(batch)]
    check_tables(limits, steps)
    check_sources(limits, steps)


def check_limits(limits: StepLimits, batches: list[ScheduledBatch]) -> None:
    for batch in batches:
        assert batch.num_tokens <= limits.tokens
        assert len({row.slot for row in batch.sequences}) == len(batch.sequences)
        for row in batch.sequences:
            assert 0 <= row.slot < limits.num_seqs
            end = row.start + len(row.token_ids)
            assert end <= limits.model_len
            assert end <= len(row.block_table) * limits.block_size
            assert (row.source is not None) == (limits.source_len > 0)
            if row.source is not None:
                assert 1 <= row.source.num_tokens <= limits.source_len
                assert row.source.num_tokens <= len(row.source.block_table) * limits.block_size


def check_tables(limits: StepLimits, steps: list[ScheduledBatch]) -> None:
    """Check that every number of rows is met with every length of tables."""
    met = {(padded_rows(len(batch.sequences)), width(batch)) for batch in steps}
    assert met >= shapes(limits, limits.model_len)


def check_sources(limits: StepLimits, steps: list[ScheduledBatch]) -> None:
    """Check that every number of rows is met with every length of sources."""
    met = {
        (padded_rows(len(batch.sequences)), width_of(len(source.block_table)))
        for batch in steps
        if (source := batch.sequences[0].source) is not None
    }
    assert met >= shapes(limits, limits.source_len)


def shapes(limits: StepLimits, num_tokens: int) -> set[tuple[int, int]]:
    """Return all numbers of rows with all widths of tables of up to so many tokens."""
    longest = -(-num_tokens // limits.block_size)
    lengths = {width_of(blocks) for blocks in range(1, longest + 1)}
    rows = {padded_rows(count) for count in range(1, limits.num_seqs + 1)}
    return {(count, length) for count in rows for length in lengths}


def test_the_blocks_of_sources_are_unused_ones() -> None:
    limits = StepLimits(num_seqs=2, tokens=300, model_len=64, block_size=16, source_len=90)
    for batch in warm_up_batches(limits):
        for row in on_block(batch, 7).sequences:
            assert row.source is not None
            assert {*row.block_table, *row.source.block_table} == {7}


def test_prompts_alone_and_beside_rows_fill_steps_of_all_sizes() -> None:
    limits = StepLimits(num_seqs=128, tokens=2048, model_len=40960, block_size=16)
    steps = [batch for batch in warm_up_batches(limits) if not decodes(batch)]
    sizes = {batch.num_tokens for batch in steps}
    assert sizes >= {padded_tokens(count) for count in range(MIN_CHUNK, 2049)}
    starts = {batch.sequences[-1].start for batch in steps}
    assert starts == {0, 4096}
    assert len(steps) < 100


@settings(max_examples=15)
@given(
    num_seqs=st.sampled_from([1, 2, 8, 128]),
    tokens=st.sampled_from([256, 300, 1024, 2048]),
    model_len=st.sampled_from([16, 512, 1024, 1700, 40_960]),
)
@example(num_seqs=128, tokens=2048, model_len=512)
@example(num_seqs=1, tokens=2048, model_len=2048)
def test_every_size_that_a_step_can_have_is_met(num_seqs: int, tokens: int, model_len: int) -> None:
    limits = StepLimits(num_seqs=num_seqs, tokens=tokens, model_len=model_len, block_size=16)
    batches = list(warm_up_batches(limits))
    check_limits(limits, batches)
    most = min(tokens, num_seqs * model_len)
    possible = {padded_tokens(count) for count in range(MIN_CHUNK, most + 1)}
    if most < tokens:
        # The largest size is met in full only.
        possible.discard(padded_tokens(most))
    met = {padded_tokens(batch.num_tokens) for batch in batches if not decodes(batch)}
    assert met >= possible


def test_few_more_steps_run_for_sizes_and_short_models() -> None:
    for model_len in (512, 1024, 2048, 40_960):
        limits = StepLimits(num_seqs=128, tokens=2048, model_len=model_len, block_size=16)
        steps = [batch for batch in warm_up_batches(limits) if not decodes(batch)]
        assert len(steps) < 100


@cache
def width_of(blocks: int) -> int:
    return HeldTables().rows([(0,) * blocks], 1).shape[1]


def width(batch: ScheduledBatch) -> int:
    return width_of(max(len(row.block_table) for row in batch.sequences))
