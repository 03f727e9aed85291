"""Turns the rows of images by position ids on several axes (M-RoPE, arXiv:2409.12191)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.inputs.rows import InputFeatures
from mlx_parallm.worker.generation.paged_cache import positions_of
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls

AXES = 3
# SECTION: the field of a text config that divides the frequencies among the axes.
SECTION = "mrope_section"


class RotarySeam:
    """Lets the RoPE modules of a text model turn the rows of a step by ids on three axes.

    Steps without rows of images do not need it: all axes are equal there, and RoPE's usual
    offsets do.
    """

    def __init__(self, modules: Sequence[nn.RoPE], axes: np.ndarray) -> None:
        """Prepare.

        Args:
            modules: those of all layers, with equal settings.
            axes: the axis that turns each frequency, int ``[dims / 2]``.
        """
        first = modules[0]
        self._modules = modules
        self._dims: int = first.dims
        self._axes = axes
        places = np.arange(0, self._dims, 2, dtype=np.float32) / self._dims
        self._frequencies = first.scale * np.float32(first.base) ** -places

    def positions(
        self, sequences: Sequence[ScheduledSequence], features: InputFeatures
    ) -> np.ndarray | None:
        """Return the ids of a step's rows, int32 ``[T, 3]``; None if all axes are equal."""
        placed = [
            (rows, ids)
            for sequence in sequences
            for rows in sequence.inputs
            if (ids := features.positions(rows)) is not None
        ]
        if not placed:
            return None
        result = positions_of(sequences)[:, None].repeat(AXES, axis=1)
        first = 0
        for sequence in sequences:
            for rows in sequence.inputs:
                ids = features.positions(rows)
                if ids is not None:
                    start = first + rows.offset
                    # A row's usual id is its place, and counts from the image's first row.
                    begin = result[start] - rows.first_row
                    result[start : start + rows.num_rows] = begin + ids
            first += len(sequence.token_ids)
        return result

    @contextmanager
    def during(self, positions: np.ndarray) -> Iterator[None]:
        """Turn rows ``[T, heads, 1, size]`` by ``positions``, int32 ``[T, 3]``, for a while."""
        angles = positions[:, self._axes].astype(np.float32) * self._frequencies
        turns = mx.array(angles)[:, None, None, None, :]
        cos, sin = mx.cos(turns), mx.sin(turns)
        sines = mx.concatenate([-sin, sin], axis=-2)
        dims = self._dims
        padded: dict[int, tuple[mx.array, mx.array]] = {}

        def of_rows(count: int) -> tuple[mx.array, mx.array]:
            # Steps with prompts may have padding rows behind all others, whose values are not used.
            if count not in padded:
                missing = [(0, count - len(positions)), *[(0, 0)] * 4]
                padded[count] = mx.pad(cos, missing), mx.pad(sines, missing)
            return padded[count]

        def wrap(original: Any) -> Methods:
            del original

            def turned(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
                c, s = of_rows(x.shape[0])
                halves = x[..., :dims].astype(mx.float32).reshape(*x.shape[:-1], 2, dims // 2)
                rows = (halves * c + halves[..., ::-1, :] * s).astype(x.dtype)
                rows = rows.reshape(*x.shape[:-1], dims)
                return rows if dims == x.shape[-1] else mx.concatenate([rows, x[..., dims:]], -1)

            return {"__call__": turned}

        with WrappedCalls(self._modules, wrap):
            yield

    @contextmanager
    def during_stock(self, positions: np.ndarray) -> Iterator[None]:
        """Let the stock model turn ``[1, heads, tokens, size]`` by ``positions`` for a while.

        Args:
            positions: the ids of all tokens of a text, int32 ``[tokens, 3]``. A call turns those
                from its ``offset`` on.
        """
        # Each dimension is turned as the module itself turns it, by the ids of its axis.
        pairs = mx.array(np.concatenate([self._axes, self._axes]))
        dims = self._dims

        def wrap(original: Any) -> Methods:
            def turned(self: Any, x: mx.array, offset: Any = 0) -> mx.array:
                first = int(offset)
                ids = positions[first : first + x.shape[2]]
                tokens = x[0].swapaxes(0, 1)[:, :, None]
                axes = [pairs, mx.zeros((x.shape[3] - dims,), pairs.dtype)]
                axis_of = mx.concatenate(axes)
                out = tokens
                for axis in range(AXES):
                    by_axis = original.__call__(self, tokens, offset=mx.array(ids[:, axis]))
                    out = mx.where(axis_of == axis, by_axis, out)
                return out[:, :, 0].swapaxes(0, 1)[None]

            return {"__call__": turned}

        with WrappedCalls(self._modules, wrap):
            yield


def find_rotary(model: nn.Module, config: Mapping[str, Any]) -> RotarySeam | None:
    """Return the seam of a model whose text part has M-RoPE; None if it has none."""
    text = config.get("text_config", config)
    settings = next(
        (
            each
            for each in (text.get("rope_parameters"), text.get("rope_scaling"))
            if is_mapping(each) and SECTION in each
        ),
        None,
    )
    if settings is None:
        return None
    modules = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.RoPE) and not name.startswith(f"{TOWER}.")
    ]
    if not modules:
        return None
    sections = [int(size) for size in settings[SECTION]]
    # Qwen3-VL and later models interleave the axes, also where their config does not say so.
    is_later = str(config.get("model_type", "")).startswith("qwen3")
    is_interleaved = bool(settings.get("mrope_interleaved", is_later))
    return RotarySeam(modules, _axes(modules[0].dims // 2, sections, is_interleaved=is_interleaved))


def _axes(count: int, sections: Sequence[int], *, is_interleaved: bool) -> np.ndarray:
    """Return the axis that turns each frequency, int ``[count]``."""
    if not is_interleaved:
        return np.repeat(np.arange(AXES), sections)
    axes = np.zeros(count, int)
    for axis in range(1, AXES):
        axes[axis : AXES * sections[axis] : AXES] = axis
    return axes
