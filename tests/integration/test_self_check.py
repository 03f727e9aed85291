"""The differences that the check of a path accepts as rounding, and those it refuses."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3

from mlx_parallm.worker.generation.load.self_check import CheckedText, check_path, stock_texts
from mlx_parallm.worker.ops import at_once

VOCAB = 40
LOUD = 7  # the token whose logit is far from all others


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a model whose head adds -200 to one logit, where bfloat16 numbers are 1 apart."""
    mx.random.seed(3)
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        rope_theta=1e4,
        tie_word_embeddings=False,
    )
    trunk = qwen3.Model(args)
    offset = mx.where(mx.arange(VOCAB) == LOUD, -200.0, 0.0)

    class Loud:
        layers = trunk.layers

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            return trunk(ids, cache=cache) + offset

    return Loud()


class PerturbedPath:
    """Returns the stock model's log-probabilities, with one token's moved."""

    def __init__(self, texts: list[CheckedText], token: int, by: float) -> None:
        self.texts, self.token, self.by = texts, token, by

    def logits(self, sequences: Any, tokens: mx.array, rows: Any) -> mx.array:
        actual = mx.stack(
            [
                self.texts[sequence.seq_id].logprobs[sequence.start + len(sequence.token_ids) - 1]
                for sequence in sequences
            ]
        )
        return actual + self.by * (mx.arange(VOCAB) == self.token)

    def arrays(self) -> list[mx.array]:
        return []


@pytest.mark.parametrize(
    ("token", "by", "agrees"),
    [
        (LOUD, 1.0, True),  # the next number of bfloat16
        (LOUD, 50.0, False),
        (LOUD + 1, 0.1, True),
        (LOUD + 1, 1.0, False),
        (LOUD, float("nan"), False),
    ],
)
def test_large_logits_are_rounded_by_more(model: Any, token: int, by: float, agrees: bool) -> None:
    texts = at_once(stock_texts)(model, VOCAB, None)
    logprobs = np.array(texts[0].logprobs)
    assert logprobs[:, LOUD].max() < -190
    assert np.sort(logprobs, axis=1)[:, 1].min() > -30
    path: Any = PerturbedPath(texts, token, by)
    _, error, is_accepted = at_once(check_path)(path, texts, 16, "bfloat16")
    assert error is None
    assert is_accepted == agrees
