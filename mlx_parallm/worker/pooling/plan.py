"""What the worker is told of a pooling model, and what it has chosen for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.types.pooling import EncoderInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """A pooling model.

    Attributes:
        config: the model's settings.
        path: its folder.
        task: what a decoder is served for; an encoder's head says it.
        chosen: ids of the tokens that a reranker without a head scores by, the one for a match
            first; empty for other models.
        free_bytes: memory that was free before; None if unknown. On a CPU it decides whether
            weights are kept as float32.
    """

    config: ModelConfig
    path: Path
    task: Literal["auto"] | ModelTask
    chosen: tuple[int, ...] = ()
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPlan:
    """A loaded pooling model.

    Attributes:
        info: facts about it.
        is_cast: True if ``dtype="auto"`` became float32 in a decoder, see ``load_model``.
    """

    info: EncoderInfo
    is_cast: bool
