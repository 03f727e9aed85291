"""Compares a path with the stock model on random prompts, when a model is loaded.

Some architectures run in a path without an error and give wrong results. So paths are chosen by
this check, and by no list of architectures. It runs in stages, with other models between them: its
functions return generators, see ``ops.Stages``.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.generation.load.checked_sources import CheckedSources, given
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.step_rows import token_array

# TOLERANCE is the largest difference of a log-probability that rounding explains, by dtype, for
# logits up to LARGE_LOGIT. It grows with larger logits, where a dtype's numbers are further apart.
TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
LARGE_LOGIT = 32.0
# MAX_NOISE: the difference that is explained, as a multiple of what another rounding changes.
MAX_NOISE = 3.0
# The texts have these prompts and this number of tokens after them. A prompt is prefilled by CHUNK
# tokens a step, a long one in MAX_CHUNKS steps.
PROMPT_LENGTHS = (1, 7, 19, 34)
DECODE_STEPS = 3
CHUNK = 11
MAX_CHUNKS = 24
# MAX_CHECKED_WINDOW is the longest window that the check's prompts exceed.
MAX_CHECKED_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class CheckedText:
    """A random sequence, and the stock model's log-probabilities after each of its tokens.

    Attributes:
        token_ids: the sequence.
        logprobs: the log-probabilities, float32 ``[len(token_ids), vocab]``.
        units: by how much the tolerance of each is larger than for ordinary logits, float32
            ``[len(token_ids), vocab]``.
    """

    token_ids: list[int]
    logprobs: mx.array
    units: mx.array


def stock_texts(
    model: Any,
    vocab_size: int,
    window: int | None,
    sources: CheckedSources | None = None,
    dtype: str = "float32",
) -> Generator[None, None, list[CheckedText]]:
    """Return ``random_texts`` with the stock model's results: a prompt each, then decode steps.

    Rounding of an encoder-decoder in 16 bits is measured: its scores may not be scaled, and their
    rounding then moves results by more than ``TOLERANCE``.
    """
    texts = random_texts(vocab_size, window)
    caches = [make_prompt_cache(model) for _ in texts]
    if sources is not None:
        sources.set_in(caches)
    checked = yield from _computed(model, texts, caches)
    if sources is None or dtype == "float32":
        return checked
    caches = [make_prompt_cache(model) for _ in texts]
    sources.set_in(caches, is_wide=False)
    rounded = yield from _computed(model, texts, caches)
    noise = max(
        cast("float", (mx.abs(text.logprobs - other.logprobs) / text.units).max().item())
        for text, other in zip(checked, rounded, strict=True)
    )
    factor = max(1.0, MAX_NOISE * noise / tolerance_of(dtype))
    return [replace(text, units=text.units * factor) for text in checked]


def _computed(
    model: Any, texts: Sequence[list[int]], caches: Sequence[Sequence[Any]]
) -> Generator[None, None, list[CheckedText]]:
    checked: list[CheckedText] = []
    for text, own in zip(texts, caches, strict=True):
        checked.append(stock_text(model, text, own))
        yield
    return checked


def random_texts(vocab_size: int, window: int | None) -> list[list[int]]:
    """Return ragged random sequences, the same in every process.

    Two of the sequences exceed ``window`` tokens, unless that is too long to try.
    """
    rng = random.Random(0)
    return [
        [rng.randrange(vocab_size) for _ in range(length + DECODE_STEPS)]
        for length in _prompt_lengths(window)
    ]


def rehearsed(
    path: ForwardPath,
    texts: Sequence[list[int]],
    block_size: int,
    sources: CheckedSources | None = None,
) -> Generator[None, None, ForwardPath]:
    """Return the path; if it is compiled, with the steps of the check run and no results compared.

    A compiled path learns from the first decode steps what the layers need of a plan. After a
    rehearsal it computes exactly as a path that was checked. Others learn nothing.
    """
    if not path.is_compiled:
        return path
    for sequences in given(sources, path, steps_of(texts, block_size)):
        logits = path.logits(sequences, token_array(sequences), _last_rows(sequences))
        mx.eval(logits, path.arrays())
        yield
    return path


def largest_difference(
    path: ForwardPath,
    texts: Sequence[CheckedText],
    block_size: int,
    sources: CheckedSources | None = None,
) -> Generator[None, None, float]:
    """Return the largest absolute difference of log-probabilities from the stock model's, in units.

    Sequences join at different steps, and prompts are prefilled in chunks beside decode rows. A
    path that does not suit the model may raise any of ``MODEL_ERRORS``.
    """

    def logits(sequences: Sequence[ScheduledSequence], rows: list[int]) -> mx.array:
        return path.logits(sequences, token_array(sequences), rows)

    steps = given(sources, path, steps_of([text.token_ids for text in texts], block_size))
    return (yield from largest_difference_of(steps, texts, logits, path.arrays))


def largest_difference_of(
    steps: Sequence[Sequence[ScheduledSequence]],
    texts: Sequence[CheckedText],
    logits_of: Callable[[Sequence[ScheduledSequence], list[int]], mx.array],
    arrays: Callable[[], Any],
    *,
    all_rows: bool = False,
) -> Generator[None, None, float]:
    """Return the largest absolute difference of log-probabilities in steps, in units.

    Args:
        steps: of the texts; sequence i computes text i.
        texts: with the stock model's results.
        logits_of: returns the logits of some rows of a step.
        arrays: returns the arrays in which a path keeps what steps computed.
        all_rows: True to compare all rows, False for the last one of each sequence.
    """
    worst = 0.0
    for sequences in steps:
        places = [
            (row, texts[sequence.seq_id], sequence.start + index)
            for row, sequence, index in _rows_of(sequences)
            if all_rows or index == len(sequence.token_ids) - 1
        ]
        logits = logits_of(sequences, [row for row, _, _ in places]).astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        target = mx.stack([text.logprobs[place] for _, text, place in places])
        units = mx.stack([text.units[place] for _, text, place in places])
        # Where both are minus infinity they agree.
        difference = mx.where(logprobs == target, 0.0, mx.abs(logprobs - target) / units).max()
        mx.eval(difference, arrays())
        value = cast("float", difference.item())
        worst = max(worst, value if value == value else float("inf"))
        yield
    return worst


def check_path(
    path: ForwardPath,
    texts: Sequence[CheckedText],
    block_size: int,
    dtype: str,
    sources: CheckedSources | None = None,
) -> Generator[None, None, tuple[float | None, str | None, bool]]:
    """Return the path's difference, or the error that it raised, and True if it agrees.

    A path agrees with the stock model if the difference is within the tolerance of ``dtype``.
    """
    try:
        worst = yield from largest_difference(path, texts, block_size, sources)
    except MODEL_ERRORS as reason:
        return None, f"{type(reason).__name__}: {reason}", False
    return worst, None, agrees_with(worst, dtype)


def agrees_with(difference: float, dtype: str) -> bool:
    """True if rounding in a dtype explains a difference of log-probabilities."""
    return difference <= tolerance_of(dtype)


def tolerance_of(dtype: str) -> float:
    """Return the largest difference of a log-probability that rounding in a dtype explains."""
    return TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


def blocks_needed(block_size: int, window: int | None) -> int:
    """Return the number of KV blocks that the check's sequences need."""
    longest = max(_prompt_lengths(window)) + DECODE_STEPS
    return len(PROMPT_LENGTHS) * (-(-longest // block_size))


def _prompt_lengths(window: int | None) -> list[int]:
    lengths: list[int] = list(PROMPT_LENGTHS)
    if window is not None and window <= MAX_CHECKED_WINDOW:
        # Two prompts of different lengths exceed the window: a path may be right for the longest
        # row of a batch and wrong for one that is padded.
        lengths[-2] = max(lengths[-2], window + 9)
        lengths[-1] = max(lengths[-1], window + window // 8 + 20)
    return lengths


def stock_text(model: Any, text: list[int], caches: Sequence[Any]) -> CheckedText:
    """Return what the stock model computes for a prompt, then for single tokens."""
    prompt_len = len(text) - DECODE_STEPS
    parts = [text[:prompt_len], *([token] for token in text[prompt_len:])]
    logits = mx.concatenate([model(mx.array([part]), cache=caches)[0] for part in parts])
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    units = mx.maximum(mx.abs(logits) / LARGE_LOGIT, 1.0)
    mx.eval(logprobs, units)
    return CheckedText(text, logprobs, units)


def steps_of(
    texts: Sequence[list[int]],
    block_size: int,
    end_of: Callable[[int, int, int], int] = lambda number, start, stop: stop,
) -> list[list[ScheduledSequence]]:
    """Return steps in which sequence i joins at step i, is prefilled in chunks, then decodes.

    Each keeps its last two tokens until all prompts are computed, so that all decode in one batch.

    Args:
        texts: of the sequences.
        block_size: of the KV pool.
        end_of: returns where the rows of text ``number`` from ``start`` end, which should end at
            ``stop``.
    """
    num_computed = [0] * len(texts)
    steps: list[list[ScheduledSequence]] = []
    while num_computed != [len(text) for text in texts]:
        prompt_lens = [len(text) - DECODE_STEPS for text in texts]
        is_prefilling = any(map(operator.lt, num_computed, prompt_lens))
        step = []
        for i, text in enumerate(texts[: len(steps) + 1]):
            start = num_computed[i]
            end = end_of(i, start, _next_end(len(text), start, is_prefilling=is_prefilling))
            if end > start:
                step.append(
                    row_of(text, i, start, end, num_texts=len(texts), block_size=block_size)
                )
            num_computed[i] = end
        steps.append(sorted(step, key=lambda sequence: len(sequence.token_ids)))
    return steps


def row_of(
    text: Sequence[int], number: int, start: int, end: int, *, num_texts: int, block_size: int
) -> ScheduledSequence:
    """Return tokens ``start`` to ``end`` of a text as a row, in the slot of the text's number.

    Blocks are spread over the pool, so that no sequence has neighbouring blocks.
    """
    blocks = range(number, -(-end // block_size) * num_texts, num_texts)
    return ScheduledSequence(
        seq_id=number,
        slot=number,
        start=start,
        token_ids=tuple(text[start:end]),
        block_table=tuple(blocks),
    )


def _next_end(length: int, start: int, *, is_prefilling: bool) -> int:
    """Return up to which token a text of ``length`` tokens runs in a step; ``start`` if not."""
    prompt_len = length - DECODE_STEPS
    if start < prompt_len:
        return min(start + max(CHUNK, prompt_len // MAX_CHUNKS), prompt_len)
    if start == length or (is_prefilling and start >= length - 2):
        return start
    return start + 1


def _rows_of(
    sequences: Sequence[ScheduledSequence],
) -> Iterator[tuple[int, ScheduledSequence, int]]:
    """Yield each row of a step, its sequence and its index in that."""
    row = 0
    for sequence in sequences:
        for index in range(len(sequence.token_ids)):
            yield row, sequence, index
            row += 1


def _last_rows(sequences: Sequence[ScheduledSequence]) -> list[int]:
    rows, total = [], 0
    for sequence in sequences:
        total += len(sequence.token_ids)
        rows.append(total - 1)
    return rows
