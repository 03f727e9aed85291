"""Parts that encoders with rotary positions share (Su et al., 2021, arXiv:2104.09864)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.models.bert_layers import AttentionMask
from mlx_parallm.models.checkpoint_names import Weights
from mlx_parallm.numerics.attention import softmax_attention


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation of queries and keys by their positions.

    Attributes:
        dims: dimensions of a head that are rotated.
        theta: base of the wavelengths; not used if there are ``wavelengths``.
        wavelengths: tokens per radian, float32 ``[dims / 2]``, or ``[B, dims / 2]`` if texts
            differ; None: ``theta ** (2 i / dims)``.
        interleaved: True: dimensions 2 i and 2 i + 1 are a pair; False: i and i + dims / 2 are.
    """

    dims: int
    theta: float = 10000.0
    wavelengths: mx.array | None = None
    interleaved: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        """Rotate ``[B, heads, L, dims]``; the first token is at position 0."""
        if self.wavelengths is not None and self.wavelengths.ndim == 2:
            return self._turn_each(x, self.wavelengths)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.interleaved,
            base=self.theta if self.wavelengths is None else None,
            scale=1.0,
            offset=0,
            freqs=self.wavelengths,
        )

    def _turn_each(self, x: mx.array, wavelengths: mx.array) -> mx.array:
        """Rotate as ``mx.fast.rope`` does, with wavelengths ``[B, dims / 2]``, a row per text."""
        angles = mx.arange(x.shape[2])[:, None] / wavelengths[:, None, None]
        cos, sin = mx.cos(angles), mx.sin(angles)
        turned, rest = x[..., : self.dims].astype(mx.float32), x[..., self.dims :]
        if self.interleaved:
            a, b = turned[..., ::2], turned[..., 1::2]
            turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).flatten(-2)
        else:
            a, b = mx.split(turned, 2, axis=-1)
            turned = mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
        return mx.concatenate([turned.astype(x.dtype), rest], axis=-1)


def split_heads(packed: mx.array, heads: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return queries, keys and values ``[B, heads, L, dims]`` of packed ``[B, L, 3 * D]``."""
    batch, length, width = packed.shape
    parts = packed.reshape(batch, length, 3, heads, width // (3 * heads))
    queries, keys, values = parts.transpose(2, 0, 3, 1, 4)
    return queries, keys, values


def attend_rotary(
    packed: mx.array, heads: int, rotary: Rotary | None, mask: AttentionMask
) -> mx.array:
    """Return softmax attention of several heads, with scale 1 / sqrt(dims of a head).

    Args:
        packed: queries, keys and values of all heads, ``[B, L, 3 * D]``.
        heads: number of heads.
        rotary: rotates queries and keys; None: no rotation.
        mask: None or boolean (true: attended to); it broadcasts to ``[B, heads, L, L]``.

    Returns:
        ``[B, L, D]``.
    """
    queries, keys, values = split_heads(packed, heads)
    if rotary is not None:
        queries, keys = rotary(queries), rotary(keys)
    mixed = softmax_attention(queries, keys, values, scale=queries.shape[-1] ** -0.5, mask=mask)
    return mixed.swapaxes(1, 2).reshape(*packed.shape[:2], -1)


def join_rows(weights: Weights, parts: tuple[str, ...], whole: str) -> Weights:
    """Return the weights with every group of linear layers joined into one.

    Rows are outputs, so biases and the scales of quantised layers are joined like weights.

    Args:
        weights: by name.
        parts: suffixes of the layers' names, such as ``attn.q_proj``; rows follow in this order.
        whole: suffix of the joined layer's name.

    Raises:
        KeyError: one of the parts is missing.
    """
    first = f".{parts[0]}."
    joined = dict(weights)
    for name in weights:
        if first in name:
            layer, kind = name.split(first)
            rows = [joined.pop(f"{layer}.{part}.{kind}") for part in parts]
            joined[f"{layer}.{whole}.{kind}"] = mx.concatenate(rows, axis=0)
    return joined
