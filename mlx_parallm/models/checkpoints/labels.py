"""What a config says about a classifier's labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import ProblemType


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of ``id2label`` by their numbers; ``LABEL_0`` and so on where there is none.

    Raises:
        ModelLoadError: its keys are not the numbers from 0 on.
    """
    named = config.get("id2label")
    if not named:
        return tuple(f"LABEL_{number}" for number in range(int(config.get("num_labels", 2))))
    try:
        return tuple(str(named[str(number)]) for number in range(len(named)))
    except KeyError as cause:
        raise ModelLoadError(f"id2label has no label {cause}.") from cause


def problem_type(config: Mapping[str, Any]) -> ProblemType | None:
    """What the logits mean; None where the config does not say.

    Raises:
        ModelLoadError: it says something else than transformers knows.
    """
    found = config.get("problem_type")
    if found is not None and found not in get_args(ProblemType):
        raise ModelLoadError(f"problem_type {found!r} is not one of {get_args(ProblemType)}.")
    return found


def names_reward(labels: Sequence[str]) -> bool:
    """Return True if the one label of a classifier is called a reward."""
    return len(labels) == 1 and "reward" in labels[0].lower()
