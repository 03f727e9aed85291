"""Trains the model that translates numbers, dates and money, from scratch.

    python -m demo.translate train --out FOLDER [--minutes 60]
    python -m demo.translate train --out FOLDER --resume FOLDER --learning-rate 1e-3    # goes on

One thread of a processor is enough.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from demo.translate.batches import LAST_POOL, Batch, batches
from demo.translate.network import (
    TrainedT5,
    load_model,
    model_config,
    new_model,
    orient_heads,
    save_model,
)
from demo.translate.vocabulary import PAD_ID, new_tokenizer, save_tokenizer

LOG_EVERY = 100
SAVE_EVERY_S = 120
WARMUP_STEPS = 200


class Trainer:
    """One model, its optimizer and the compiled step."""

    def __init__(self, model: TrainedT5, learning_rate: float) -> None:
        self.model = model
        self._peak = learning_rate
        self.optimizer = optim.AdamW(learning_rate, betas=[0.9, 0.98], weight_decay=0.01)
        self.optimizer.init(model.trainable_parameters())
        state = [model.state, self.optimizer.state]
        self._state = state
        self._step: Callable[..., mx.array] = partial(mx.compile, inputs=state, outputs=state)(
            self._update
        )

    def step(self, batch: Batch, progress: float, number: int) -> mx.array:
        """Update the model at ``progress`` (0 to 1); return loss and share of exact rows."""
        warm = min(1.0, (number + 1) / WARMUP_STEPS)
        decay = 0.01 + 0.99 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        self.optimizer.learning_rate = mx.array(self._peak * warm * decay)
        figures = self._step(mx.array(batch.sources), mx.array(batch.targets))
        mx.eval(figures, self._state)
        return figures

    def _update(self, sources: mx.array, targets: mx.array) -> mx.array:
        compute = nn.value_and_grad(self.model, self._loss)
        (loss, exact), gradients = compute(sources, targets)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        self.optimizer.update(self.model, gradients)
        return mx.stack([loss, exact])

    def _loss(self, sources: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
        # The decoder starts with the padding token, which its inputs are shifted by.
        inputs = mx.pad(targets[:, :-1], [(0, 0), (1, 0)], constant_values=PAD_ID)
        logits = self.model(sources, inputs)
        is_token = targets != PAD_ID
        losses = nn.losses.cross_entropy(logits, targets) * is_token
        exact = mx.all((logits.argmax(-1) == targets) | ~is_token, axis=1)
        return losses.sum() / is_token.sum(), exact.mean()


def run(trainer: Trainer, options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Train until the time is over, printing loss and exact rows, and saving on the way."""
    first_pool = LAST_POOL if options.resume else 0
    source = batches(new_tokenizer(), options.rows, options.seed, first_pool)
    start = saved = time.perf_counter()
    figures: list[mx.array] = []
    number = 0
    while (progress := (time.perf_counter() - start) / (60 * options.minutes)) < 1:
        figures.append(trainer.step(next(source), progress, number))
        number += 1
        if number % LOG_EVERY == 0:
            loss, exact = (figure.item() for figure in mx.mean(mx.stack(figures), axis=0))
            print(f"step {number} loss {loss:.4f} exact {exact:.2%} {progress:.0%} "
                  f"CPU {time.process_time():.0f} s", flush=True)  # fmt: skip
            figures = []
        if time.perf_counter() - saved > SAVE_EVERY_S:
            save()
            saved = time.perf_counter()
    save()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="train this long")
    parser.add_argument("--rows", type=int, default=64, help="translations in a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="folder of an earlier piece")


def main(options: argparse.Namespace) -> None:
    """Train a model and write its folder."""
    tokenizer = new_tokenizer()
    save_tokenizer(tokenizer, options.out)
    config = model_config(tokenizer.get_vocab_size())
    if options.resume:
        model = load_model(options.resume)
    else:
        model = new_model(config, options.seed)
        orient_heads(model)
    trainer = Trainer(model, options.learning_rate)
    run(trainer, options, lambda: save_model(model, config, options.out))
