"""What a task is run with, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task that was asked for.

    Attributes:
        inputs: the body's; of any type.
        parameters: the body's.
        model: can do it.
        engine: where it runs.
        request_id: unique.
    """

    inputs: Any
    parameters: TaskParameters
    model: PoolingModel
    engine: EngineClient
    request_id: str


@dataclass(frozen=True, slots=True)
class Done:
    """A task's answer: JSON, and what was read as something else."""

    answer: Any
    warnings: tuple[str, ...] = field(default=())
