"""Local attention of each token to nearby ones, with cost linear in the length."""

from __future__ import annotations

import mlx.core as mx

from mlx_parallm.models.bert_layers import AttentionMask
from mlx_parallm.models.rotary_layers import Rotary, attend_rotary, split_heads
from mlx_parallm.numerics.attention import softmax_attention

#: ``WORTH_BLOCKS``: above this multiple of the reach, blocks cost less than a mask over all pairs
#: (on a CPU, at a reach of 64, both cost the same at 6 times, and blocks 3 times less at 16).
WORTH_BLOCKS = 6


def attend_near(
    packed: mx.array, heads: int, rotary: Rotary | None, keys: AttentionMask, reach: int
) -> mx.array:
    """Return softmax attention of each token to the tokens at most ``reach`` away.

    Padding far from every token attends to itself, so that its softmax is not NaN.

    Args:
        packed: queries, keys and values of all heads, ``[B, L, 3 * D]``.
        heads: number of heads.
        rotary: rotates queries and keys; None: no rotation.
        keys: boolean ``[B, 1, 1, L]``, true for tokens; None: no padding.
        reach: tokens on each side, at least 1.

    Returns:
        ``[B, L, D]``.
    """
    length = packed.shape[1]
    if length <= reach + 1:
        return attend_rotary(packed, heads, rotary, keys)
    if length <= WORTH_BLOCKS * reach:
        steps = mx.arange(length)
        distance = mx.abs(steps[:, None] - steps[None])
        near = distance <= reach
        mask = near if keys is None else _with_self(near & keys, distance == 0)
        return attend_rotary(packed, heads, rotary, mask)
    return _attend_in_blocks(packed, heads, rotary, keys, reach)


def _attend_in_blocks(
    packed: mx.array, heads: int, rotary: Rotary | None, keys: AttentionMask, reach: int
) -> mx.array:
    """Attend in blocks of ``reach`` queries, each to its own and both neighbouring blocks."""
    batch, length, _ = packed.shape
    blocks = -(-length // reach)
    missing = blocks * reach - length
    queries, tokens, values = split_heads(packed, heads)
    if rotary is not None:
        queries, tokens = rotary(queries), rotary(tokens)
    scale = queries.shape[-1] ** -0.5
    queries = mx.pad(queries, [(0, 0), (0, 0), (0, missing), (0, 0)])
    queries = mx.unflatten(queries, 2, (blocks, reach)).swapaxes(1, 2).flatten(0, 1)
    is_token = mx.ones((batch, 1, length, 1), mx.bool_)
    if keys is not None:
        is_token = keys.swapaxes(-1, -2)
    visible = _neighbourhoods(is_token, reach, missing).swapaxes(-1, -2)
    row, column = mx.arange(reach)[:, None], mx.arange(3 * reach)[None]
    near = (column >= row) & (column <= row + 2 * reach)
    mixed = softmax_attention(
        queries,
        _neighbourhoods(tokens, reach, missing),
        _neighbourhoods(values, reach, missing),
        scale=scale,
        mask=_with_self(near & visible, column == row + reach),
    )
    mixed = mx.unflatten(mixed, 0, (batch, blocks)).transpose(0, 1, 3, 2, 4)
    return mixed.reshape(batch, blocks * reach, -1)[:, :length]


def _with_self(visible: mx.array, itself: mx.array) -> mx.array:
    """Return the mask with each query that sees nothing changed to see itself."""
    return visible | (itself & ~mx.any(visible, axis=-1, keepdims=True))


def _neighbourhoods(x: mx.array, reach: int, missing: int) -> mx.array:
    """Return each block of ``[B, H, L, D]`` with neighbours, ``[B * blocks, H, 3 * reach, D]``."""
    x = mx.pad(x, [(0, 0), (0, 0), (reach, missing + reach), (0, 0)])
    x = mx.unflatten(x, 2, (-1, reach))
    joined = mx.concatenate([x[:, :, :-2], x[:, :, 1:-1], x[:, :, 2:]], axis=3)
    return joined.swapaxes(1, 2).flatten(0, 1)
