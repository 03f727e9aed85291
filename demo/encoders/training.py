"""The loop that trains any of the encoders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

Batch = TypeVar("Batch")
LOG_EVERY = 100
WARMUP_STEPS = 100


def rate(number: int, steps: int, peak: float) -> float:
    """Return the learning rate of a step: a warm-up, then a cosine down to nothing."""
    warm = min(1.0, (number + 1) / WARMUP_STEPS)
    return peak * warm * (1 + math.cos(math.pi * number / steps)) / 2


def fit(
    model: nn.Module,
    loss: Callable[[Any, Batch], mx.array],
    source: Iterator[Batch],
    *,
    steps: int,
    learning_rate: float,
) -> None:
    """Train for some steps with AdamW and clipped gradients, printing the loss."""
    optimizer = optim.AdamW(learning_rate, betas=[0.9, 0.98], weight_decay=0.01)
    optimizer.init(model.trainable_parameters())
    compute = nn.value_and_grad(model, lambda batch: loss(model, batch))
    since, losses = time.perf_counter(), []
    for number in range(steps):
        optimizer.learning_rate = rate(number, steps, learning_rate)
        value, gradients = compute(next(source))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, value)
        losses.append(value.item())
        if (number + 1) % LOG_EVERY == 0:
            mean, elapsed = sum(losses) / len(losses), time.perf_counter() - since
            print(f"step {number + 1} loss {mean:.4f} {elapsed:.0f} s", flush=True)
            losses = []
