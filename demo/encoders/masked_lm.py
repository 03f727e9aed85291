"""``demo:mlm``: guesses the masked words of a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tokenizers import Tokenizer

from demo.encoders import facts, reviews, sentences, tokenizers
from demo.encoders.batches import Rows, by_length, rows
from demo.encoders.networks import bert_config

VOCAB_SIZE = 1408
MASKED_SHARE = 0.15
POOL, MAX_TOKENS = 2048, 2048
VERDICT_SHARE = 0.25
"""Share of texts drawn as reviews with a verdict, beside those of the mixture."""
LAST_SHARE = 0.4
"""Share of texts with only the last word masked, as in prompts that classify."""

Batch = tuple[Rows, mx.array, mx.array]
"""Rows, the flat places of masks in them, the ids that belong there."""


def train_tokenizer(texts: int = 15_000, seed: int = 7) -> Tokenizer:
    """Return the tokenizer of the masked LM, the sentiment classifier and the embedder."""

    def made() -> Iterator[str]:
        rng = Random(seed)
        for _ in range(texts):
            yield sentences.sentence(rng, "train")
            yield reviews.review(rng, "held_out").text
            yield facts.pair(rng, facts.fact(rng, "train")).statement

    return tokenizers.word_pieces(made(), VOCAB_SIZE)


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return bert_config(
        tokenizer.get_vocab_size(), dims=96, layers=3, architecture="BertForMaskedLM"
    )


def batches(
    tokenizer: Tokenizer,
    seed: int,
    *,
    verdict_share: float = VERDICT_SHARE,
    last_share: float = LAST_SHARE,
) -> Iterator[Batch]:
    """Yield batches of new sentences without end."""
    rng = Random(seed)
    while True:
        texts = [_drawn(rng, verdict_share) for _ in range(POOL)]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        groups = by_length([len(ids) for ids in encoded], MAX_TOKENS)
        rng.shuffle(groups)
        for places in groups:
            chosen = [encoded[place] for place in places]
            yield masked(rng, chosen, possible=[_maskable(rng, ids, last_share) for ids in chosen])


def _drawn(rng: Random, verdict_share: float) -> str:
    if rng.random() < verdict_share:
        return sentences.sentence_of(sentences.VERDICT_KIND, rng, "train")
    return sentences.sentence(rng, "train")


def _maskable(rng: Random, ids: list[int], last_share: float) -> range:
    """Places that may be masked: by chance only the last word, which a sign and [SEP] follow."""
    last = len(ids) - 3
    return range(last, last + 1) if last > 0 and rng.random() < last_share else range(1, last + 2)


def masked(
    rng: Random,
    encoded: list[list[int]],
    *,
    share: float = MASKED_SHARE,
    possible: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Return texts with some of their tokens, at least one each, replaced by the mask.

    As in BERT's training (arXiv:1810.04805), without its random and unchanged tokens: what is
    served is asked at masks only.

    Args:
        rng: draws the tokens.
        encoded: the texts' ids, with the special ones at both ends.
        share: share of the maskable tokens that are masked.
        possible: places of these tokens in each text; all but the special ones if not given.
    """
    inputs = [list(ids) for ids in encoded]
    chosen: list[tuple[int, int]] = []
    for row, ids in enumerate(inputs):
        places = possible[row] if possible else range(1, len(ids) - 1)
        for place in rng.sample(places, max(1, round(share * len(places)))):
            chosen.append((row, place))
            ids[place] = tokenizers.MASK_ID
    made = rows(inputs)
    length = made.ids.shape[1]
    flat = mx.array([row * length + place for row, place in chosen])
    return made, flat, mx.array([encoded[row][place] for row, place in chosen])


def logits(model: Any, batch: Batch) -> mx.array:
    """Return logits ``[masks, vocabulary]``."""
    masked_rows, places, _ = batch
    hidden = model(masked_rows.ids, masked_rows.mask)
    return model.mlm_logits(hidden.reshape(-1, hidden.shape[-1])[places])


def loss(model: Any, batch: Batch) -> mx.array:
    """Return the cross-entropy at the masks."""
    return nn.losses.cross_entropy(logits(model, batch), batch[2], reduction="mean")
