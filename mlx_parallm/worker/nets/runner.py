"""Runs batches of rows through a net.

On a CPU the numbers of a row depend on how many rows are multiplied with it, and where it is among
them, by the last bits. So rows are computed in tiles of 8, 4, 2 or 1: the most for which a check at
load finds the bits of a row free of its place and of the others. Several tiles are computed at once
if the check finds the same bits then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.types.nets import TensorSpec
from mlx_parallm.worker.nets.distributions import act
from mlx_parallm.worker.nets.layers import forward
from mlx_parallm.worker.nets.products import ROW_TILE
from mlx_parallm.worker.nets.weights import NetWeights
from mlx_parallm.worker.ops import NetBatch, NetOutputs

#: ``TILES``: rows of a tile, the most first.
TILES = (ROW_TILE, 4, 2, 1)
#: ``CHECKED_ROWS``: rows of the check, and the most that are computed at once on a CPU.
CHECKED_ROWS = 64
#: ``TRIALS``: orders of the rows that the check compares.
TRIALS = 6
#: ``MOST_ROWS``: the most rows that are computed at once elsewhere.
MOST_ROWS = 4096

#: ``MAX_CPU_PRODUCTS``: most multiplications for a row of nets that stay on the CPU beside a GPU;
#: 64 rows of them take a core about a millisecond.
MAX_CPU_PRODUCTS = 1 << 18

Arrays = dict[str, mx.array]


class NetRunner:
    """Runs one net.

    Attributes:
        signature: of the net; it says how rows are computed.
    """

    def __init__(self, plan: NetPlan, weights: NetWeights) -> None:
        """Prepare; on a CPU, find the tiles."""
        self._plan = plan
        self._weights = weights
        # Weights are arguments: a compiled function would keep those that it was traced with.
        self._compiled: Callable[..., Any] = mx.compile(self._compute)
        self._tile, self._at_once = 1, MOST_ROWS
        self._device = device_for(plan, mx.default_device())
        self.signature = replace(plan.signature, device=self._device.type.name)
        if self._device.type == mx.DeviceType.cpu:
            with mx.stream(self._device):
                self._tile, self._at_once = self._find_tiles()
            self.signature = replace(self.signature, tile_rows=self._tile)

    def run(self, batch: NetBatch) -> NetOutputs:
        """Return the outputs of a batch, and the states after it."""
        with mx.stream(self._device):
            return self._run(batch)

    def _run(self, batch: NetBatch) -> NetOutputs:
        arrays = _arrays_of(batch)
        num_rows = len(next(iter(batch.inputs.values())))
        # Chunks of time have any length, and each would be traced.
        timed = self.signature.timed_input
        is_chunk = timed is not None and batch.inputs[timed.name].shape[1] > 1
        compute = self._compute if is_chunk else self._compiled
        parts = [
            self._part(compute, arrays, begin, min(begin + self._at_once, num_rows))
            for begin in range(0, num_rows, self._at_once)
        ]
        mx.eval(parts)
        outputs, states = (_joined([part[side] for part in parts]) for side in (0, 1))
        return NetOutputs(outputs=outputs, states=states)

    def _part(
        self, compute: Callable[..., Any], arrays: Mapping[str, Any], begin: int, end: int
    ) -> tuple[Arrays, Arrays]:
        """Return outputs and states of some rows, lazily; they are padded to a known size."""
        size = _padded(end - begin, self._tile, self._at_once)
        padded = _map(arrays, lambda array: mx.array(_with_rows(array[begin:end], size)))
        outputs, states = compute(self._weights.arrays, padded)
        return _first(outputs, end - begin), _first(states, end - begin)

    def _compute(self, weights: Arrays, arrays: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        outputs, states = forward(
            self._plan, weights, arrays["inputs"], arrays.get("states"), arrays.get("starts")
        )
        rows = arrays.get("act")
        if rows is not None:
            assert self.signature.policy is not None, "only policies act"
            outputs = act(self.signature.policy, outputs, **rows)
        return outputs, states

    def _find_tiles(self) -> tuple[int, int]:
        """Return the rows of a tile, and how many rows are computed at once."""
        draw = np.random.default_rng(0)
        inputs = {
            spec.name: _random(spec, CHECKED_ROWS, draw) for spec in self._plan.signature.inputs
        }
        for tile in TILES:
            bits = self._bits_in_tiles(inputs, tile, draw)
            if bits is None:
                continue
            at_once = [
                rows
                for rows in (CHECKED_ROWS, CHECKED_ROWS // 4, tile)
                if rows % tile == 0 and self._has_bits(inputs, rows, tile, bits)
            ]
            if at_once:
                return tile, at_once[0]
        return 1, 1

    def _bits_in_tiles(
        self, inputs: Mapping[str, np.ndarray], tile: int, draw: np.random.Generator
    ) -> list[bytes] | None:
        """Return the bits of each row; None if they depend on its place or on the others."""
        bits: list[bytes | None] = [None] * CHECKED_ROWS
        for _ in range(TRIALS):
            order = draw.permutation(CHECKED_ROWS)
            for begin in range(0, CHECKED_ROWS, tile):
                rows = order[begin : begin + tile]
                for row, own in zip(rows, self._bits(inputs, rows), strict=True):
                    if bits[row] not in (None, own):
                        return None
                    bits[row] = own
        return [each for each in bits if each is not None]

    def _has_bits(
        self, inputs: Mapping[str, np.ndarray], rows: int, tile: int, bits: list[bytes]
    ) -> bool:
        """Return True if so many rows at once, and fewer, have the bits that tiles have."""
        sizes = {_padded(count, tile, rows) for count in range(1, rows + 1)}
        return all(
            self._bits(inputs, np.arange(begin, begin + size)) == bits[begin : begin + size]
            for size in sizes
            for begin in range(0, CHECKED_ROWS - size + 1, size)
        )

    def _bits(self, inputs: Mapping[str, np.ndarray], rows: np.ndarray) -> list[bytes]:
        chosen = {name: mx.array(array[rows]) for name, array in inputs.items()}
        outputs, states = self._compiled(self._weights.arrays, {"inputs": chosen})
        mx.eval(outputs, states)
        arrays = [_to_numpy(array) for each in (outputs, states) for array in each.values()]
        return [b"".join(array[row].tobytes() for array in arrays) for row in range(len(rows))]


def device_for(plan: NetPlan, device: mx.Device) -> mx.Device:
    """Return the device that computes a net in a process with this default device.

    A small net is computed by the CPU even if there is a GPU: its launches would cost a GPU more
    than its products, behind whatever step of a generator is in flight.
    """
    return mx.Device(mx.cpu) if plan.num_products <= MAX_CPU_PRODUCTS else device


def _arrays_of(batch: NetBatch) -> dict[str, Any]:
    """Return a batch's arrays as one tree; what is not there has no entry."""
    arrays: dict[str, Any] = {"inputs": dict(batch.inputs)}
    if batch.states is not None:
        arrays["states"] = dict(batch.states)
    if batch.episode_start is not None:
        arrays["starts"] = batch.episode_start
    if batch.act is not None:
        values = ((each.name, getattr(batch.act, each.name)) for each in fields(batch.act))
        arrays["act"] = {name: value for name, value in values if value is not None}
    return arrays


