"""The answer about the labels of texts, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from mlx_parallm.api.pooling.answer import Encoded
from mlx_parallm.api.pooling.embeddings.answer import finished


def classified(encoded: Encoded, *, use_activation: bool | None) -> dict[str, Any]:
    """Return the likeliest label of each text, and the probabilities of all labels in order."""
    info = encoded.call.model.info
    rows = finished(encoded.results, "classify", info, use_activation=use_activation)
    return encoded.answer(
        [
            {
                "index": index,
                "label": info.labels[int(row.argmax())],
                "probs": row.tolist(),
                "num_classes": len(row),
            }
            for index, row in enumerate(rows)
        ]
    )
