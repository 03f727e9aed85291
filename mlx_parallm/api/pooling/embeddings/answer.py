"""Between OpenAI's embeddings and what an encoder takes and gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from starlette.responses import Response

from mlx_parallm.api.pooling.answer import Encoded
from mlx_parallm.api.pooling.embeddings.array_encoding import arrays_response
from mlx_parallm.api.pooling.embeddings.schema import EmbeddingsRequest
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError


def check_dimensions(dimensions: int | None, model: PoolingModel) -> None:
    """Raise InvalidRequestError if the model's vectors cannot be cut to that length."""
    info = model.info
    if dimensions is None or dimensions == info.dims:
        return
    if dimensions > info.dims or (
        info.shorter_dims is not None and dimensions not in info.shorter_dims
    ):
        raise InvalidRequestError(
            f"{model.names[0]} has no vectors of {dimensions} numbers, but of {info.dims}.",
            param="dimensions",
        )


def finished(
    vectors: Sequence[np.ndarray], dimensions: int | None, *, normalizes: bool
) -> np.ndarray:
    """Return vectors of a length that was checked, float32 ``[inputs, dimensions]``.

    They are cut (Matryoshka, https://arxiv.org/abs/2205.13147), then divided by their lengths.
    """
    cut = np.stack(vectors)[:, :dimensions]
    if normalizes:
        cut = unit_vectors(cut)
    return cut


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``[..., dims]`` divided by their lengths; one without a length stays."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def embeddings_response(encoded: Encoded, body: EmbeddingsRequest) -> Response:
    """Return OpenAI's list of embeddings with vLLM's ``id`` and ``created``, or the bytes alone."""
    info = encoded.call.model.info
    normalizes = info.normalizes if body.use_activation is None else body.use_activation
    vectors = finished(encoded.results, body.dimensions, normalizes=normalizes)
    return arrays_response(list(vectors), encoded, body, kind="embedding", field="embedding")
