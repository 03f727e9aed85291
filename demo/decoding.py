"""Batched greedy decoding, small and independent of the server, for evaluation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import BatchKVCache


def greedy(
    model: qwen3.Model, prompts: list[list[int]], limits: list[int], eos_id: int
) -> list[list[int]]:
    """Return continuations of prompts, up to ``eos_id`` (not returned) or each prompt's limit."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    cache = [BatchKVCache(padding) for _ in model.layers]
    rows = [[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)]
    token = mx.argmax(model(mx.array(rows), cache=cache)[:, -1], axis=-1)
    written: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    while True:
        for row, value in enumerate(np.array(token).tolist()):
            done[row] = done[row] or value == eos_id or len(written[row]) >= limits[row]
            if not done[row]:
                written[row].append(value)
        if all(done):
            return written
        token = mx.argmax(model(token[:, None], cache=cache)[:, -1], axis=-1)
