"""Tests of the reader of text that arrives in pieces."""

from __future__ import annotations

from mlx_parallm.parsing.reader import Reader


def test_a_branch_reads_what_arrives_while_the_reader_only_collects_it() -> None:
    reader = Reader()
    reader.add("one two")
    assert reader.take(4) == "one "
    branch = reader.branch()
    assert branch.take(3) == "two"
    reader.add(" three")
    reader.add(" four")
    assert branch.unread == " three four"
    # Joining what a reader holds at each piece would take time by the square of its length.
    assert reader.unread == "two"
    reader.rejoin()
    assert reader.unread == "two three four"
    reader.rewind()
    assert reader.unread == "one two three four"
    assert (reader.position, reader.furthest) == (0, 4)
