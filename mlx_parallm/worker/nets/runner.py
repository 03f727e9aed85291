"""Runs batches of rows through a net, on a CPU in tiles; see ``tiles``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.worker.nets.distributions import act
from mlx_parallm.worker.nets.layers import forward
from mlx_parallm.worker.nets.tiles import find_tiles, mapped, padded, to_numpy
from mlx_parallm.worker.nets.weights import NetWeights
from mlx_parallm.worker.ops import NetBatch, NetOutputs

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
                self._tile, self._at_once = find_tiles(
                    plan.signature, lambda batch: self._compiled(weights.arrays, batch)
                )
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
        size = padded(end - begin, self._tile, self._at_once)
        rows = mapped(arrays, lambda array: mx.array(_with_rows(array[begin:end], size)))
        outputs, states = compute(self._weights.arrays, rows)
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
        name: np.concatenate([to_numpy(part[name]) for part in parts])
        if len(parts) > 1
        else to_numpy(parts[0][name])
        for name in parts[0]
    }
