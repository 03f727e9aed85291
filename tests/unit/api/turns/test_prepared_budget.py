"""Pixels that requests hold are bounded, for each client and for all."""

from __future__ import annotations

import pytest

from mlx_parallm.api.turns.images import (
    LEAST_HELD_BYTES,
    MOST_HELD_BYTES,
    PreparedBudget,
    max_held_bytes,
)
from mlx_parallm.images.families import WrittenImage
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.types.errors import OverloadedError
from mlx_parallm.types.model_input import HostArray


def image(num_bytes: int) -> PreparedImage:
    array = HostArray("uint8", (num_bytes,), bytes(num_bytes))
    return PreparedImage(WrittenImage("", ()), {"pixels": array}, "")


def test_one_client_holds_half_and_all_hold_the_bound() -> None:
    budget = PreparedBudget(20)
    held = [image(10), image(6), image(4)]
    budget.check("a")
    budget.hold(held[0], "a")
    with pytest.raises(OverloadedError):
        budget.check("a")
    for own in held[1:]:
        budget.check("b")
        budget.hold(own, "b")
    with pytest.raises(OverloadedError):
        budget.check("c")
    assert budget.num_bytes == 20


def test_images_count_until_nothing_holds_their_arrays() -> None:
    budget = PreparedBudget(20)
    held = image(10)
    budget.hold(held, "a")
    arrays = dict(held.arrays)
    del held
    assert budget.num_bytes == 10
    arrays.clear()
    assert budget.num_bytes == 0
    budget.check("a")


def test_the_bound_fits_the_machine() -> None:
    assert LEAST_HELD_BYTES <= max_held_bytes() <= MOST_HELD_BYTES
