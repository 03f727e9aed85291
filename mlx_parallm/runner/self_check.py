"""Runs a path on random prompts against the stock model, before it serves anybody.

Some architectures run without an error in a path and are wrong, so no list decides: this does.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_parallm.batch import ScheduledSequence
from mlx_parallm.runner.model_errors import MODEL_ERRORS
from mlx_parallm.runner.paths.base import ForwardPath

logger = logging.getLogger(__name__)

# Largest difference of a log-probability that rounding explains, by dtype.
TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
PROMPT_LENGTHS = (1, 7, 19, 34)
DECODE_STEPS = 3
CHUNK = 11
# Windows longer than this are not exceeded by the check's longest prompt.
MAX_CHECKED_WINDOW = 512


def largest_difference(
    path: ForwardPath, model: Any, *, vocab_size: int, block_size: int, window: int | None
) -> float:
    """Largest |difference of log-probabilities| between a path and the stock model.

    Ragged random sequences join at different steps; prompts are prefilled in chunks beside rows
    that decode.

    Raises:
        whatever the path raises for a model it does not suit; see ``MODEL_ERRORS``.
    """
    rng = random.Random(0)
    lengths = [length + DECODE_STEPS for length in PROMPT_LENGTHS]
    if window is not None and window <= MAX_CHECKED_WINDOW:
        lengths[-1] = max(lengths[-1], window + 9)
    texts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    expected = [_stock_logprobs(model, text) for text in texts]
    worst = 0.0
    for sequences in _steps(texts, block_size):
        rows = _last_rows(sequences)
        logits = path.logits(sequences, rows).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for row, one in enumerate(sequences):
            target = expected[one.seq_id][one.start + len(one.token_ids) - 1]
            logprobs_row = logprobs[row]
            difference = mx.abs(logprobs_row - target)
            # Both minus infinity is agreement.
            difference = mx.where(logprobs_row == target, 0.0, difference).max()
            mx.eval(difference, path.arrays())
            value = float(difference.item())
            worst = max(worst, value if value == value else float("inf"))
    return worst


def is_exact(
    path: ForwardPath,
    model: Any,
    *,
    vocab_size: int,
    block_size: int,
    window: int | None,
    dtype: str,
) -> bool:
    """Whether a path gives what the stock model gives, up to rounding."""
    try:
        worst = largest_difference(
            path, model, vocab_size=vocab_size, block_size=block_size, window=window
        )
    except MODEL_ERRORS as reason:
        logger.info("path %s does not suit this model: %s", path.name, reason)
        return False
    logger.info("path %s differs from the stock model by %.2g", path.name, worst)
    return worst <= TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def blocks_needed(block_size: int, window: int | None) -> int:
    """Blocks that the check's sequences occupy."""
    longest = max(PROMPT_LENGTHS) + DECODE_STEPS
    if window is not None and window <= MAX_CHECKED_WINDOW:
        longest = max(longest, window + 9)
    return len(PROMPT_LENGTHS) * (-(-longest // block_size))


def _stock_logprobs(model: Any, text: Sequence[int]) -> mx.array:
    logits = model(mx.array([text]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    return logprobs


def _steps(texts: list[list[int]], block_size: int) -> list[list[ScheduledSequence]]:
    """Steps in which sequence i joins at step i, prefills by chunks, then decodes."""
    width = max(-(-len(text) // block_size) for text in texts)
    progress = [0] * len(texts)
    steps = []
    number = 0
    while any(progress[i] < len(text) for i, text in enumerate(texts)):
        step = []
        for i, text in enumerate(texts):
            done, prompt_len = progress[i], len(text) - DECODE_STEPS
            if i > number or done == len(text):
                continue
            end = min(done + CHUNK, prompt_len) if done < prompt_len else done + 1
            # Tables are spread over the pool so that no two sequences are neighbours.
            table = tuple(block * len(texts) + i for block in range(width))
            used = -(-end // block_size)
            step.append(
                ScheduledSequence(
                    seq_id=i,
                    slot=i,
                    start=done,
                    token_ids=tuple(text[done:end]),
                    block_table=table[:used],
                )
            )
            progress[i] = end
        steps.append(sorted(step, key=lambda one: len(one.token_ids)))
        number += 1
    return steps


def _last_rows(sequences: Sequence[ScheduledSequence]) -> list[int]:
    rows, total = [], 0
    for one in sequences:
        total += len(one.token_ids)
        rows.append(total - 1)
    return rows
