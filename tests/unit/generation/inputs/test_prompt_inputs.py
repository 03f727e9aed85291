"""Positions of a prompt mean tokens or rows of inputs; blocks and steps end where they may."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.inputs.prompt_inputs import NO_INPUTS, PromptInputs
from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.paged_cache import positions_of


def make_input(content: str, start: int, stop: int, *, may_cut: bool = True) -> ModelInput:
    return ModelInput(
        kind=InputKind.PROMPT_EMBEDS,
        content=content,
        arrays={"rows": HostArray("float32", (1, 1), b"\0" * 4)},
        nbytes=4,
        span=Span(start, stop),
        may_cut=may_cut,
    )


def test_a_prompt_of_tokens_has_no_inputs() -> None:
    assert not NO_INPUTS
    assert NO_INPUTS.salt is None
    assert NO_INPUTS.block_key(0, 100) == b""
    assert NO_INPUTS.cut(3, 9) == 9
    assert NO_INPUTS.is_token(0)


def test_a_block_means_the_rows_at_its_positions() -> None:
    inputs = PromptInputs([make_input("x", 2, 6)])
    assert inputs.block_key(0, 2) == inputs.block_key(6, 8) == b""
    assert inputs.block_key(0, 4) != inputs.block_key(4, 8)
    moved = PromptInputs([make_input("x", 6, 10)])
    assert inputs.block_key(0, 4) == moved.block_key(4, 8)
    assert inputs.block_key(0, 4) != PromptInputs([make_input("y", 2, 6)]).block_key(0, 4)
    assert [place for place in range(8) if not inputs.is_token(place)] == [2, 3, 4, 5]


def test_an_input_without_rows_is_part_of_the_salt() -> None:
    def source(content: str) -> PromptInputs:
        arrays = {"ids": HostArray("int32", (1,), b"\0" * 4)}
        kind = InputKind.PROMPT_EMBEDS
        return PromptInputs([ModelInput(kind=kind, content=content, arrays=arrays, nbytes=4)])

    assert source("x").salt not in (None, source("y").salt)
    assert source("x").block_key(0, 8) == b""


def test_rows_that_must_not_be_cut_begin_or_end_a_step() -> None:
    inputs = PromptInputs([make_input("x", 4, 10, may_cut=False), make_input("y", 12, 20)])
    assert [inputs.cut(0, stop) for stop in (3, 4, 5, 9, 10, 15)] == [3, 4, 4, 4, 10, 15]
    assert inputs.cut(4, 8) == 4
    assert [inputs.end_of(start) for start in (3, 4, 12)] == [4, 10, 13]


BLOCK = 4


def prefix_hit(first: PromptInputs, second: PromptInputs, length: int = 16) -> int:
    """Return how many positions of the second prompt the first one has computed."""
    manager, tokens = KVCacheManager(16, BLOCK), [0] * length
    table = manager.new_table(tokens, b"", use_cache=True, inputs=first)
    assert manager.grow(table, length)
    manager.commit(table, tokens, length)
    reused: BlockTable = manager.new_table(tokens, b"", use_cache=True, inputs=second)
    return len(reused.blocks) * BLOCK


def test_equal_rows_at_equal_places_are_found_and_no_others() -> None:
    rows = [make_input("x", 0, 6), make_input("y", 6, 16)]
    assert prefix_hit(PromptInputs(rows), PromptInputs(rows)) == 12
    assert prefix_hit(PromptInputs(rows), NO_INPUTS) == 0
    assert prefix_hit(NO_INPUTS, PromptInputs(rows)) == 0
    other = [make_input("x", 0, 6), make_input("z", 6, 16)]
    assert prefix_hit(PromptInputs(rows), PromptInputs(other)) == 4
    shifted = [make_input("x", 0, 5), make_input("y", 5, 16)]
    assert prefix_hit(PromptInputs(rows), PromptInputs(shifted)) == 4


def test_a_hit_does_not_end_inside_rows_that_must_not_be_cut() -> None:
    whole = PromptInputs([make_input("x", 3, 10, may_cut=False)])
    # Two full blocks of it were computed before another text follows.
    manager, first, second = KVCacheManager(16, BLOCK), [0] * 12, [0] * 10 + [7] * 6
    table = manager.new_table(first, b"", use_cache=True, inputs=whole)
    assert manager.grow(table, 12)
    manager.commit(table, first, 12)
    assert not manager.new_table(second, b"", use_cache=True, inputs=whole).blocks
    cut = PromptInputs([make_input("x", 3, 10)])
    assert len(manager.new_table(second, b"", use_cache=True, inputs=cut).blocks) == 2


@given(
    spans=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.booleans()), max_size=5),
    start=st.integers(0, 30),
    length=st.integers(1, 20),
)
def test_steps_cut_only_where_they_may(
    spans: list[tuple[int, int, bool]], start: int, length: int
) -> None:
    inputs, end = list[ModelInput](), 0
    for gap, size, may_cut in spans:
        inputs.append(make_input("x", end + gap, end + gap + size, may_cut=may_cut))
        end += gap + size
    held = PromptInputs(inputs)
    inside = {
        place
        for each in inputs
        if each.span is not None and not each.may_cut
        for place in range(each.span.start + 1, each.span.stop)
    }
    allowed = [place for place in range(start, start + length + 1) if place not in inside]
    stop = held.cut(start, start + length)
    assert stop == max(allowed, default=start) or stop == start
    assert stop == start or stop not in inside
    assert start in inside or held.end_of(start) not in inside


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 5)), max_size=4),
    st.integers(1, 6),
)
def test_rope_offsets_are_those_of_every_place(gaps: list[tuple[int, int, int]], size: int) -> None:
    """Check chunks of ``size`` against offsets that are counted place by place."""
    inputs: list[ModelInput] = []
    expected: list[int] = []
    offset = 0
    for gap, rows, positions in gaps:
        expected += [offset] * (gap + rows)
        span = Span(len(expected) - rows, len(expected))
        num_positions = min(positions, rows)
        source = make_input("x", span.start, span.stop)
        inputs.append(replace(source, num_positions=num_positions))
        offset += num_positions - rows
    expected += [offset] * 4
    placed = PromptInputs(inputs)
    for start in range(0, len(expected), size):
        stop = min(len(expected), start + size)
        sequence = ScheduledSequence(
            seq_id=0,
            slot=0,
            start=start,
            token_ids=(1,) * (stop - start),
            block_table=(),
            rope_offsets=placed.rope_offsets(start, stop),
        )
        places = range(start, stop)
        assert positions_of([sequence]).tolist() == [place + expected[place] for place in places]
