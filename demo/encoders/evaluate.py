"""Accuracy of the package's encoders on held-out texts.

python -m demo.encoders.evaluate [NAME ...] [--limit N] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import mlx.core as mx
from tokenizers import Tokenizer

from demo.encoders import embed, facts, masked_lm, reviews, reward, sentences
from demo.encoders.answers import EXERCISES, AnswerPair, answer_pair
from demo.encoders.batches import rows
from demo.encoders.networks import MAX_LENGTH
from mlx_parallm.demo_models.folders import DEMO_FOLDERS, PREFIX
from mlx_parallm.models.loading import load_encoder

BATCH = 100
Scores = dict[str, float]
"""Shares, 0 to 1, by what they are of; "all" is the one that counts."""


class Stored:
    """A stored encoder, computing in float32."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_encoder(folder, mx.float32).model
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts with special tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts)]


def _mean(values: list[bool]) -> float:
    return sum(values) / len(values)


def _bools(array: mx.array) -> list[bool]:
    return cast("list[bool]", array.tolist())


def masked_lm_scores(stored: Stored, limit: int, seed: int) -> Scores:
    """Return the share of masks filled correctly, in ``limit`` held-out sentences and by kind.

    Kinds with few sentences have fewer.
    """
    scores = {}
    for kind in ("all", *sentences.KINDS):
        rng = Random(f"{kind}{seed}")
        texts = list(
            dict.fromkeys(
                sentences.sentence(rng, "held_out")
                if kind == "all"
                else sentences.sentence_of(kind, rng, "held_out")
                for _ in range(limit)
            )
        )
        scores[kind] = _mean(_filled(stored, rng, texts))
    return scores


def _filled(stored: Stored, rng: Random, texts: list[str]) -> list[bool]:
    right: list[bool] = []
    encoded = sorted(stored.encode(texts), key=len)
    for start in range(0, len(encoded), BATCH):
        batch = masked_lm.masked(rng, encoded[start : start + BATCH])
        guesses = mx.argmax(masked_lm.logits(stored.model, batch), axis=-1)
        right += _bools(guesses == batch[2])
    return right


def sentiment_scores(stored: Stored, limit: int, seed: int) -> Scores:
    """Return the share of reviews whose sentiment is recognised."""
    rng = Random(f"sentiment{seed}")
    drawn = [reviews.review(rng, "held_out") for _ in range(limit)]
    drawn.sort(key=lambda example: len(example.text))
    right: list[bool] = []
    for start in range(0, limit, BATCH):
        some = drawn[start : start + BATCH]
        batch = rows(stored.encode([example.text for example in some]))
        logits = stored.model.sequence_logits(stored.model(batch.ids, batch.mask), batch.mask)
        labels = mx.array([example.label for example in some])
        right += _bools(mx.argmax(logits, axis=-1) == labels)
    return {"all": _mean(right)}


def embed_scores(stored: Stored, limit: int, seed: int) -> Scores:
    """Return the share of queries whose own statement is the nearest of ``limit`` (recall@1)."""
    pairs = facts.pairs(Random(f"embed{seed}"), limit, "held_out")
    queries = _vectors(stored, [pair.query for pair in pairs])
    statements = _vectors(stored, [pair.statement for pair in pairs])
    nearest = mx.argmax(queries @ statements.T, axis=-1)
    right = _bools(nearest == mx.arange(limit))
    asks = [pair.query.endswith("?") for pair in pairs]
    return {
        "all": _mean(right),
        "questions": _mean([ok for ok, ask in zip(right, asks, strict=True) if ask]),
        "other wordings": _mean([ok for ok, ask in zip(right, asks, strict=True) if not ask]),
    }


def _vectors(stored: Stored, texts: list[str]) -> mx.array:
    encoded = stored.encode(texts)
    return mx.concatenate(
        [
            embed.vectors(stored.model, rows(encoded[start : start + BATCH]))
            for start in range(0, len(encoded), BATCH)
        ]
    )


def reward_scores(stored: Stored, limit: int, seed: int) -> Scores:
    """Return the share of pairs ranked correctly, ``limit`` per exercise; "all" is their mean."""
    scores = {}
    for task in EXERCISES:
        rng = Random(f"{task}{seed}")
        pairs = [_short_pair(stored, rng, task) for _ in range(limit)]
        scores[task] = _mean(ranked(stored, pairs))
    return {"all": sum(scores.values()) / len(scores)} | scores


def _short_pair(stored: Stored, rng: Random, task: str) -> AnswerPair:
    """Return a held-out pair that fits into the model, the right chat in words that it knows."""
    while True:
        pair = answer_pair(rng, "held_out", task)
        right, wrong = reward.encode(stored.tokenizer, pair.chats())
        fits = max(len(right), len(wrong)) <= MAX_LENGTH
        if fits and reward.is_known(stored.tokenizer, right):
            return pair


def ranked(stored: Stored, pairs: list[AnswerPair]) -> list[bool]:
    """Return, for each pair, True if its right answer scores higher."""
    encoded = sorted(reward.encoded_pairs(stored.tokenizer, pairs), key=lambda two: len(two[0]))
    results: list[bool] = []
    for start in range(0, len(encoded), BATCH):
        some = encoded[start : start + BATCH]
        batch = rows([right for right, _ in some] + [wrong for _, wrong in some])
        scores = stored.model.sequence_logits(stored.model(batch.ids, batch.mask), batch.mask)[:, 0]
        results += _bools(scores[: len(some)] > scores[len(some) :])
    return results


EVALUATIONS: dict[str, tuple[Callable[[Stored, int, int], Scores], int]] = {
    "mlm": (masked_lm_scores, 2000),
    "sentiment": (sentiment_scores, 2000),
    "embed": (embed_scores, 1000),
    "reward": (reward_scores, 300),
}
"""The measures of an encoder, and the number of texts, facts or pairs of each exercise."""


def main() -> None:
    """Evaluate the encoders of the command line."""
    parser = argparse.ArgumentParser(description="Accuracy on held-out texts.")
    parser.add_argument("names", nargs="*", choices=EVALUATIONS, default=list(EVALUATIONS))
    parser.add_argument("--limit", type=int, help="texts, facts, or pairs an exercise")
    parser.add_argument("--folder", type=Path, help="of another model than the package's")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.names:
        measure, limit = EVALUATIONS[name]
        stored = Stored(options.folder or DEMO_FOLDERS[PREFIX + name])
        for part, share in measure(stored, options.limit or limit, options.seed).items():
            print(f"{name:10} {part:24} {share:6.1%}", flush=True)


if __name__ == "__main__":
    main()
