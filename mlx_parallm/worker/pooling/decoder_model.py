"""Gives a decoder of mlx_lm the interface of encoders: hidden states, and logits from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.pooling.vectors import last_of

#: ``Reach`` maps a window's size to how many tokens away bidirectional attention reaches.
Reach = Callable[[int], int]

# SAME: the same hidden states, computed in two ways, differ by at most this share of their norm, in
# 16 or fewer bits.
SAME = 0.1
# CHANGED: a token that is attended to changes hidden states by more than this share of their norm.
CHANGED = 1e-3


class MaskGiver:
    """A layer's cache that stores nothing and returns the mask of bidirectional attention.

    mlx_lm's models ask their caches for the mask (``create_attention_mask``), so they need no
    change.

    Args:
        tokens: bool ``[B, L]``, False for padding; each row has at least one token.
        reach: see ``Reach``.
    """

    offset = 0

    def __init__(self, tokens: mx.array, reach: Reach) -> None:
        self._tokens = tokens[:, None, None]
        self._reach = reach

    def make_mask(
        self, length: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return which keys each query attends to, bool ``[B, 1, 1 or length, length]``."""
        del return_array
        if window_size is None:
            return self._tokens
        places = mx.arange(length)
        distance = mx.abs(places[:, None] - places)
        # Padding far from all tokens attends to itself: a softmax over nothing would be NaN.
        visible = self._tokens & (distance <= self._reach(window_size))
        return visible | ((distance == 0) & ~mx.any(visible, axis=-1, keepdims=True))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return the arguments: there are no earlier tokens."""
        return keys, values


class DecoderModel:
    """Runs the unmodified trunk of a decoder over right-padded batches.

    With causal attention no token attends to the padding after it, so no mask is needed.

    Args:
        trunk: computes hidden states up to the last norm.
        score: the layer, or successive layers, that compute logits; None if there are none.
        num_layers: layers of the trunk.
        reach: how far bidirectional attention reaches; None if attention is causal.
    """

    def __init__(self, trunk: Any, score: Any, num_layers: int, reach: Reach | None) -> None:
        self._trunk = trunk
        self._score = score if isinstance(score, list) or score is None else [score]
        self._num_layers = num_layers
        self._reach = reach

    def __call__(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Return last hidden states ``[B, L, D]`` for int32 ids and their bool mask, ``[B, L]``."""
        if self._reach is None:
            return self._trunk(ids)
        return self._trunk(ids, [MaskGiver(mask, self._reach)] * self._num_layers)

    def with_score(self, score: Any) -> DecoderModel:
        """Return a model that shares the trunk and has another head; ``score`` is as above."""
        return DecoderModel(self._trunk, score, self._num_layers, self._reach)

    @property
    def score(self) -> Sequence[Any]:
        """The successive layers of the head; empty if there is none."""
        return self._score or ()

    def sequence_logits(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """Return the logits of each row's last token, ``[B, labels]``."""
        return self.token_logits(last_of(hidden, mask))

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Return logits ``[..., labels]`` for hidden states ``[..., D]``."""
        for layer in self.score:
            hidden = layer(hidden)
        return hidden

    def check(self) -> None:
        """Check on short inputs that padding changes nothing and that attention reaches far enough.

        Raises:
            ModelLoadError: the architecture cannot be run in this way.
        """
        tokens = mx.array([[1, 2, 3, 4, 5], [1, 2, 3, 0, 0], [1, 2, 3, 4, 6]])
        mask = mx.array([[True] * 5, [True] * 3 + [False] * 2, [True] * 5])
        try:
            batch = self(tokens, mask)
            alone = self(tokens[1:2, :3], mask[1:2, :3])
            sees_padding = _differ(batch[1, :3], alone[0], SAME)
            sees_last = _differ(batch[0, 0], batch[2, 0], CHANGED)
        except MODEL_ERRORS as cause:
            raise ModelLoadError(f"this architecture cannot be read: {cause}") from cause
        if sees_padding:
            raise ModelLoadError("this architecture does not ignore padding.")
        if self._reach is not None and not sees_last:
            raise ModelLoadError("this architecture does not support bidirectional attention.")


def _differ(states: mx.array, others: mx.array, share: float) -> bool:
    """True if the norm of the difference exceeds this share of the norm of ``states``."""
    states, others = states.astype(mx.float32), others.astype(mx.float32)
    return bool(mx.linalg.norm(states - others) > share * mx.linalg.norm(states))
