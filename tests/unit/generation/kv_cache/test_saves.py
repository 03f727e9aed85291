"""Blocks that stores are to get: their order, and what is given up."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.generation.kv_cache.saves import Save, SaveQueue


def queue_of(*blocks: int) -> SaveQueue:
    """Return a queue with one chain of these blocks, whose contents are their numbers."""
    saves, parent = SaveQueue(), b""
    for block in blocks:
        saves.add(Save(block, content := b"%d" % block, parent, is_drafted=False))
        parent = content
    return saves


def blocks_of(taken: Sequence[tuple[int, bytes]]) -> list[int]:
    assert [content for _, content in taken] == [b"%d" % block for block, _ in taken]
    return [block for block, _ in taken]


def test_blocks_are_taken_in_order_up_to_a_limit() -> None:
    saves = queue_of(5, 3, 8, 1)
    assert len(saves) == 4
    assert blocks_of(saves.take(3)) == [5, 3, 8]
    assert blocks_of(saves.take(3)) == [1]
    assert blocks_of(saves.take(3)) == []
    assert len(saves) == 0


def test_blocks_that_leave_are_taken_beyond_the_limit_and_behind_their_chain() -> None:
    saves = queue_of(*range(8))
    saves.leave([7, 6, 9])
    assert len(saves) == 8
    assert blocks_of(saves.take(4)) == [0, 1, 6, 7]
    saves.leave([5, 4, 3])
    assert blocks_of(saves.take(0)) == [3, 4, 5]
    assert blocks_of(saves.take(0)) == []
    assert blocks_of(saves.take(9)) == [2]


def test_a_content_is_known_until_its_step_ends() -> None:
    saves = queue_of(4, 2)
    assert b"4" in saves
    assert b"2" in saves
    saves.take(1)
    assert b"4" in saves
    save = saves.end(b"4")
    assert save == Save(4, b"4", b"", is_drafted=False)
    assert b"4" not in saves
    assert saves.end(b"4") is None
    assert saves.end(b"2") is None


def test_blocks_that_are_forgotten_are_neither_taken_nor_known() -> None:
    saves = queue_of(4, 2, 6)
    saves.forget([2, 9])
    assert b"2" not in saves
    assert blocks_of(saves.take(9)) == [4, 6]


def test_a_clear_forgets_also_what_steps_in_flight_read() -> None:
    saves = queue_of(*range(6))
    saves.take(2)
    saves.leave([4])
    saves.clear()
    assert len(saves) == 0
    assert not any(b"%d" % block in saves for block in range(6))
    assert saves.end(b"0") is None
    assert blocks_of(saves.take(9)) == []
