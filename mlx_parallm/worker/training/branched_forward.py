"""Forwards of prompts with several continuations, each prompt computed once.

A text is a row ``[prompt | continuation 1 | continuation 2 | …]``. The positions of each
continuation go on from the prompt, and its tokens attend to the prompt and to themselves only. As
in packed forwards every token is a row of its own for the model, so that rows have positions of
their own; attention sees the texts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from typing_extensions import override

from mlx_parallm.types.training import BranchedText
from mlx_parallm.worker.generation.paged_cache import UnsupportedAttentionError
from mlx_parallm.worker.generation.seam import ModelSeams, PagedStep

#: ``PROMPT`` and ``PADDING`` are branches; continuations are numbered from 1.
PROMPT, PADDING = 0, -1


class BranchedForward:
    """Runs texts with branches through an unmodified model."""

    def __init__(self, model: Any, num_caches: int) -> None:
        """Install the seams; see ``of``."""
        self._model, self._num_caches = model, num_caches
        self._seams = ModelSeams(model)

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return the forward of a model; None if a layer keeps more or less than plain KV."""
        caches = make_prompt_cache(model)
        return cls(model, len(caches)) if all(type(each) is KVCache for each in caches) else None

    def __call__(self, token_ids: mx.array, texts: Sequence[BranchedText]) -> mx.array:
        """Return what the model returns for ``token_ids[:, None]``.

        Args:
            token_ids: int32 ``[B * L]``, those of the texts, each padded to L.
            texts: B texts.

        Raises:
            UnsupportedAttentionError: the model attends in a way that is not known.
        """
        length = token_ids.size // len(texts)
        layouts = [layout(text, length) for text in texts]
        owners, positions = (np.stack(each) for each in zip(*layouts, strict=True))
        step = _Step(mx.array(positions.reshape(-1)), mx.array(_visible(owners)))
        caches = [_LayerCache(step) for _ in range(self._num_caches)]
        with self._seams.during(step):
            return self._model(token_ids[:, None], cache=caches)


def layout(text: BranchedText, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the branch and the position of each token of a text, int32 ``[length]``.

    The branch is ``PROMPT``, the number of a continuation from 1, or ``PADDING``.
    """
    num_prompt = len(text.token_ids) - sum(text.branches)
    owners = np.full(length, PADDING, np.int32)
    positions = np.zeros(length, np.int32)
    owners[:num_prompt] = PROMPT
    positions[:num_prompt] = range(num_prompt)
    begin = num_prompt
    for number, count in enumerate(text.branches, 1):
        owners[begin : begin + count] = number
        positions[begin : begin + count] = range(num_prompt, num_prompt + count)
        begin += count
    return owners, positions


def _visible(owners: np.ndarray) -> np.ndarray:
    """Return which keys each query sees, bool ``[B, 1, L, L]``."""
    queries, keys = owners[:, :, None], owners[:, None, :]
    places = np.arange(owners.shape[1])
    is_before = places[:, None] >= places
    return (is_before & ((keys == PROMPT) | (keys == queries)))[:, None]


class _Step(PagedStep):
    """One forward. Implements ``seam.PagedStep``; its keys are those that its caches were given."""

    def __init__(self, positions: mx.array, visible: mx.array) -> None:
        self.positions = positions
        self._visible = visible
        self._values: dict[int, tuple[mx.array, mx.array]] = {}

    def keep(self, keys: mx.array, values: mx.array) -> None:
        """Know these keys, and their values, when a layer attends to them."""
        self._values[id(keys)] = keys, values

    @override
    def attend(
        self,
        queries: mx.array,
        keys: Any,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
        soft_cap: float | None = None,
    ) -> mx.array | None:
        kept = self._values.get(id(keys))
        if kept is None:
            return None
        if mask is not None or soft_cap is not None:
            raise UnsupportedAttentionError("attention has a mask of its own or a soft cap")
        output = mx.fast.scaled_dot_product_attention(
            *map(self._by_text, (queries, *kept)), scale=scale, mask=self._visible, sinks=sinks
        )
        return output.swapaxes(1, 2).reshape(*queries.shape[:3], -1)

    def _by_text(self, rows: mx.array) -> mx.array:
        """Return rows ``[B * L, heads, 1, size]`` as ``[B, heads, L, size]``."""
        count, _, length, _ = self._visible.shape
        return rows.reshape(count, length, *rows.shape[1:2], -1).swapaxes(1, 2)


class _LayerCache:
    """The cache of one layer during one forward, by mlx_lm's interface: it keeps nothing."""

    start_position = 0

    def __init__(self, step: _Step) -> None:
        self._step = step

    @property
    def offset(self) -> mx.array:
        """The positions of the rows, int32 ``[B * L]``."""
        return self._step.positions

    def make_mask(
        self, _length: int, return_array: bool = False, window_size: int | None = None
    ) -> None:
        """Return None: the step knows what rows see.

        Raises:
            UnsupportedAttentionError: the layer has a window.
        """
        del return_array
        if window_size is not None:
            raise UnsupportedAttentionError("a layer has a window")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values ``[B * L, heads, 1, size]``, which the step knows from now on."""
        self._step.keep(keys, values)
        return keys, values
