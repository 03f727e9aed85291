"""From the results of a pooling model to the vectors and probabilities of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_parallm.api.pooling.activation import activated
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import LABEL_TASKS, PoolingInfo, Task


def check_dimensions(dimensions: int | None, model: PoolingModel) -> None:
    """Raise InvalidRequestError if the model's vectors cannot be cut to this length."""
    info = model.info
    if dimensions is None or dimensions == info.dims:
        return
    if dimensions > info.dims or (
        info.shorter_dims is not None and dimensions not in info.shorter_dims
    ):
        raise InvalidRequestError(
            f"{model.names[0]} has vectors of {info.dims} numbers, not of {dimensions}.",
            param="dimensions",
        )


def finished(
    results: Sequence[np.ndarray],
    task: Task,
    info: PoolingInfo,
    dimensions: int | None = None,
    use_activation: bool | None = None,
) -> Sequence[np.ndarray]:
    """Return results as the answer gives them: probabilities, or vectors of their final length.

    Vectors are cut (Matryoshka, https://arxiv.org/abs/2205.13147), then divided by their norms.

    Args:
        results: at least one.
        task: the task of all inputs.
        info: the model's facts.
        dimensions: length of vectors, which was checked; None: the model's.
        use_activation: False: logits stay, vectors are not normalised; None: the model's way.
    """
    if task in LABEL_TASKS:
        activates = use_activation is not False
        return [activated(row, info.problem_type) for row in results] if activates else results
    normalizes = info.normalizes if use_activation is None else use_activation
    # Vectors of texts have one length, so that NumPy can work on all of them together.
    arrays = [_stacked(results)] if task == "embed" else results
    cut = [each[..., :dimensions] for each in arrays]
    vectors = [unit_vectors(each) for each in cut] if normalizes else cut
    return list(vectors[0]) if task == "embed" else vectors


def _stacked(vectors: Sequence[np.ndarray]) -> np.ndarray:
    return vectors[0][np.newaxis] if len(vectors) == 1 else np.stack(vectors)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Return vectors ``[..., dims]`` divided by their norms; a vector of zeros stays."""
    # The steps of np.linalg.norm, whose checks take longer than the norm of a vector.
    norms = np.sqrt(np.add.reduce(vectors * vectors, axis=-1, keepdims=True))
    return vectors / np.maximum(norms, 1e-12)


def similarities(vectors: Sequence[np.ndarray]) -> list[float]:
    """Return the cosine of the first vector with each other one."""
    array = unit_vectors(np.stack(vectors).astype(np.float64))
    return (array[1:] @ array[0]).tolist()
