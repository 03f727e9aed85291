"""Processes with streams rarely look for garbage."""

from __future__ import annotations

import gc

import pytest

from mlx_parallm.process_setup.garbage import NEW_OBJECTS, spare_garbage_collection


@pytest.mark.parametrize(
    ("first", "wanted"), [(700, NEW_OBJECTS), (0, 0), (5 * NEW_OBJECTS, 5 * NEW_OBJECTS)]
)
def test_garbage_is_looked_for_no_more_often_than_the_caller_wants(first: int, wanted: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(first, 11, 12)
    try:
        spare_garbage_collection()
        assert gc.get_threshold() == (wanted, 11, 12)
    finally:
        gc.set_threshold(*before)
