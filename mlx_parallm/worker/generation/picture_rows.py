"""The rows of a picture in a prompt: features of the tower, and embeddings of marks between."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.models.vision.features import Features
from mlx_parallm.types.model_input import FEATURE
from mlx_parallm.worker.generation.input_rows import EmbeddingSeam


def with_marks(
    features: Features, token_ids: mx.array, embedding: EmbeddingSeam, dtype: mx.Dtype
) -> Features:
    """Return the features of a picture with a row for each of its span, lazily.

    Args:
        features: of the tower.
        token_ids: of the span, int32 ``[rows]``, with ``FEATURE`` where a row is one of the
            tower's.
        embedding: has the model's token embedding.
        dtype: of the model.
    """
    rows = (features.rows / features.scale).astype(dtype)
    layers = tuple(each.astype(dtype) for each in features.layers)
    if rows.shape[0] == token_ids.shape[0]:
        return Features(rows, layers)
    is_feature = token_ids == FEATURE
    places = mx.maximum(mx.cumsum(is_feature.astype(mx.int32)) - 1, 0)
    marks = embedding.rows(mx.where(is_feature, 0, token_ids)).astype(dtype)
    nothing = mx.array(0, dtype)
    return Features(
        mx.where(is_feature[:, None], rows[places], marks),
        tuple(mx.where(is_feature[:, None], each[places], nothing) for each in layers),
    )
