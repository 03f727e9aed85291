"""Trains the model that sees from scratch, in pieces.

    python -m demo.see.train --out FOLDER [--minutes 9]
    python -m demo.see.train --out FOLDER --resume FOLDER --seed 2    # the next piece

Worker processes draw pictures meanwhile. Runs on any MLX backend; a GPU needs minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from tokenizers import Tokenizer

from demo.see.batches import batches
from demo.see.conversations import Rows, save_tokenizer, train_tokenizer
from demo.see.network import (
    TEXT_LAYERS,
    SeeingModel,
    config_of,
    load_model,
    named_weights,
    new_model,
    save_model,
)

LOG_EVERY = 50
WARMUP_STEPS = 300
SAVE_EVERY_S = 60
STATE_FILES = ("weights", "optimizer_m", "optimizer_v")


class Trainer:
    """One model, its optimizer and the compiled step."""

    def __init__(self, model: SeeingModel, *, learning_rate: float, dtype: mx.Dtype) -> None:
        self.model = model
        self._peak = learning_rate
        self._dtype = dtype
        self.optimizer = optim.AdamW(learning_rate, betas=[0.9, 0.98], weight_decay=0.05)
        self.optimizer.init(model.trainable_parameters())
        self._state = [model.state, self.optimizer.state]
        self._step = self._compiled()

    def _compiled(self) -> Callable[..., mx.array]:
        return partial(mx.compile, inputs=self._state, outputs=self._state)(self._update)

    def resume(self, folder: Path) -> None:
        """Read what an earlier piece wrote, or a model; new moments begin where it has none."""
        weights = folder / f"{STATE_FILES[0]}.safetensors"
        if weights.exists():
            self.model.load_weights(str(weights))
        else:
            self.model.update(load_model(folder).parameters())
        if all((folder / f"{name}.safetensors").exists() for name in STATE_FILES):
            state: dict[str, mx.array] = dict(tree_flatten(self.optimizer.state))
            for letter, name in zip("mv", STATE_FILES[1:], strict=True):
                part = cast(dict[str, mx.array], mx.load(str(folder / f"{name}.safetensors")))
                state |= {f"{weight}.{letter}": array for weight, array in part.items()}
            self.optimizer.state = tree_unflatten(list(state.items()))
        self._state = [self.model.state, self.optimizer.state]
        self._step = self._compiled()

    def step(self, batch: tuple[Rows, Rows], progress: float, number: int) -> mx.array:
        """Update the model at ``progress`` (0 to 1); return loss and accuracy, unevaluated."""
        warm = min(1.0, (number + 1) / WARMUP_STEPS)
        decay = 0.01 + 0.99 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        self.optimizer.learning_rate = self._peak * warm * decay
        figures = self._step(*(mx.array(array) for rows in batch for array in rows.arrays))
        mx.async_eval(figures, self._state)
        return figures

    def _update(self, *arrays: mx.array) -> mx.array:
        (loss, right), gradients = nn.value_and_grad(self.model, self._loss)(*arrays)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        self.optimizer.update(self.model, gradients)
        return mx.stack([loss, right])

    def _loss(self, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        master = self.model.trainable_parameters()
        self.model.update(tree_map(lambda weight: weight.astype(self._dtype), master))
        singles, pairs = arrays[:4], arrays[4:]
        features = self.model.features(mx.concatenate([singles[0], pairs[0]]))
        cut = features.shape[0] * singles[0].shape[0] // (singles[0].shape[0] + pairs[0].shape[0])
        total, right, count = mx.array(0.0), mx.array(0.0), mx.array(0.0)
        groups = ((features[:cut], singles), (features[cut:], pairs))
        for rows, (_, tokens, places, weights) in groups:
            logits = self.model(rows, tokens[:, :-1], places[:, :-1]).astype(mx.float32)
            losses = nn.losses.cross_entropy(logits, tokens[:, 1:])
            total = total + (losses * weights).sum()
            right = right + ((logits.argmax(-1) == tokens[:, 1:]) * weights).sum()
            count = count + weights.sum()
        self.model.update(master)
        return total / count, right / count


def save_state(trainer: Trainer, folder: Path) -> None:
    """Write what a later piece starts from, each file below 16 MB."""
    state = dict(tree_flatten(trainer.optimizer.state))
    parts = [named_weights(trainer.model)]
    for suffix in (".m", ".v"):
        names = [name for name in state if name.endswith(suffix)]
        parts.append({name.removesuffix(suffix): state[name] for name in names})
    for name, part in zip(STATE_FILES, parts, strict=True):
        mx.save_safetensors(str(folder / f"{name}.part.safetensors"), part)
        (folder / f"{name}.part.safetensors").replace(folder / f"{name}.safetensors")


def run(trainer: Trainer, options: argparse.Namespace, save: Callable[[], None]) -> None:
    """Train until the time is over, printing loss, accuracy and speed, and saving on the way."""
    source = batches(
        options.out / "tokenizer.json",
        rows=options.rows,
        workers=options.workers,
        seed=options.seed,
    )
    batch = next(source)
    start = since = saved = time.perf_counter()
    figures: list[mx.array] = []
    number, waited = 0, 0.0
    while (progress := (time.perf_counter() - start) / (60 * options.minutes)) < 1:
        figures.append(trainer.step(batch, progress, number))
        number += 1
        before = time.perf_counter()
        batch = next(source)
        waited += time.perf_counter() - before
        now = time.perf_counter()
        if number % LOG_EVERY == 0:
            loss, right = (figure.item() for figure in mx.mean(mx.stack(figures), axis=0))
            now = time.perf_counter()
            print(f"step {number} loss {loss:.4f} right {right:.2%} {progress:.0%} "
                  f"{LOG_EVERY / (now - since):.1f} steps/s, "
                  f"{waited / (now - since):.0%} of the time for pictures", flush=True)  # fmt: skip
            since, figures, waited = now, [], 0.0
        elif len(figures) > 1:
            mx.eval(figures[-2])
        if now - saved > SAVE_EVERY_S:
            save()
            saved = now
    save()
    source.close()


def parse_options() -> argparse.Namespace:
    """Return the command line."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    parser = argparse.ArgumentParser(description="Train the model that sees.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="train this long")
    parser.add_argument("--rows", type=int, default=192 if on_gpu else 24,
                        help="conversations about one picture in a step")  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--text-layers", type=int, default=TEXT_LAYERS,
                        help="the same as in an earlier piece; 5 still fit into 5 MB")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="folder of an earlier piece, or of a model")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16" if on_gpu else "float32"
    )
    return parser.parse_args()


def main() -> None:
    """Train one piece."""
    options = parse_options()
    old = options.resume
    tokenizer = Tokenizer.from_file(str(old / "tokenizer.json")) if old else train_tokenizer()
    save_tokenizer(tokenizer, options.out)
    config = config_of(tokenizer, options.text_layers)
    model = new_model(config, options.seed)
    count = sum(weight.size for weight in named_weights(model).values())
    print(f"{count:,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    trainer = Trainer(model, learning_rate=options.learning_rate, dtype=getattr(mx, options.dtype))
    if old:
        trainer.resume(old)

    def save() -> None:
        save_state(trainer, options.out)
        save_model(model, config, options.out)

    run(trainer, options, save)


if __name__ == "__main__":
    main()
