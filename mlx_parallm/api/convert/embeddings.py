"""Between OpenAI's embeddings and what an encoder takes and gives."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.offload import maybe_in_thread
from mlx_parallm.api.schemas.embeddings import EmbeddingsRequest
from mlx_parallm.engine.interface import EncoderModel
from mlx_parallm.errors import ContextLengthError, InvalidRequestError


async def encode_inputs(
    body: EmbeddingsRequest, model: EncoderModel
) -> tuple[tuple[int, ...], ...]:
    """The token ids of every input, those of texts with special tokens.

    Raises:
        InvalidRequestError: an input is empty, or has ids that the model does not know; one is
            too long and is not to be cut.
    """
    given: list[Any] = body.input
    if isinstance(given[0], str):
        ids = await maybe_in_thread(
            lambda: model.tokenizer.encode(given), sum(len(text) for text in given)
        )
    else:
        ids = [tuple(one) for one in given]
        _check_ids(ids, model.info.vocab_size)
    limit = _limit(body, model.info.max_model_len)
    return tuple(_fitting(one, place, limit, body, model) for place, one in enumerate(ids))


def _limit(body: EmbeddingsRequest, longest: int) -> int:
    asked = body.truncate_prompt_tokens
    if asked is None or asked == -1:
        return longest
    if not 1 <= asked <= longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is -1 or from 1 to {longest}.", param="truncate_prompt_tokens"
        )
    return asked


def _check_ids(ids: Sequence[tuple[int, ...]], vocab_size: int) -> None:
    for place, one in enumerate(ids):
        if any(not 0 <= number < vocab_size for number in one):
            raise InvalidRequestError(
                f"input {place} has a token id outside the vocabulary of {vocab_size}.",
                param="input",
            )


def _fitting(
    ids: tuple[int, ...], place: int, limit: int, body: EmbeddingsRequest, model: EncoderModel
) -> tuple[int, ...]:
    if not ids:
        raise InvalidRequestError(f"input {place} is empty.", param="input")
    if body.truncate_prompt_tokens is not None:
        return model.tokenizer.cut(ids, limit)
    if len(ids) > limit:
        raise ContextLengthError(
            limit,
            f"input {place} has {len(ids)}. Shorten it, or set truncate_prompt_tokens.",
            param="input",
        )
    return ids


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


def shortened(vectors: np.ndarray, dimensions: int | None, model: EncoderModel) -> np.ndarray:
    """Vectors of a length that was checked (Matryoshka, https://arxiv.org/abs/2205.13147).

    They are cut, and divided by their lengths where the model does that to whole ones.
    """
    cut = vectors[:, :dimensions]
    if model.info.normalizes and cut.shape[1] < vectors.shape[1]:
        cut = cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12)
    return cut


def answer(
    vectors: np.ndarray, body: EmbeddingsRequest, model: str, num_tokens: int
) -> dict[str, Any]:
    """OpenAI's list of embeddings."""
    write = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": write(vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes()).decode()
