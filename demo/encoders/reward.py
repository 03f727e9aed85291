"""``demo:reward``: scores answers to the demonstration model's exercises."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from tokenizers import Tokenizer

from demo.encoders import masked_lm, tokenizers
from demo.encoders.answers import AnswerPair, answer_pair
from demo.encoders.batches import Rows, by_length, rows
from demo.encoders.networks import MAX_LENGTH, modernbert_config
from demo.encoders.tokenizers import CLS, SEP, SEP_ID, UNK
from demo.example import Message

VOCAB_SIZE = 1024
DIMS = 96
POOL, MAX_TOKENS = 1024, 1024
FILLED_SHARE = 0.3
CHAT_TEMPLATE = (
    "{{ '" + CLS + "' }}{% for message in messages %}{{ message['content'] }}{{ '" + SEP + "' }}"
    "{% endfor %}"
)
"""Every turn ends with the separator; the last one is the answer to be judged."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right answers and wrong ones in one batch: the first half of its rows, and the second.

    Attributes:
        given: the rows.
        faults: 1 for tokens where a wrong answer leaves the right one, int32 ``[rows, length]``.
        answers: 1 for tokens of answers, int32 ``[rows, length]``.
    """

    texts: Rows
    faults: mx.array
    answers: mx.array


class Judge(nn.Module):
    """The reward model with two more heads that help it to learn, and are not kept.

    One fills masks in right answers; the other, a probe, says of each token whether it is wrong.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.probe = nn.Linear(DIMS, 1)

    def filled(self, batch: Rows, places: mx.array) -> mx.array:
        """Return logits ``[masks, vocabulary]`` at flat places."""
        hidden = self.model(batch.ids, batch.mask).reshape(-1, DIMS)[places]
        return self.model.model.embeddings.tok_embeddings.as_linear(hidden)

    def __call__(self, batch: Rows) -> tuple[mx.array, mx.array]:
        """Return scores ``[rows]``, and logits of faults ``[rows, length]``."""
        hidden = self.model(batch.ids, batch.mask)
        return self.model.sequence_logits(hidden, batch.mask)[:, 0], self.probe(hidden)[..., 0]


def train_tokenizer(pairs: int = 20_000, seed: int = 7) -> Tokenizer:
    """Return the reward model's own tokenizer of the words of its exercises."""

    def made() -> Iterator[str]:
        rng = Random(seed)
        for _ in range(pairs):
            pair = answer_pair(rng, "train")
            yield from (str(message["content"]) for message in pair.messages)
            yield pair.right

    return tokenizers.word_pieces(made(), VOCAB_SIZE)


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the model's ``config.json``."""
    return modernbert_config(
        tokenizer.get_vocab_size(),
        dims=DIMS,
        layers=3,
        architecture="ModernBertForSequenceClassification",
        problem_type="regression",
        id2label={0: "reward"},
        label2id={"reward": 0},
    )


def rendered(messages: Sequence[Message]) -> str:
    """Return a chat as the template writes it."""
    return CLS + "".join(f"{message['content']}{SEP}" for message in messages)


def encode(tokenizer: Tokenizer, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Return the ids of chats."""
    texts = [rendered(chat) for chat in chats]
    return [
        encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def encoded_pairs(
    tokenizer: Tokenizer, pairs: Sequence[AnswerPair]
) -> list[tuple[list[int], list[int]]]:
    """Return the ids of both chats of each pair."""
    chats = [chat for pair in pairs for chat in pair.chats()]
    ids = encode(tokenizer, chats)
    return list(zip(ids[::2], ids[1::2], strict=True))


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Yield batches of new pairs that fit into the model, without end."""
    rng = Random(seed)
    while True:
        pairs = encoded_pairs(tokenizer, [answer_pair(rng, "train") for _ in range(POOL)])
        pairs = [pair for pair in pairs if is_known(tokenizer, pair[0])]
        lengths = [max(map(len, pair)) for pair in pairs]
        for places in _short(rng, lengths, MAX_TOKENS // 2):
            yield batch([pairs[place] for place in places])


def filling_batches(tokenizer: Tokenizer, seed: int) -> Iterator[masked_lm.Batch]:
    """Yield batches of right answers with masks in them, without end."""
    rng = Random(f"filling{seed}")
    while True:
        chats = [answer_pair(rng, "train").chats()[0] for _ in range(POOL)]
        encoded = [ids for ids in encode(tokenizer, chats) if is_known(tokenizer, ids)]
        for places in _short(rng, [len(ids) for ids in encoded], MAX_TOKENS):
            chosen = [encoded[place] for place in places]
            answers = [range(answer_start(ids), len(ids) - 1) for ids in chosen]
            yield masked_lm.masked(rng, chosen, share=FILLED_SHARE, possible=answers)


def is_known(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """True if no word is spelled or unknown."""
    tokens = map(tokenizer.id_to_token, ids)
    return not any(token is None or token.startswith("##") or token == UNK for token in tokens)


def _short(rng: Random, lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Return batches, in any order, of the indices of texts that fit into the model."""
    batches = by_length([length for length in lengths if length <= MAX_LENGTH], max_tokens)
    fitting = [place for place, length in enumerate(lengths) if length <= MAX_LENGTH]
    rng.shuffle(batches)
    return [[fitting[place] for place in places] for places in batches]


def filling_loss(judge: Judge, batch: masked_lm.Batch) -> mx.array:
    """Return the cross-entropy at the masks."""
    texts, places, hidden = batch
    return nn.losses.cross_entropy(judge.filled(texts, places), hidden, reduction="mean")


def batch(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Return the arrays of some pairs."""
    texts = rows([right for right, _ in pairs] + [wrong for _, wrong in pairs])
    faults = np.zeros(texts.ids.shape, dtype=np.int32)
    answers = np.zeros(texts.ids.shape, dtype=np.int32)
    for row, (right, wrong) in enumerate(pairs):
        start = answer_start(right)
        answers[row, start : len(right)] = 1
        answers[row + len(pairs), start : len(wrong)] = 1
        for place in _differences(right[start:], wrong[start:]):
            faults[row + len(pairs), start + place] = 1
    return Batch(texts, mx.array(faults), mx.array(answers))


def answer_start(ids: Sequence[int]) -> int:
    """Return the place behind the last separator but one."""
    return len(ids) - 1 - list(reversed(ids[:-1])).index(SEP_ID)


def _differences(right: list[int], wrong: list[int]) -> Iterator[int]:
    """Yield the places at which a wrong answer differs; after a gap, the next place."""
    for kind, _, _, start, end in SequenceMatcher(None, right, wrong, False).get_opcodes():
        if kind != "equal":
            yield from range(start, max(end, start + 1))


def loss(judge: Judge, batch: Batch) -> mx.array:
    """Return a loss that puts right answers above 0 and above wrong ones (Bradley-Terry).

    The probe's loss is added.
    """
    scores, faults = judge(batch.texts)
    half = scores.shape[0] // 2
    order = nn.softplus(scores[half:] - scores[:half]).mean()
    own = (nn.softplus(-scores[:half]) + nn.softplus(scores[half:])).mean()
    each = nn.losses.binary_cross_entropy(faults, batch.faults.astype(mx.float32), reduction="none")
    probed = (each * batch.answers).sum() / batch.answers.sum()
    return order + own / 2 + 4 * probed
