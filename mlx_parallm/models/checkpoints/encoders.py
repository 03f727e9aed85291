"""Readers of an encoder's files: its architecture, a classifier's labels, the score of a pair."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.pooling import ProblemType

#: ``ENCODER_TYPES``: the values of ``model_type`` for which ``models/loading.py`` has a module;
#: processes without MLX read only the names.
ENCODER_TYPES = frozenset(
    {
        "bert",
        "deberta-v2",
        "distilbert",
        "electra",
        "gte",
        "modernbert",
        "mpnet",
        "new",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)


def is_encoder(folder: Path) -> bool:
    """Return True if a folder's config names an architecture of this package."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The load will say what is wrong.
        return False
    return is_object(config) and config.get("model_type") in ENCODER_TYPES


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


# A reader of sentence-transformers' settings for cross-encoders.
#
# See https://sbert.net/docs/package_reference/cross_encoder/cross_encoder.html. Versions of the
# library store the function applied to a pair's logit in three different places.


def scores_are_logits(folder: Path) -> bool:
    """True if a pair's score is its logit, not the logit's sigmoid.

    Raises:
        ModelLoadError: a file cannot be read, or asks for another function.
    """
    config = _read(folder / "config.json")
    within = config.get("sentence_transformers")
    name = (
        _read(folder / "config_sentence_transformers.json").get("activation_fn")
        or (within.get("activation_fn") if is_object(within) else None)
        or config.get("sbert_ce_default_activation_function")
    )
    kind = None if name is None else str(name).rpartition(".")[2]
    if kind not in (None, "Identity", "Sigmoid"):
        raise ModelLoadError(f"{folder}: scores by {name} are not supported.")
    return kind == "Identity"


def _read(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ModelLoadError(f"{file} could not be read: {cause}") from cause
    return config if is_object(config) else {}
