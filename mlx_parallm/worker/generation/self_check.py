"""Runs a path on random prompts against the stock model, before it serves anybody.

Some architectures run without an error in a path and are wrong, so no list decides: this does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.step_rows import token_array
from mlx_parallm.worker.model_errors import MODEL_ERRORS

# Largest difference of a log-probability that rounding explains, by dtype, of logits up to
# LARGE_LOGIT; that of larger ones grows with them, as the numbers of a dtype lie further apart.
TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
LARGE_LOGIT = 32.0
PROMPT_LENGTHS = (1, 7, 19, 34)
DECODE_STEPS = 3
CHUNK = 11
MAX_CHUNKS = 24
# Windows longer than this are not exceeded by the check's longest prompt.
MAX_CHECKED_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class CheckedText:
    """A random sequence and what the stock model says after each of its tokens.

    Attributes:
        token_ids: the sequence.
        logprobs: float32 ``[len(token_ids), vocabulary]``.
        units: of the same shape: how many times as coarse as those of ordinary logits they are.
    """

    token_ids: list[int]
    logprobs: mx.array
    units: mx.array


def stock_texts(model: Any, vocab_size: int, window: int | None) -> list[CheckedText]:
    """Return what the stock model says of ``random_texts``, each alone: prompt, then decode."""
    return [_checked(model, text) for text in random_texts(vocab_size, window)]


def random_texts(vocab_size: int, window: int | None) -> list[list[int]]:
    """Return ragged random sequences, the same in every process.

    ``window`` is a length that two of them are to exceed, if that is not too long to try.
    """
    rng = random.Random(0)
    return [
        [rng.randrange(vocab_size) for _ in range(length + DECODE_STEPS)]
        for length in _prompt_lengths(window)
    ]


def rehearse(path: ForwardPath, texts: Sequence[list[int]], block_size: int) -> None:
    """Run the steps of the check and judge nothing.

    A compiled path learns from the first decode steps what the layers ask of a plan; afterwards it
    computes as a path does that was checked.
    """
    for sequences in _steps(texts, block_size):
        logits = path.logits(sequences, token_array(sequences), _last_rows(sequences))
        mx.eval(logits, path.arrays())


def largest_difference(path: ForwardPath, texts: Sequence[CheckedText], block_size: int) -> float:
    """Largest |difference of log-probabilities| between a path and the stock model, in units.

    Sequences join at different steps; prompts are prefilled in chunks beside rows that decode.

    Raises:
        whatever the path raises for a model it does not suit; see ``MODEL_ERRORS``.
    """
    worst = 0.0
    for sequences in _steps([text.token_ids for text in texts], block_size):
        rows = _last_rows(sequences)
        logits = path.logits(sequences, token_array(sequences), rows).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        ends = [(texts[one.seq_id], one.start + len(one.token_ids) - 1) for one in sequences]
        target = mx.stack([text.logprobs[end] for text, end in ends])
        units = mx.stack([text.units[end] for text, end in ends])
        # Both minus infinity is agreement.
        difference = mx.where(logprobs == target, 0.0, mx.abs(logprobs - target) / units).max()
        mx.eval(difference, path.arrays())
        value = cast("float", difference.item())
        worst = max(worst, value if value == value else float("inf"))
    return worst


def check_path(
    path: ForwardPath, texts: Sequence[CheckedText], block_size: int, dtype: str
) -> tuple[float | None, str | None, bool]:
    """The path's difference or the error it met, and whether it agrees up to rounding."""
    try:
        worst = largest_difference(path, texts, block_size)
    except MODEL_ERRORS as reason:
        return None, f"{type(reason).__name__}: {reason}", False
    return worst, None, worst <= TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def blocks_needed(block_size: int, window: int | None) -> int:
    """Blocks that the check's sequences occupy."""
    longest = max(_prompt_lengths(window)) + DECODE_STEPS
    return len(PROMPT_LENGTHS) * (-(-longest // block_size))


def _prompt_lengths(window: int | None) -> list[int]:
    lengths: list[int] = list(PROMPT_LENGTHS)
    if window is not None and window <= MAX_CHECKED_WINDOW:
        # Two of different lengths: what is right of the longest row of a batch may be wrong of one
        # that is padded.
        lengths[-2] = max(lengths[-2], window + 9)
        lengths[-1] = max(lengths[-1], window + window // 8 + 20)
    return lengths


def _checked(model: Any, text: list[int]) -> CheckedText:
    caches = make_prompt_cache(model)
    prompt_len = len(text) - DECODE_STEPS
    parts = [text[:prompt_len], *([token] for token in text[prompt_len:])]
    logits = mx.concatenate([model(mx.array([part]), cache=caches)[0] for part in parts])
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    units = mx.maximum(mx.abs(logits) / LARGE_LOGIT, 1.0)
    mx.eval(logprobs, units)
    return CheckedText(text, logprobs, units)


def _steps(texts: Sequence[list[int]], block_size: int) -> list[list[ScheduledSequence]]:
    """Steps in which sequence i joins at step i, prefills by chunks, then decodes.

    Each keeps its last two tokens until all have prefilled, so that all decode in one batch.
    """
    width = max(-(-len(text) // block_size) for text in texts)
    progress = [0] * len(texts)
    steps = []
    number = 0
    while any(progress[i] < len(text) for i, text in enumerate(texts)):
        step = []
        prefilling = any(progress[i] < len(text) - DECODE_STEPS for i, text in enumerate(texts))
        for i, text in enumerate(texts):
            done, prompt_len = progress[i], len(text) - DECODE_STEPS
            keeps = prefilling and done >= len(text) - 2
            if i > number or done == len(text) or keeps:
                continue
            chunk = max(CHUNK, prompt_len // MAX_CHUNKS)
            end = min(done + chunk, prompt_len) if done < prompt_len else done + 1
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
