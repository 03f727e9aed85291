"""The spec from which a worker loads a pooling model, and the plan of such a load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.types.pooling import PoolingInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """A pooling model to load.

    Attributes:
        config: the model's settings.
        path: its folder.
        task: a decoder's task; an encoder's head decides its own.
        chosen: ids of the tokens by which a reranker without a head scores, that of a match first;
            empty for other models.
        free_bytes: memory that was free before the load; None if unknown. On a CPU it decides
            whether weights are kept as float32.
    """

    config: ModelConfig
    path: Path
    task: Literal["auto"] | ModelTask
    chosen: tuple[int, ...] = ()
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPlan:
    """The plan of a loaded pooling model.

    Attributes:
        info: facts about the model.
        is_cast: True if ``dtype="auto"`` became float32 in a decoder, see ``load_model``.
    """

    info: PoolingInfo
    is_cast: bool
