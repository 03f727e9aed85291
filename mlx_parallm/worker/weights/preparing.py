"""Prepares new weights of a model, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.worker.ops import PrepareWeights


class ChangingWeights(Protocol):
    """Weights that can be replaced by others that were prepared."""

    def prepare_folder(self, path: Path, /) -> None:
        """Read all weights of a folder; raise InvalidRequestError if they do not fit."""
        ...

    def prepare_tensors(self, tensors: Mapping[str, HostTensor], /) -> None:
        """Check some weights and keep them; raise InvalidRequestError if they do not fit."""
        ...


def prepare(
    weights: ChangingWeights, op: PrepareWeights, tensors: Mapping[str, Mapping[str, HostTensor]]
) -> str | None:
    """Prepare weights of a folder or by handle; return why they were refused, or None."""
    try:
        if op.folder is not None:
            weights.prepare_folder(op.folder)
        else:
            assert op.handle is not None, "an update has a folder or tensors"
            weights.prepare_tensors(tensors[op.handle])
    except InvalidRequestError as refusal:
        return str(refusal)
    return None
