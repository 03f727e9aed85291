"""Between OpenAI's embeddings and what an encoder takes and gives."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.encoder_answer import Encoded
from mlx_parallm.api.schemas.embeddings import EmbeddingsRequest
from mlx_parallm.engine.interface import EncoderModel
from mlx_parallm.errors import InvalidRequestError


def check_dimensions(dimensions: int | None, model: EncoderModel) -> None:
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
    """Vectors of a length that was checked, float32 ``[inputs, dimensions]``.

    They are cut (Matryoshka, https://arxiv.org/abs/2205.13147), then divided by their lengths.
    """
    cut = np.stack(vectors)[:, :dimensions]
    if normalizes:
        cut = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return cut


def answer(found: Encoded, body: EmbeddingsRequest) -> dict[str, Any]:
    """OpenAI's list of embeddings, with vLLM's ``id`` and ``created``."""
    write = as_base64 if body.encoding_format == "base64" else np.ndarray.tolist
    vectors = finished(found.results, body.dimensions, normalizes=found.model.info.normalizes)
    return found.answer(
        [
            {"object": "embedding", "index": index, "embedding": write(vector)}
            for index, vector in enumerate(vectors)
        ]
    )


def as_base64(vector: np.ndarray) -> str:
    """The bytes of little-endian float32 in base64."""
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
