"""Blocks that stores are to get: their order, and what is given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mlx_parallm.generation.kv_cache import saves as module
from mlx_parallm.generation.kv_cache.saves import Save, SaveQueue


def queue_of(*blocks: int) -> SaveQueue:
    """Return a queue with one chain of these blocks, whose contents are their numbers."""
    saves, parent = SaveQueue(), b""
    for block in blocks:
        saves.add(Save(block, content := b"%d" % block, parent))
        parent = content
    return saves


def blocks_of(taken: Sequence[Save]) -> list[int]:
    assert [save.content for save in taken] == [b"%d" % save.place for save in taken]
    return [save.place for save in taken]


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
    save = Save(4, b"4", b"")
    assert saves.end(b"4", b"bytes") == [(save, b"bytes")]
    assert b"4" not in saves
    assert not saves.end(b"4", b"bytes")
    assert not saves.end(b"2", b"bytes")
    assert b"2" in saves


def end(saves: SaveQueue, taken: Sequence[Save]) -> list[int]:
    """Return the blocks that stores get of a step that ends."""
    ended = [saves.end(save.content, b"of " + save.content) for save in taken]
    assert all(data == b"of " + save.content for each in ended for save, data in each)
    return [save.place for each in ended for save, _ in each]


def test_what_is_read_before_what_it_follows_waits_for_it() -> None:
    saves = queue_of(*range(8))
    saves.add(Save(9, b"9", b"3"))
    saves.leave([7, 6, 9])
    assert end(saves, saves.take(0)) == []
    saves.leave([5, 4])
    assert end(saves, saves.take(0)) == []
    assert b"6" in saves
    assert end(saves, saves.take(2)) == [0, 1]
    assert end(saves, saves.take(9)) == [2, 3, 4, 5, 6, 7, 9]
    assert not any(b"%d" % block in saves for block in range(10))
    assert saves._early_bytes == 0


def test_what_follows_a_block_that_could_not_be_read_is_dropped() -> None:
    saves = queue_of(0, 1, 2)
    saves.leave([1, 2])
    assert end(saves, saves.take(0)) == []
    saves.take(1)
    saves.fail(b"0")
    assert not any(b"%d" % block in saves for block in range(3))
    assert saves._early_bytes == 0


def test_what_is_read_early_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EARLY_BYTES", 9)
    saves = queue_of(0, 1, 2, 3, 4)
    saves.leave([1, 2, 3, 4])
    assert end(saves, saves.take(0)) == [3, 4]
    assert end(saves, saves.take(9)) == [0, 1, 2]


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
    assert not saves.end(b"0", b"bytes")
    assert blocks_of(saves.take(9)) == []


def test_snapshots_are_taken_behind_their_chain_and_count_as_their_bytes() -> None:
    saves = queue_of(0, 1, 2)
    saves.add(Save(1, b"state", b"2", is_state=True, size=10))
    saves.add(Save(3, b"3", b""))
    assert len(saves) == 5
    # A slot is no block.
    saves.leave([9])
    saves.forget([4])
    assert [save.content for save in saves.take(4)] == [b"0", b"1", b"2", b"state"]
    assert saves.begun_size == 13
    assert [save.content for save in saves.take(4, room=0)] == []
    assert [save.content for save in saves.take(4, room=1)] == [b"3"]


def test_what_has_no_room_is_taken_later_and_nothing_passes_it() -> None:
    saves = queue_of(0)
    saves.add(Save(0, b"state", b"0", is_state=True, size=10))
    saves.add(Save(1, b"1", b""))
    assert [save.content for save in saves.take(64, room=10)] == [b"0"]
    assert [save.content for save in saves.take(64, room=9)] == []
    assert [save.content for save in saves.take(64, room=10)] == [b"state"]
    assert [save.content for save in saves.take(64)] == [b"1"]


def unkept(*blocks: int) -> list[Save]:
    """Return blocks that only other servers have asked for."""
    return [Save(block, b"%d" % block, b"", is_kept=False) for block in blocks]


@pytest.mark.parametrize("state", ["waiting", "leaving", "begun"])
def test_a_chain_gets_what_only_others_have_asked_for(state: str) -> None:
    saves, taken = SaveQueue(), list[Save]()
    for save in unkept(1, 0):
        saves.add(save)
        assert not saves.keeps(save.content)
    if state == "leaving":
        saves.leave([0, 1])
    elif state == "begun":
        taken += saves.take(9)
    for block in range(3):
        saves.add(Save(block, b"%d" % block, b"%d" % (block - 1) if block else b""))
    assert all(saves.keeps(b"%d" % block) for block in range(3))
    assert not saves.has_unkept
    taken += saves.take(9)
    ended = [each for save in taken for each, _ in saves.end(save.content, b"bytes")]
    assert [(save.place, save.parent) for save in ended] == [(0, b""), (1, b"0"), (2, b"1")]
    assert all(save.is_kept for save in ended)
    assert len(saves) == 0


def test_what_no_store_gets_needs_no_room() -> None:
    saves = queue_of(0, 1)
    for save in unkept(2, 3, 4):
        saves.add(save)
    assert [save.place for save in saves.take(2, room=0)] == [2, 3]
    assert saves.begun_size == 0
    assert [save.place for save in saves.take(9, room=1)] == [0, 4]
    assert saves.begun_size == 1
    assert saves.has_unkept
    for block in (2, 3, 4):
        assert len(saves.end(b"%d" % block, b"bytes")) == 1
    assert not saves.has_unkept
    saves.add(unkept(5)[0])
    saves.forget([5])
    assert not saves.has_unkept


def test_a_snapshot_that_leaves_is_kept_until_its_chain_was_read() -> None:
    saves = queue_of(4, 5)
    saves.add(Save(4, b"state", b"5", is_state=True, size=10))
    saves.leave([4], are_states=True)
    (save,) = saves.take(0)
    assert save.is_state
    assert not saves.end(b"state", b"bytes")
    assert end(saves, [*saves.take(1)]) == [4]
    (last,) = saves.take(1)
    ended = saves.end(last.content, b"of 5")
    assert ended == [(last, b"of 5"), (save, b"bytes")]
    assert b"state" not in saves
