"""Answers about the labels of texts, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.pooling.activation import activated
from mlx_parallm.api.pooling.answer import Encoded


def classified(found: Encoded, *, use_activation: bool) -> dict[str, Any]:
    """The likeliest label of each text, and the probabilities of all in the order of labels."""
    info = found.model.info
    values = np.stack(found.results)
    if use_activation:
        values = activated(values, info.problem_type)
    return found.answer(
        [
            {
                "index": index,
                "label": info.labels[int(row.argmax())],
                "probs": row.tolist(),
                "num_classes": len(row),
            }
            for index, row in enumerate(values)
        ]
    )
