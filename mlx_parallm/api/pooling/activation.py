"""From a classifier's logits to probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.types.pooling import ProblemType


def activated(logits: np.ndarray, problem_type: ProblemType | None) -> np.ndarray:
    """Return scores of labels from logits, as the pipelines of transformers and vLLM compute them.

    Values of a regression stay. Labels that do not exclude each other, and a single label, get a
    probability each (sigmoid); other labels share one (softmax).

    Args:
        logits: float32 ``[..., labels]``.
        problem_type: the model's; None: the number of labels decides.

    Returns:
        An array of the same shape.
    """
    if problem_type == "regression":
        return logits
    if problem_type == "multi_label_classification" or logits.shape[-1] == 1:
        # This form of the sigmoid cannot overflow.
        return 0.5 * (1 + np.tanh(0.5 * logits))
    return softmax(logits)


def ranked_labels(scores: np.ndarray, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the labels of a text with their scores, the likeliest first, equals in order."""
    order = np.argsort(-scores, kind="stable")
    return [{"label": labels[place], "score": float(scores[place])} for place in order]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the shares of the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of ``softmax``."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
