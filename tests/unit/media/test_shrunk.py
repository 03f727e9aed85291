"""Images are made smaller in proportion."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_parallm.media.decode import shrunk


@pytest.mark.parametrize(
    ("size", "expected"),
    [((512, 512), (512, 512)), ((1024, 512), (512, 256)), ((10, 5120), (1, 512)), ((3, 4), (3, 4))],
)
def test_no_side_is_longer_than_asked_for(size: tuple[int, int], expected: tuple[int, int]) -> None:
    pixels = np.full((*size, 3), 200, np.uint8)
    small = shrunk(pixels, 512)
    assert small.shape == (*expected, 3)
    assert small.dtype == np.uint8
    assert (small == 200).all()
