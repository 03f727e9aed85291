"""Positions of a prompt mean tokens or rows of inputs; blocks and steps end where they may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.inputs.prompt_inputs import NO_INPUTS, PromptInputs
from mlx_parallm.generation.kv_cache.block_table import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span


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
