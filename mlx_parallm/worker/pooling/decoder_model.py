"""A decoder of mlx_lm as the heads of encoders take a model: hidden states and logits of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.worker.model_errors import MODEL_ERRORS
from mlx_parallm.worker.pooling.vectors import last_of

#: Of attention to both sides: how many tokens away a window of so many reaches.
Reach = Callable[[int], int]

# Two ways to the same hidden states may differ so much of their norm: rounding of 16 or fewer bits.
SAME = 0.1
# A token that is attended to changes hidden states by more than this share of their norm.
CHANGED = 1e-3


class MaskGiver:
    """Stands for a layer's cache, keeps nothing, and has the mask of attention to both sides.

    mlx_lm's models ask their caches for the mask (``create_attention_mask``); so this needs no
    change of theirs.

    Args:
        tokens: bool ``[B, L]``: what is no padding, one at least in each row.
        reach: see ``Reach``.
    """

    offset = 0

    def __init__(self, tokens: mx.array, reach: Reach) -> None:
        self._tokens = tokens[:, None, None]
        self._reach = reach

    def make_mask(
        self, length: int, *, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Which keys each query sees, bool ``[B, 1, 1 or length, length]``."""
        del return_array
        if window_size is None:
            return self._tokens
        places = mx.arange(length)
        distance = mx.abs(places[:, None] - places)
        # Padding far from all tokens sees itself: the softmax of nothing is no number.
        visible = self._tokens & (distance <= self._reach(window_size))
        return visible | ((distance == 0) & ~mx.any(visible, axis=-1, keepdims=True))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What came in: there is nothing before it."""
        return keys, values


class DecoderModel:
    """Runs the unmodified trunk of a decoder over right-padded batches.

    With causal attention padding comes after everything that could attend to it, and needs no mask.

    Args:
        trunk: gives hidden states after the last norm.
        score: a layer, or several one after the other, that give logits; None: there are none.
        num_layers: of the trunk.
        reach: None: attention is causal.
    """

    def __init__(self, trunk: Any, score: Any, num_layers: int, reach: Reach | None) -> None:
        self._trunk = trunk
        self._score = score if isinstance(score, list) or score is None else [score]
        self._num_layers = num_layers
        self._reach = reach

    def __call__(self, ids: mx.array, mask: mx.array) -> mx.array:
        """Last hidden states ``[B, L, D]`` of int32 ids and their bool mask, both ``[B, L]``."""
        if self._reach is None:
            return self._trunk(ids)
        return self._trunk(ids, [MaskGiver(mask, self._reach)] * self._num_layers)

    def with_score(self, score: Any) -> DecoderModel:
        """The same with another head; ``score`` as above."""
        return DecoderModel(self._trunk, score, self._num_layers, self._reach)

    def sequence_logits(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """Logits ``[B, labels]`` of each row's last token."""
        return self.token_logits(last_of(hidden, mask))

    def token_logits(self, hidden: mx.array) -> mx.array:
        """Logits ``[..., labels]`` of ``[..., D]``."""
        for layer in self._score or ():
            hidden = layer(hidden)
        return hidden

    def check(self) -> None:
        """See on two short inputs that padding changes nothing, and what attends to what.

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
            raise ModelLoadError("this architecture does not leave padding out.")
        if self._reach is not None and not sees_last:
            raise ModelLoadError("this architecture cannot attend to both sides.")


def _differ(one: mx.array, other: mx.array, share: float) -> bool:
    """Whether the norm of a difference is more than that share of the first array's."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return bool(mx.linalg.norm(one - other) > share * mx.linalg.norm(one))
