"""The interface of the user's trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One step of training.

    Attributes:
        kind: "rl" for groups of trajectories with rewards, "sft" for trajectories to imitate.
        model: ART's model.
        data: ART's trajectory groups, or trajectories.
        step: the number of this step.
        previous: the previous step's checkpoint; None before the first step.
        target: an empty folder for the checkpoint: an adapter of PEFT or mlx-lm, or a whole model.
        devices: indices of the devices to train on.
        options: further arguments of ``backend.train``, or the configuration of SFT.
    """

    kind: Literal["rl", "sft"]
    model: Any
    data: Sequence[Any]
    step: int
    previous: Path | None
    target: Path
    devices: tuple[int, ...]
    options: Mapping[str, Any]


class Trainer(Protocol):
    """Trains one step and writes its checkpoint."""

    async def __call__(self, job: TrainJob) -> Mapping[str, float]:
        """Return the metrics of the step, such as its loss."""
        ...
