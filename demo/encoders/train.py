"""Trains one of the encoders that come with the package.

    python -m demo.encoders.train {mlm,sentiment,embed,reward} [--out FOLDER]

Makes the tokenizer, trains on texts that a program generates meanwhile, and writes a folder of
Hugging Face's form. Equal seeds give equal models on one machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from demo.encoders import embed, masked_lm, reward, sentiment, tokenizers
from demo.encoders.networks import (
    MAX_LENGTH,
    named_weights,
    new_model,
    save,
    save_sentence_transformers,
)
from demo.encoders.training import fit
from mlx_parallm.demo_models.folders import DEMO_FOLDERS, PREFIX


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a training.

    Attributes:
        batches: returns the training batches for a tokenizer and a seed.
        loss: the loss of the model, wrapped by the recipe's ``wrap``, on a batch.
        steps: number of updates.
        learning_rate: the highest learning rate.
    """

    batches: Callable[[Tokenizer, int], Iterator[Any]]
    loss: Callable[[Any, Any], mx.array]
    steps: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training settings of one encoder.

    Attributes:
        tokenizer: trains its tokenizer.
        config: its ``config.json``.
        stages: the stages of its training, in order.
        wrap: adds the parts that only training needs.
        chat_template: the template that turns chats into texts.
        finish: writes further files to the folder.
    """

    tokenizer: Callable[[], Tokenizer]
    config: Callable[[Tokenizer], dict[str, Any]]
    stages: tuple[Stage, ...]
    wrap: Callable[[Any], nn.Module] = lambda model: model
    chat_template: str = ""
    finish: Callable[[Path], None] = lambda folder: None


RECIPES: dict[str, Recipe] = {
    "mlm": Recipe(
        masked_lm.train_tokenizer,
        masked_lm.config,
        (
            Stage(masked_lm.batches, masked_lm.loss, 3500, 3e-3),
            # Verdicts need many examples, because a negation reverses them.
            Stage(
                partial(masked_lm.batches, verdict_share=0.7, last_share=0.8),
                masked_lm.loss,
                700,
                2e-3,
            ),
        ),
    ),
    "sentiment": Recipe(
        masked_lm.train_tokenizer,
        sentiment.config,
        (Stage(sentiment.batches, sentiment.loss, 1500, 2e-3),),
    ),
    "embed": Recipe(
        masked_lm.train_tokenizer,
        embed.config,
        (Stage(embed.batches, embed.loss, 2500, 2e-3),),
        finish=lambda folder: save_sentence_transformers(folder, embed.DIMS),
    ),
    "reward": Recipe(
        reward.train_tokenizer,
        reward.config,
        (
            Stage(reward.filling_batches, reward.filling_loss, 2000, 2e-3),
            Stage(reward.batches, reward.loss, 5000, 1.5e-3),
        ),
        wrap=reward.Judge,
        chat_template=reward.CHAT_TEMPLATE,
    ),
}


def make(name: str, folder: Path, *, seed: int = 1, effort: float = 1.0) -> None:
    """Train an encoder and write it; ``effort`` is a share of the recipe's steps."""
    recipe = RECIPES[name]
    tokenizer = recipe.tokenizer()
    config = recipe.config(tokenizer)
    model = new_model(config, seed)
    count = sum(weight.size for weight in named_weights(model).values())
    print(f"{count:,} parameters, {tokenizer.get_vocab_size()} tokens", flush=True)
    trained = recipe.wrap(model)
    for stage in recipe.stages:
        source = stage.batches(tokenizer, seed)
        steps = max(1, round(effort * stage.steps))
        fit(trained, stage.loss, source, steps=steps, learning_rate=stage.learning_rate)
    save(model, config, folder)
    tokenizers.save(tokenizer, folder, MAX_LENGTH, recipe.chat_template)
    recipe.finish(folder)


def main() -> None:
    """Train the encoders of the command line."""
    parser = argparse.ArgumentParser(description="Train one of the package's encoders.")
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--out", type=Path, help="folder to write instead of the package's own")
    parser.add_argument("--effort", type=float, default=1.0, help="share of the recipe's steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    folder = options.out or DEMO_FOLDERS[PREFIX + options.name]
    make(options.name, folder, seed=options.seed, effort=options.effort)


if __name__ == "__main__":
    main()
