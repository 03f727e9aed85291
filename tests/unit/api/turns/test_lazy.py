"""Entries that nobody reads are never made."""

import pytest

from mlx_parallm.api.turns.samples import LazySequence
from mlx_parallm.api.turns.stream import TurnStream
from mlx_parallm.parsing.turn import turn_parser
from mlx_parallm.types.events import PromptEvent, TokenEvent


def test_each_element_is_made_once_when_it_is_first_asked_for() -> None:
    made: list[int] = []
    lazy = LazySequence(4, lambda index: [made.append(index), index])
    assert len(lazy) == 4
    assert made == []
    assert lazy[2] is lazy[2]
    assert lazy[-1] is lazy[3]
    assert made == [2, 3]
    assert [item[1] for item in lazy] == [0, 1, 2, 3]
    assert [item[1] for item in lazy[1:3]] == [1, 2]
    assert sorted(made) == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [4, -5])
def test_there_is_nothing_beyond_its_ends(index: int) -> None:
    lazy = LazySequence(4, lambda index: index)
    with pytest.raises(IndexError):
        lazy[index]


def test_a_turn_makes_the_parser_of_a_sample_when_the_sample_begins() -> None:
    made: list[int] = []

    def parser(index: int):
        made.append(index)
        return turn_parser(tool_format=None, reasoning_format=None)

    stream = TurnStream(LazySequence(128, parser), 3)
    stream.add(PromptEvent(request_id="r", num_cached_tokens=0))
    assert made == []
    stream.add(TokenEvent(request_id="r", index=7, token_ids=(1,), text="a"))
    stream.add(TokenEvent(request_id="r", index=7, token_ids=(1,), text="b"))
    assert made == [7]
    assert stream.samples[7].content == "ab"
