"""Batches as trees of arrays: every field of theirs is in one."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from mlx_parallm.worker.nets.runner import _arrays_of
from mlx_parallm.worker.ops import ActRows, NetBatch


def test_every_field_of_acts_is_there() -> None:
    array = np.ones((1, 2), np.uint32)
    act = ActRows(**{each.name: array for each in fields(ActRows)})
    arrays = _arrays_of(NetBatch(model="n", inputs={"x": array}, act=act))
    assert arrays["act"].keys() == {each.name for each in fields(ActRows)}


def test_what_is_not_there_has_no_entry() -> None:
    array = np.ones((1, 2), np.uint32)
    act = ActRows(seeds=array, is_deterministic=array)
    arrays = _arrays_of(NetBatch(model="n", inputs={"x": array}, act=act))
    assert arrays.keys() == {"inputs", "act"}
    assert arrays["act"].keys() == {"seeds", "is_deterministic"}
