"""Finds weights that are NaN or infinite: every token computed with them would fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from mlx_parallm.types.errors import ModelLoadError


class FloatBits(NamedTuple):
    """Bits of a float's dtype: integers of its size, and the bits of infinity and of the sign."""

    signed: mx.Dtype
    unsigned: mx.Dtype
    infinity: int
    sign: int


#: ``FLOATS``: the float dtypes of weights.
FLOATS: Mapping[mx.Dtype, FloatBits] = {
    mx.float32: FloatBits(mx.int32, mx.uint32, 0x7F80_0000, 1 << 31),
    mx.float16: FloatBits(mx.int16, mx.uint16, 0x7C00, 1 << 15),
    mx.bfloat16: FloatBits(mx.int16, mx.uint16, 0x7F80, 1 << 15),
}
#: ``MAX_NAMED``: how many tensors a message names.
MAX_NAMED = 5
#: ``NAN_SCALES``: bytes of quantised scales that are NaN, by MLX's name of the format. E8M0 has one
#: (OCP Microscaling Formats, 5.4.1), E4M3 has one for each sign.
NAN_SCALES: Mapping[str, tuple[int, ...]] = {
    "mxfp4": (0xFF,),
    "mxfp8": (0xFF,),
    "nvfp4": (0x7F, 0xFF),
}


def not_finite(arrays: Mapping[str, mx.array], modes: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of arrays with a NaN or an infinity, in order, and evaluate all arrays.

    Args:
        arrays: weights by name; integers are finite, except the scales of ``modes``.
        modes: quantisation mode of a layer, by the name of its scales.
    """
    checks = {
        name: _float_check(array, FLOATS[array.dtype])
        for name, array in arrays.items()
        if array.dtype in FLOATS and array.size
    }
    for name, mode in (modes or {}).items():
        if name in arrays and arrays[name].dtype == mx.uint8 and mode in NAN_SCALES:
            checks[name] = _scale_check(arrays[name], NAN_SCALES[mode])
    for name, array in arrays.items():
        # Together they would need memory for all that lazy arrays are computed from.
        mx.eval(array, checks.get(name))
    return sorted(name for name, is_finite in checks.items() if not is_finite.item())


def evaluate_weights(
    arrays: Mapping[str, mx.array], path: Path, modes: Mapping[str, str] | None = None
) -> None:
    """Evaluate the weights of a file or folder; ``modes`` are those of ``not_finite``.

    Raises:
    ModelLoadError: some are NaN or infinite; the message names them.
    """
    if wrong := not_finite(arrays, modes):
        raise ModelLoadError(f"{path}: these weights are NaN or infinite: {named(wrong)}.")


def _float_check(array: mx.array, bits: FloatBits) -> mx.array:
    """Return an array of one bool: true if no float of ``array`` is NaN or infinite.

    Read as integers, floats ascend with their magnitude, and those from infinity on are not finite.
    The largest signed integer covers positive floats, the largest unsigned one negative floats.
    Neither maximum needs further memory, and on a CPU both are faster than a sum of the floats.
    """
    positive = array.view(bits.signed).max() < bits.infinity
    negative = array.view(bits.unsigned).max() < bits.sign + bits.infinity
    return positive & negative


def _scale_check(scales: mx.array, nans: tuple[int, ...]) -> mx.array:
    fine = [(scales != nan).all() for nan in nans]
    return fine[0] if len(fine) == 1 else fine[0] & fine[1]


def scale_modes(model: object) -> dict[str, str]:
    """Return the quantisation modes of a model's layers, by the names of their scales."""
    layers = getattr(model, "named_modules", list)()
    modes = ((path, getattr(module, "mode", None)) for path, module in layers)
    return {f"{path}.scales": mode for path, mode in modes if isinstance(mode, str)}


def named(tensors: Iterable[str]) -> str:
    """Return some of the names for a message, and how many more there are."""
    ordered = sorted(tensors)
    more = f" and {len(ordered) - MAX_NAMED} more" if len(ordered) > MAX_NAMED else ""
    return ", ".join(ordered[:MAX_NAMED])[:500] + more
