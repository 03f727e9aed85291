"""``demo:sentiment``: tells whether a review praises or blames."""

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
    """The model's ``config.json``."""
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
    """Endless batches of ever new reviews."""
    rng = Random(seed)
    while True:
        drawn = [_drawn(rng) for _ in range(POOL)]
        encoded = [one.ids for one in tokenizer.encode_batch_fast([one.text for one in drawn])]
        found = by_length([len(ids) for ids in encoded], MAX_TOKENS)
        rng.shuffle(found)
        for places in found:
            labels = mx.array([drawn[place].label for place in places])
            yield rows([encoded[place] for place in places]), labels


def _drawn(rng: Random) -> reviews.Review:
    if rng.random() < SINGLE_SHARE:
        return reviews.single_clause(rng)
    return reviews.review(rng, "train", reviews.MANY_WORDS)


def loss(model: Any, batch: Batch) -> mx.array:
    """Cross-entropy of the labels."""
    given, labels = batch
    logits = model.sequence_logits(model(given.ids, given.mask), given.mask)
    return nn.losses.cross_entropy(logits, labels, reduction="mean")
