"""Products of rows with weights."""

from __future__ import annotations

import mlx.core as mx

#: ``ROW_TILE``: rows that a CPU multiplies at a time, where there are several times as many.
ROW_TILE = 8


def product(rows: mx.array, weight: mx.array) -> mx.array:
    """Return ``rows @ weight``, where ``weight`` has two dimensions.

    On a CPU the last bits of a row depend on how many rows are multiplied with it. So many rows are
    multiplied in tiles, all in one operation: a row has the bits that it has in a tile alone.
    """
    num_tiles, left = divmod(len(rows), ROW_TILE)
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    if not is_cpu or left or num_tiles < 2:
        return rows @ weight
    tiles = rows.reshape(num_tiles, -1, rows.shape[-1])
    # MLX would join the tiles if the weight had no tiles of its own; it is not copied for them.
    products = tiles @ mx.broadcast_to(weight, (num_tiles, *weight.shape))
    return products.reshape(*rows.shape[:-1], weight.shape[-1])
