"""A generation model as it is run without caches, beside the steps of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers
from mlx_parallm.worker.lora.context import AdapterContext


@dataclass(frozen=True, slots=True)
class StockModel:
    """A loaded generation model and what was installed in it.

    Attributes:
        model: mlx_lm's module.
        selector: selects the rows that the head computes.
        adapters: the context that its layers read.
        layers: wraps its layers, each once, so that adapters can change them.
        max_model_len: most tokens of a text.
    """

    model: Any
    selector: RowSelector
    adapters: AdapterContext
    layers: AdaptedLayers
    max_model_len: int