def _map(tree: Mapping[str, Any], change: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    return {
        name: _map(value, change) if isinstance(value, Mapping) else change(value)
        for name, value in tree.items()
    }


def _padded(count: int, tile: int, most: int) -> int:
    """Return a number of rows, of which there are few: a tile times a power of two."""
    tiles = -(-count // tile)
    return min(tile << (tiles - 1).bit_length(), max(most, tile))


def _first(arrays: Arrays, count: int) -> Arrays:
    return {name: array[:count] for name, array in arrays.items()}


def _with_rows(array: np.ndarray, size: int) -> np.ndarray:
    missing = size - len(array)
    if not missing:
        return array
    # Copies of a row, since all that is allowed for rows is allowed for them.
    return np.concatenate([array, np.repeat(array[:1], missing, axis=0)])


def _joined(parts: list[Arrays]) -> dict[str, np.ndarray]:
    return {
        name: np.concatenate([_to_numpy(part[name]) for part in parts])
        if len(parts) > 1
        else _to_numpy(parts[0][name])
        for name in parts[0]
    }


def _to_numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def _random(spec: TensorSpec, rows: int, draw: np.random.Generator) -> np.ndarray:
    shape = [rows, *(1 if size < 0 else size for size in spec.shape[1:])]
    if spec.dtype.startswith(("float", "bfloat")):
        dtype = "float32" if spec.dtype == "bfloat16" else spec.dtype
        return draw.standard_normal(shape).astype(dtype)
    # Small numbers are allowed wherever integers are: as places in tables, too.
    high = 256 if spec.dtype == "uint8" and len(shape) > 2 else 2
    return draw.integers(0, high, shape).astype(spec.dtype)
