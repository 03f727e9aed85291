"""The rows of a picture in a prompt: features of the tower, with room for marks between."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.models.vision.features import Features
from mlx_parallm.types.model_input import FEATURE


def over_span(features: Features, token_ids: mx.array, dtype: mx.Dtype) -> Features:
    """Return the features of a picture with a row for each of its span, lazily.

    Rows of marks have no meaning: their embeddings are those of their tokens, which adapters may
    change.

    Args:
        features: of the tower.
        token_ids: of the span, int32 ``[rows]``, with ``FEATURE`` where a row is one of the
            tower's.
        dtype: of the model.
    """
    rows = (features.rows / features.scale).astype(dtype)
    layers = tuple(each.astype(dtype) for each in features.layers)
    if rows.shape[0] == token_ids.shape[0]:
        return Features(rows, layers)
    is_feature = token_ids == FEATURE
    places = mx.maximum(mx.cumsum(is_feature.astype(mx.int32)) - 1, 0)
    return Features(rows[places], tuple(each[places] for each in layers))
