"""What a task is run with, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_parallm.api.pooling.encoded import ModelCall
from mlx_parallm.api.pooling.hf.schema import TaskParameters


@dataclass(frozen=True, slots=True)
class Job:
    """A task that was asked for.

    Attributes:
        inputs: the body's; of any type.
        parameters: the body's.
        call: of a model that can do it.
    """

    inputs: Any
    parameters: TaskParameters
    call: ModelCall


@dataclass(frozen=True, slots=True)
class Done:
    """A task's answer: JSON, and what was read as something else."""

    answer: Any
    warnings: tuple[str, ...] = ()
