"""Readers of a config's fields about a classifier's labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import ProblemType


def label_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of ``id2label`` in order; without one, ``LABEL_0`` and so on.

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
    """Return the config's problem type; None if it has none.

    Raises:
        ModelLoadError: the value is none that transformers knows.
    """
    value = config.get("problem_type")
    if value is not None and value not in get_args(ProblemType):
        raise ModelLoadError(f"problem_type {value!r} is not one of {get_args(ProblemType)}.")
    return value


def names_reward(labels: Sequence[str]) -> bool:
    """True if a classifier's only label is called a reward."""
    return len(labels) == 1 and "reward" in labels[0].lower()
