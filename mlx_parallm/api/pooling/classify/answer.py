"""Answers about the labels of texts, in vLLM's shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.pooling.activation import activated
from mlx_parallm.api.pooling.answer import Encoded


def classified(encoded: Encoded, *, use_activation: bool) -> dict[str, Any]:
    """Return the likeliest label of each text, and the probabilities of all labels in order."""
    info = encoded.call.model.info
    values = np.stack(encoded.results)
    if use_activation:
        values = activated(values, info.problem_type)
    return encoded.answer(
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
