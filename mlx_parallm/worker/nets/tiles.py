"""The check that finds how many rows a CPU computes at once without a row's bits depending on it.

On a CPU the numbers of a row depend on how many rows are multiplied with it, and where it is among
them, by the last bits. So rows are computed in tiles of 8, 4, 2 or 1: the most for which the bits
of a row are free of its place and of the others. Several tiles are computed at once if rows have
the same bits then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.nets import ActResult, NetSignature, TensorSpec
from mlx_parallm.worker.nets.products import ROW_TILE

#: ``TILES``: rows of a tile, the most first.
TILES = (ROW_TILE, 4, 2, 1)
#: ``CHECKED_ROWS``: rows of the check, and the most that are computed at once on a CPU.
CHECKED_ROWS = 64
#: ``TRIALS``: orders of the rows that are compared of a batch without options. Products are alike
#: in other batches, of which one order is compared with that of all rows at once.
TRIALS = 6

#: ``Tree``: arrays of rows by name, and such trees: a batch.
Tree = Mapping[str, Any]
#: ``Compute``: returns the outputs and the states of a batch.
Compute = Callable[[dict[str, Any]], tuple[dict[str, mx.array], dict[str, mx.array]]]


def find_tiles(signature: NetSignature, compute: Compute) -> tuple[int, int]:
    """Return the rows of a tile, and how many rows are computed at once.

    Outputs and states are compared, and of a policy all that acts return: actions that were drawn,
    are likeliest or judged, log-probabilities and entropies.
    """
    draw = np.random.default_rng(0)
    batches = _batches(signature, compute, draw)
    checks = [
        _Check(compute, batch, draw, num_trials=TRIALS if place == 0 else 1)
        for place, batch in enumerate(batches)
    ]
    for tile in TILES:
        if not all(check.find_bits(tile) for check in checks):
            continue
        for at_once in (CHECKED_ROWS, CHECKED_ROWS // 4, tile):
            if at_once % tile == 0 and all(check.has_bits(at_once, tile) for check in checks):
                return tile, at_once
    return 1, 1


def padded(count: int, tile: int, most: int) -> int:
    """Return a number of rows, of which there are few: a tile times a power of two."""
    tiles = -(-count // tile)
    return min(tile << (tiles - 1).bit_length(), max(most, tile))


def mapped(tree: Tree, change: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """Return a tree with every array changed."""
    return {
        name: mapped(value, change) if isinstance(value, Mapping) else change(value)
        for name, value in tree.items()
    }


def to_numpy(array: mx.array) -> np.ndarray:
    """Return an array of the host; bfloat16 becomes float32."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


class _Check:
    """The check of one batch of ``CHECKED_ROWS`` rows."""

    def __init__(
        self, compute: Compute, batch: Tree, draw: np.random.Generator, *, num_trials: int
    ) -> None:
        self._compute = compute
        self._batch = batch
        self._draw = draw
        self._num_trials = num_trials
        self._bits: list[bytes] = []

    def find_bits(self, tile: int) -> bool:
        """Compute rows in tiles; True if no row's bits depend on its place or on the others."""
        bits = [b""] * CHECKED_ROWS
        for _ in range(self._num_trials):
            order = self._draw.permutation(CHECKED_ROWS)
            for begin in range(0, CHECKED_ROWS, tile):
                rows = order[begin : begin + tile]
                for row, own in zip(rows, self._bits_of(rows), strict=True):
                    if bits[row] not in (b"", own):
                        return False
                    bits[row] = own
        self._bits = bits
        return True

    def has_bits(self, rows: int, tile: int) -> bool:
        """Return True if so many rows at once, and fewer, have the bits of ``find_bits``."""
        sizes = {padded(count, tile, rows) for count in range(1, rows + 1)}
        return all(
            self._bits_of(np.arange(begin, begin + size)) == self._bits[begin : begin + size]
            for size in sizes
            for begin in range(0, CHECKED_ROWS - size + 1, size)
        )

    def _bits_of(self, rows: np.ndarray) -> list[bytes]:
        results = self._compute(mapped(self._batch, lambda array: mx.array(array[rows])))
        mx.eval(results)
        arrays = [to_numpy(array) for each in results for array in each.values()]
        return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(rows))]


def _batches(signature: NetSignature, compute: Compute, draw: np.random.Generator) -> list[Tree]:
    """Return batches with as few and with as many arrays as requests may bring."""
    least: dict[str, Any] = {"inputs": _random_of(signature.inputs, draw)}
    most = dict(least)
    if signature.states:
        most["states"] = _random_of(signature.states, draw)
        starts = draw.random((CHECKED_ROWS, 1)) < 0.5
        most["starts"] = starts if signature.has_time else starts[:, 0]
    if signature.policy is None:
        return [least, most] if signature.states else [least]
    act: dict[str, np.ndarray] = {
        "seeds": draw.integers(0, 1 << 32, (CHECKED_ROWS, 2), np.uint32),
        "is_deterministic": draw.random(CHECKED_ROWS) < 0.3,
    }
    results, _ = compute(mapped(least | {"act": act}, mx.array))
    act = act | {
        # Any order of actions is one that may be judged.
        "actions": np.roll(to_numpy(results[ActResult.ACTIONS]), 1, axis=0),
        "is_judged": draw.random(CHECKED_ROWS) < 0.5,
    }
    if signature.policy.has_choices:
        logits = results[f"{ActResult.DIST}.logits"]
        act["action_mask"] = draw.random(logits.shape) < 0.5
    return [least, most | {"act": act}]


def _random_of(specs: tuple[TensorSpec, ...], draw: np.random.Generator) -> dict[str, np.ndarray]:
    return {spec.name: _random(spec, draw) for spec in specs}


def _random(spec: TensorSpec, draw: np.random.Generator) -> np.ndarray:
    shape = [CHECKED_ROWS, *(1 if size < 0 else size for size in spec.shape[1:])]
    if spec.dtype.startswith(("float", "bfloat")):
        dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
        return draw.standard_normal(shape).astype(dtype)
    # Small numbers are allowed wherever integers are: as places in tables, too.
    high = 256 if spec.dtype == "uint8" and len(shape) > 2 else 2
    return draw.integers(0, high, shape).astype(spec.dtype)
