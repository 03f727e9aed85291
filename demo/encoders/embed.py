"""``demo:embed``: puts questions and other wordings near the facts they are about."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from demo.encoders import facts
from demo.encoders.batches import Rows, rows
from demo.encoders.networks import bert_config

DIMS = 96
PAIRS = 64
TEMPERATURE = 0.05

Batch = tuple[Rows, Rows]
"""Queries, and the statements that belong to them in the same order."""


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return bert_config(tokenizer.get_vocab_size(), dims=DIMS, layers=2, architecture="BertModel")


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Yield batches of new pairs without end."""
    rng = Random(seed)
    while True:
        drawn = facts.pairs(rng, PAIRS, "train")
        texts = [pair.query for pair in drawn] + [pair.statement for pair in drawn]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        yield rows(encoded[:PAIRS]), rows(encoded[PAIRS:])


def vectors(model: Any, batch: Rows) -> mx.array:
    """Return vectors ``[rows, dims]`` of norm 1: the mean of the tokens' hidden states."""
    weights = batch.mask.astype(mx.float32)[..., None]
    mean = (model(batch.ids, batch.mask) * weights).sum(axis=1) / weights.sum(axis=1)
    return mean / mx.linalg.norm(mean, axis=-1, keepdims=True)


def loss(model: Any, batch: Batch) -> mx.array:
    """Return the InfoNCE loss (arXiv:1807.03748) of each text against the batch's partners."""
    scores = vectors(model, batch[0]) @ vectors(model, batch[1]).T / TEMPERATURE
    partner = mx.arange(scores.shape[0])
    forward = nn.losses.cross_entropy(scores, partner, reduction="mean")
    return (forward + nn.losses.cross_entropy(scores.T, partner, reduction="mean")) / 2
