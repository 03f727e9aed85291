"""Blocks on the wire: what is sent is what comes, and nothing else is taken for a block."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.kv_cache.peer.filters import (
    FILTER_BYTES,
    ContentFilter,
    FilterMaker,
    filter_bytes,
)
from mlx_parallm.generation.kv_cache.peer.frames import BadFramesError, unpack_frames
from tests.kv_disk import chain, contents, data
from tests.kv_peers import OWNER, frames

SIZE = 100
BLOCKS = chain("frames", 5, SIZE)
ANSWER = frames([(block.content, block.data) for block in BLOCKS])


def unpack(answer: bytes, owner: str = OWNER) -> list[bytes]:
    """Return the blocks before the first that is wrong."""
    blocks: list[bytes] = []
    try:
        blocks.extend(unpack_frames(answer, owner, contents(BLOCKS), SIZE))
    except BadFramesError:
        return blocks
    return blocks


@given(st.integers(0, 4), st.integers(1, 300), st.integers(0, 2**31))
def test_what_is_sent_comes(count: int, size: int, seed: int) -> None:
    blocks = chain(seed, count, size)
    answer = frames([(block.content, block.data) for block in blocks])
    # The peer may have less than was asked for.
    wanted = [*contents(blocks), b"\0" * 32]
    assert list(unpack_frames(answer, OWNER, wanted, size)) == data(blocks)


@given(st.data())
def test_a_changed_or_cut_answer_gives_leading_blocks_only(draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(ANSWER) - 1))
    changed = bytearray(ANSWER)
    changed[place] ^= draw.draw(st.integers(1, 255))
    frame = (len(ANSWER) - len(frames([]))) // len(BLOCKS)
    num_before = max(0, place - len(frames([]))) // frame
    for answer in (bytes(changed), ANSWER[:place]):
        blocks = unpack(answer)
        assert blocks == data(BLOCKS)[: len(blocks)]
        assert len(blocks) <= num_before


@given(st.binary(max_size=400))
def test_garbage_is_no_block(garbage: bytes) -> None:
    assert not unpack(garbage)
    assert len(unpack(ANSWER + garbage)) == len(BLOCKS)


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(BLOCKS[1:], id="other contents"),
        pytest.param(chain("frames", 5, SIZE - 1), id="another size"),
        pytest.param(BLOCKS[::-1], id="another order"),
    ],
)
def test_blocks_of_other_contents_and_sizes_are_refused(blocks: list[object]) -> None:
    answer = frames([(block.content, block.data) for block in blocks])  # type: ignore[attr-defined]
    with pytest.raises(BadFramesError):
        list(unpack_frames(answer, OWNER, contents(BLOCKS), SIZE))


def test_another_identity_is_refused() -> None:
    with pytest.raises(BadFramesError, match="something else"):
        list(unpack_frames(ANSWER, "cd" * 32, contents(BLOCKS), SIZE))


def test_more_than_was_asked_for_is_refused() -> None:
    with pytest.raises(BadFramesError, match="more blocks"):
        list(unpack_frames(ANSWER, OWNER, contents(BLOCKS)[:2], SIZE))


def test_a_filter_has_all_contents_and_few_others() -> None:
    draws = random.Random(0)
    root = draws.randbytes(16)
    here = [root + draws.randbytes(16) for _ in range(20_000)]
    there = [root + draws.randbytes(16) for _ in range(20_000)]
    filter_ = ContentFilter(filter_bytes(here))
    assert all(content in filter_ for content in here)
    assert sum(content in filter_ for content in there) < 0.02 * len(there)
    # Other weights compute other KV for equal tokens.
    other = draws.randbytes(16)
    assert sum(other + content[16:] in filter_ for content in here) < 0.02 * len(here)
    assert here[0] not in ContentFilter()
    assert abs(filter_.size - len(here)) < 0.01 * len(here)
    assert ContentFilter().size == 0


def test_a_filter_that_is_made_again_forgets_what_is_gone() -> None:
    draws = random.Random(1)
    contents = [draws.randbytes(32) for _ in range(1000)]
    maker = FilterMaker()
    assert maker.make(contents[:500]) == filter_bytes(contents[:500])
    assert maker.make(contents) == filter_bytes(contents)
    # Some that are gone are not worth to make it anew.
    assert maker.make(contents[50:]) == filter_bytes(contents)
    assert maker.make(contents[100:]) == filter_bytes(contents[100:])
    assert maker.make([]) == filter_bytes([]) == bytes(FILTER_BYTES)
