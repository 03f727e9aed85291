"""Trains the demonstration model from scratch.

    python -m demo.train --out FOLDER [--minutes 8 | --steps 12000]

Makes the tokenizer, then trains on conversations that worker processes generate meanwhile, and
writes the model at 8 bits. Runs on any MLX backend; a GPU needs minutes, a CPU hours.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models import qwen3
from tokenizers import Tokenizer

from demo.chat_format import END_OF_TEXT, IM_END, token_id
from demo.network import (
    CONTEXT_LENGTH,
    model_config,
    named_weights,
    new_model,
    save_quantized,
)
from demo.packing import PackedRows, batches
from demo.tokenizer_training import save_tokenizer, train_tokenizer

LOG_EVERY = 50
WARMUP_STEPS = 200


class ConversationMask:
    """Stands where a KV cache would: keeps every conversation of a packed row to itself.

    RoPE depends on distances only, so positions may run on through the row.
    """

    def __init__(self, segments: mx.array) -> None:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        length = segments.shape[1]
        self._mask = same & mx.tri(length, dtype=mx.bool_)
        self.offset = 0

    def make_mask(self, *_: Any, **__: Any) -> mx.array:
        """Return the boolean mask ``[rows, 1, length, length]``."""
        return self._mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values unchanged; training keeps no cache."""
        return keys, values


class Trainer:
    """One model, its optimizer and the compiled step."""

    def __init__(self, model: qwen3.Model, *, learning_rate: float, dtype: mx.Dtype) -> None:
        self.model = model
        self._peak = learning_rate
        self._dtype = dtype
        self._optimizer = optim.AdamW(learning_rate, betas=[0.9, 0.98], weight_decay=0.05)
        self._optimizer.init(model.trainable_parameters())
        state = [model.state, self._optimizer.state]
        self._step = partial(mx.compile, inputs=state, outputs=state)(self._update)
        self._state = state

    def step(self, batch: PackedRows, progress: float, number: int) -> mx.array:
        """Update the model at ``progress`` (0 to 1); return the loss, not yet evaluated."""
        warm = min(1.0, (number + 1) / WARMUP_STEPS)
        decay = 0.02 + 0.98 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        self._optimizer.learning_rate = self._peak * warm * decay
        loss = self._step(
            mx.array(batch.tokens),
            mx.array(batch.labels),
            mx.array(batch.weights.view(np.uint8)),
            mx.array(batch.segments),
        )
        mx.async_eval(loss, self._state)
        return loss

    def _update(
        self, tokens: mx.array, labels: mx.array, weights: mx.array, segments: mx.array
    ) -> mx.array:
        compute = nn.value_and_grad(self.model, self._loss)
        loss, gradients = compute(tokens, labels, weights, segments)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        self._optimizer.update(self.model, gradients)
        return loss

    def _loss(
        self, tokens: mx.array, labels: mx.array, weights: mx.array, segments: mx.array
    ) -> mx.array:
        master = self.model.trainable_parameters()
        self.model.update(tree_map(lambda weight: weight.astype(self._dtype), master))
        mask = ConversationMask(segments)
        logits = self.model(tokens, cache=[mask] * len(self.model.layers))
        self.model.update(master)
        losses = nn.losses.cross_entropy(logits.astype(mx.float32), labels)
        return (losses * weights).sum() / mx.maximum(weights.astype(mx.float32).sum(), 1)


def progress_by(minutes: float | None, steps: int) -> Callable[[int], float]:
    """Return how far training is, 0 to 1, by the clock if ``minutes`` is given, else by steps."""
    if minutes is None:
        return lambda number: number / steps
    start = time.perf_counter()
    return lambda _: (time.perf_counter() - start) / (60 * minutes)


def run(trainer: Trainer, options: argparse.Namespace) -> None:
    """Train until progress is 1, printing the loss and the speed."""
    source = batches(
        options.out / "tokenizer.json",
        rows=options.rows,
        workers=options.workers,
        seed=options.seed,
    )
    first = next(source)
    progress = progress_by(options.minutes, options.steps)
    number, since, losses = 0, time.perf_counter(), []
    batch = first
    while progress(number) < 1:
        losses.append(trainer.step(batch, progress(number), number))
        number += 1
        batch = next(source)
        if number % LOG_EVERY == 0:
            loss = mx.mean(mx.stack(losses)).item()
            elapsed = time.perf_counter() - since
            speed = LOG_EVERY * first.tokens.size / elapsed
            print(f"step {number} loss {loss:.4f} {speed:,.0f} tokens/s "
                  f"{progress(number):.0%}", flush=True)  # fmt: skip
            since, losses = time.perf_counter(), []
        elif len(losses) > 1:
            mx.eval(losses[-2])
    source.close()


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    parser = argparse.ArgumentParser(description="Train the demonstration model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, help="train this long, instead of --steps")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--rows", type=int, default=32, help="rows of 2,048 tokens per step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json, train none")
    parser.add_argument("--resume", type=Path, help="start from this weights.safetensors")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32"
    )
    return parser.parse_args()


def main() -> None:
    """Train the tokenizer and the model, and store both."""
    options = parse_options()
    tokenizer_path = options.tokenizer
    tokenizer = Tokenizer.from_file(str(tokenizer_path)) if tokenizer_path else train_tokenizer()
    save_tokenizer(tokenizer, options.out, CONTEXT_LENGTH)
    config = model_config(
        tokenizer.get_vocab_size(),
        token_id(tokenizer, IM_END),
        token_id(tokenizer, END_OF_TEXT),
    )
    model = new_model(config, options.seed)
    if options.resume:
        model.load_weights(str(options.resume))
        model.set_dtype(mx.float32)
    count = sum(weight.size for weight in named_weights(model).values())
    print(f"{count:,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    trainer = Trainer(model, learning_rate=options.learning_rate, dtype=getattr(mx, options.dtype))
    run(trainer, options)
    halves = {name: weight.astype(mx.float16) for name, weight in named_weights(model).items()}
    mx.save_safetensors(str(options.out / "weights.safetensors"), halves)
    save_quantized(model, config, options.out)


if __name__ == "__main__":
    main()
