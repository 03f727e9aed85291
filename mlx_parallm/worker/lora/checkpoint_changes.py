"""Changes of a checkpoint's weights as changes of the weights that a model holds, and back.

Some classes of mlx_lm multiply weights with constants of the config when they are loaded, so that
a forward need not. A change of such a weight is multiplied with the same constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from mlx_parallm.adapters.arrays import to_host, to_mlx
from mlx_parallm.adapters.weights import LowRank
from mlx_parallm.models.checkpoints.transformers_names import is_transposed, transformers_path
from mlx_parallm.types.json_values import is_object

#: ``SCALED``: model types whose class multiplies rows of weights, if the weights have the form of
#: transformers, which the shape of this one shows: ``[channels, 1, width]``.
SCALED = {"falcon_h1": "model.layers.0.mamba.conv1d.weight"}
#: ``NORMALISED``: model types whose class divides a weight by its norms, along some axis, and the
#: field that says whether it does; None: it always does. No change of the weight before is one of
#: low rank after.
NORMALISED: Mapping[str, tuple[str, str | None]] = {
    "baichuan_m1": ("lm_head", None),
    "bailing_moe": ("lm_head", "norm_head"),
    "bailing_moe_linear": ("lm_head", "norm_head"),
}


class CheckpointChanges:
    """Converts changes of one model's weights."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """``config`` is the checkpoint's config.json."""
        self._config = config
        self._model: Any = model
        # Classes of mlx_lm keep their config under either name.
        self._args: Any = getattr(model, "args", getattr(model, "config", None))
        self._type = str(getattr(self._args, "model_type", ""))

    def why_none(self, path: str) -> str | None:
        """Return why no change of a module's weight in a checkpoint can be served; None if one can.

        ``path`` is the module's path in the model.
        """
        name, field = NORMALISED.get(self._type, ("", None))
        if path != name or (field is not None and not getattr(self._args, field)):
            return None
        return f"{path} is divided by its norms when it is loaded"

    def of_model(self, path: str, change: LowRank, num_rows: int) -> LowRank:
        """Return the change of a module's weight that a change of the checkpoint's is."""
        return _multiplied(change, self._row_scales(path, num_rows))

    def of_checkpoint(self, path: str, change: LowRank, num_rows: int) -> LowRank:
        """Return the change of the checkpoint's weight that a change of a module's is."""
        scales = self._row_scales(path, num_rows)
        return _multiplied(change, None if scales is None else np.reciprocal(scales))

    def transformers_path(self, path: str, *, has_head: bool = False) -> str | None:
        """Return a module's path in transformers; None if it is no linear layer there.

        ``has_head``: see ``transformers_names.transformers_path``.
        """
        if self.why_none(path):
            return None
        return transformers_path(self._config, path, has_head=has_head)

    def is_transposed(self, path: str) -> bool:
        """True if transformers keeps a module's weight transposed."""
        return is_transposed(self._config, path)

    def packing(self, path: str) -> dict[str, Any] | None:
        """Return ``group_size``, ``bits`` and ``mode`` of a module in the checkpoint.

        None if it is plain there. The model may have it unpacked.
        """
        packing = self._config.get("quantization")
        if not is_object(packing):
            return None
        own = packing.get(path, True)
        if own is False:
            return None
        fields: dict[str, Any] = {"mode": "affine"} | (own if is_object(own) else packing)
        if not {"group_size", "bits"} <= fields.keys():
            return None
        return {name: fields[name] for name in ("group_size", "bits", "mode")}

    def weight(self, path: str, weight: mx.array) -> mx.array:
        """Return a checkpoint's weight ``[out, ...]`` as the model holds it."""
        if self._type not in SCALED:
            return weight
        return self._loaded(path, weight)

    def _row_scales(self, path: str, num_rows: int) -> NDArray[np.float32] | None:
        """Return what the rows of a module's weight are multiplied with, ``[out]``; None for 1."""
        if self._type not in SCALED:
            return None
        scales = np.array(self._loaded(path, mx.ones((num_rows, 1))))[:, 0]
        return None if (scales == 1).all() else scales

    def _loaded(self, path: str, weight: mx.array) -> mx.array:
        """Return what the model's class makes of a weight of a checkpoint in transformers' form."""
        name = f"{path}.weight"
        mark = mx.zeros((1, 1, 2))
        return self._model.sanitize({SCALED[self._type]: mark, name: mx.array(weight)})[name]


def _multiplied(change: LowRank, scales: NDArray[np.float32] | None) -> LowRank:
    """Return the change of a weight whose rows are multiplied with ``scales``, ``[out]``.

    The second factor of a linear layer is multiplied, so that all modules keep one scale.
    """
    if scales is None:
        return change
    if change.kind == "embedding":
        assert (scales == scales[0]).all(), "the rows of an embedding have one scale"
        magnitude = _times(change.magnitude, abs(scales[0]))
        return replace(change, scale=change.scale * float(scales[0]), magnitude=magnitude)
    magnitude = _times(change.magnitude, np.abs(scales))
    return replace(change, b=_times(change.b, scales[:, None]), magnitude=magnitude)


def _times(tensor: Any, factor: Any) -> Any:
    """Return a tensor times a factor, in float32; None stays None."""
    if tensor is None:
        return None
    return to_host(to_mlx(tensor).astype(mx.float32) * mx.array(factor))
