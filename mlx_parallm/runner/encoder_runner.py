"""Runs an encoder over inputs of mixed length, and makes a vector of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_parallm.encode import EncoderInfo
from mlx_parallm.encoding.sentence_transformers import Pooling, VectorSpec
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.loading import ARCHITECTURES, LoadedEncoder, load_encoder
from mlx_parallm.runner.device import backend_name
from mlx_parallm.runner.loader import DTYPES

# Below any hidden state, and finite in every dtype.
_LEAST = -6e4


class EncoderRunner:
    """One encoder. Implements ``encode.Encoder``."""

    def __init__(self, loaded: LoadedEncoder, spec: VectorSpec) -> None:
        """``spec`` says how vectors are made."""
        self._model = loaded.model
        self._spec = spec
        longest: int = loaded.model.args.max_length
        self._info = EncoderInfo(
            architecture=str(loaded.config["model_type"]),
            vocab_size=int(loaded.config["vocab_size"]),
            max_model_len=min(longest, spec.max_model_len or longest),
            dims=self.embed([(0,)]).shape[1],
            dtype=loaded.dtype,
            weight_bytes=loaded.weight_bytes,
            normalizes=spec.normalizes,
        )

    @property
    def info(self) -> EncoderInfo:
        """See ``encode.Encoder``."""
        return self._info

    def embed(self, inputs: Sequence[tuple[int, ...]]) -> np.ndarray:
        """See ``encode.Encoder``."""
        ids, tokens = padded(inputs)
        mask = mx.array(tokens)
        hidden = self._model(mx.array(ids), mask).astype(mx.float32)
        vectors = pooled(hidden, mask, self._spec.poolings)
        if self._spec.normalizes:
            vectors = vectors / mx.maximum(mx.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return np.array(vectors)


def load_encoder_runner(folder: Path, dtype: str, spec: VectorSpec) -> EncoderRunner:
    """Load an encoder; ``dtype`` "auto" is that of the file, or float32 on a CPU.

    Raises:
        ConfigError: an unknown dtype.
        ModelLoadError: it cannot be loaded.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}.")
    wanted = DTYPES.get(dtype)
    if wanted is None and backend_name() == "cpu":
        # There it is many times faster than numbers of 16 bits.
        wanted = mx.float32
    return EncoderRunner(load_encoder(folder, wanted), spec)


def is_encoder(folder: Path) -> bool:
    """Whether a folder's config names an architecture of ``models``."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Whoever loads it says what is wrong.
        return False
    return isinstance(config, dict) and config.get("model_type") in ARCHITECTURES


def padded(inputs: Sequence[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded ids, int32 ``[B, L]``, and which of them are tokens, bool ``[B, L]``."""
    longest = max(map(len, inputs))
    ids = np.zeros((len(inputs), longest), dtype=np.int32)
    mask = np.zeros((len(inputs), longest), dtype=bool)
    for row, token_ids in enumerate(inputs):
        ids[row, : len(token_ids)] = token_ids
        mask[row, : len(token_ids)] = True
    return ids, mask


def pooled(hidden: mx.array, mask: mx.array, poolings: Sequence[Pooling]) -> mx.array:
    """Vectors ``[B, len(poolings) * D]`` of hidden states, float32 ``[B, L, D]``.

    ``mask`` is bool ``[B, L]``: the tokens, at the beginning of each row.
    """
    return mx.concatenate([_POOLINGS[one](hidden, mask) for one in poolings], axis=-1)


def _cls(hidden: mx.array, mask: mx.array) -> mx.array:
    del mask
    return hidden[:, 0]


def _mean(hidden: mx.array, mask: mx.array) -> mx.array:
    return _weighted(hidden, mask.astype(hidden.dtype))


def _weighted_mean(hidden: mx.array, mask: mx.array) -> mx.array:
    """Later tokens weigh more (SGPT, Muennighoff 2022, https://arxiv.org/abs/2202.08904)."""
    return _weighted(hidden, mask * mx.arange(1, mask.shape[1] + 1).astype(hidden.dtype))


def _weighted(hidden: mx.array, weights: mx.array) -> mx.array:
    total = mx.sum(hidden * weights[..., None], axis=1)
    return total / mx.sum(weights, axis=1, keepdims=True)


def _max(hidden: mx.array, mask: mx.array) -> mx.array:
    return mx.max(mx.where(mask[..., None], hidden, _LEAST), axis=1)


def _last(hidden: mx.array, mask: mx.array) -> mx.array:
    places = mx.sum(mask, axis=1).astype(mx.int32) - 1
    return mx.take_along_axis(hidden, places[:, None, None], axis=1)[:, 0]


_POOLINGS: dict[Pooling, Callable[[mx.array, mx.array], mx.array]] = {
    "cls": _cls,
    "mean": _mean,
    "max": _max,
    "last": _last,
    "weightedmean": _weighted_mean,
}
