"""The model ``demo:sentiment``, which classifies reviews as positive or negative."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from demo.encoders import reviews
from demo.encoders.batches import Rows, by_length, rows
from demo.encoders.networks import bert_config

LABELS = {0: "negative", 1: "positive"}
POOL, MAX_TOKENS = 2048, 2048
SINGLE_SHARE = 0.25

Batch = tuple[Rows, mx.array]
"""Rows and their labels."""


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return bert_config(
        tokenizer.get_vocab_size(),
        dims=64,
        layers=2,
        architecture="BertForSequenceClassification",
        problem_type="single_label_classification",
        id2label=LABELS,
        label2id={name: label for label, name in LABELS.items()},
    )


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Yield batches of new reviews without end."""
    rng = Random(seed)
    while True:
        drawn = [_drawn(rng) for _ in range(POOL)]
        encoded = [
            encoding.ids
            for encoding in tokenizer.encode_batch_fast([example.text for example in drawn])
        ]
        groups = by_length([len(ids) for ids in encoded], MAX_TOKENS)
        rng.shuffle(groups)
        for places in groups:
            labels = mx.array([drawn[place].label for place in places])
            yield rows([encoded[place] for place in places]), labels


def _drawn(rng: Random) -> reviews.Review:
    if rng.random() < SINGLE_SHARE:
        return reviews.single_clause(rng)
    return reviews.review(rng, "train", reviews.MANY_WORDS)


def loss(model: Any, batch: Batch) -> mx.array:
    """Return the cross-entropy of the labels."""
    texts, labels = batch
    logits = model.sequence_logits(model(texts.ids, texts.mask), texts.mask)
    return nn.losses.cross_entropy(logits, labels, reduction="mean")
