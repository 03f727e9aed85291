"""Warm-up: steps that run while a server is idle, on devices that pay once for every new shape.

MLX's CUDA backend selects algorithms for products and makes graphs, and MLX traces a compiled
forward. That takes 5 to 40 ms in the first step of a shape, for which streams would wait
(``docs/decisions/020-shapes-on-cuda.md``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Protocol

from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.shape_buckets import padded_rows, padded_tokens
from mlx_parallm.types.step import (
    RunnerInfo,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
    SourceTable,
    StepInFlight,
)
from mlx_parallm.worker.attention.kernel_plan import table_length
from mlx_parallm.worker.attention.key_spans import MIN_SPAN

logger = logging.getLogger(__name__)

#: DECODE_COUNTS are the numbers of decode rows beside a prompt chunk; with others, most of what
#: is prepared is the same.
DECODE_COUNTS = (1, 8, 32, 128)
#: MIN_CHUNK is the fewest tokens of a step with prompts, as the scheduler fills one.
MIN_CHUNK = 16
#: SMALL_SIZE: smaller steps run once each, since few steps have such sizes.
SMALL_SIZE = 64
#: CHUNK_STARTS are the positions of chunks: the start of a prompt, and one with keys that are cut
#: into spans.
CHUNK_STARTS = (0, 4096)
#: ROW_BLOCKS is the number of blocks of a decode row beside a prompt chunk.
ROW_BLOCKS = 64
#: MAX_SECONDS bounds the time of all steps, for the sake of slow devices.
MAX_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of steps.

    Attributes:
        num_seqs: the most sequences.
        tokens: the most tokens, of all sequences together.
        model_len: the longest sequence, in tokens.
        block_size: the tokens of a block.
        source_len: the longest source, in positions; 0 if the model has no encoder.
    """

    num_seqs: int
    tokens: int
    model_len: int
    block_size: int
    source_len: int = 0


class ShapeRunner(Protocol):
    """Runs the steps of a model."""

    @property
    def info(self) -> RunnerInfo:
        """Facts about the model."""
        ...

    @property
    def prepares_shapes(self) -> bool:
        """True if the first step of each shape takes longer than others."""
        ...

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        """Begin a step."""
        ...


class WarmUp:
    """Runs a step of each usual shape, one at a time, if the runner prepares shapes.

    Steps read and write one block of the pool, which must be unused.
    """

    def __init__(
        self, runner: ShapeRunner, *, num_seqs: int, tokens: int, clock: Callable[[], float]
    ) -> None:
        """Plan the steps.

        Args:
            runner: runs the steps.
            num_seqs: the most sequences of a step.
            tokens: the most tokens of a step.
            clock: returns the time in seconds.
        """
        self._runner = runner
        self._clock = clock
        self._batches: list[ScheduledBatch] = []
        if runner.prepares_shapes:
            info = runner.info
            limits = StepLimits(
                num_seqs=num_seqs,
                tokens=tokens,
                model_len=info.max_model_len,
                block_size=info.block_size,
                source_len=info.max_source_len,
            )
            self._batches = list(warm_up_batches(limits))
        self._num_done = 0
        self._seconds = 0.0

    @property
    def is_done(self) -> bool:
        """True if no step is left, or if the steps have taken ``MAX_SECONDS``."""
        return self._num_done == len(self._batches) or self._seconds >= MAX_SECONDS

    def run_next(self, block: int) -> None:
        """Run the next step on an unused block; log the figures after the last one."""
        begin_s = self._clock()
        self._runner.submit(on_block(self._batches[self._num_done], block)).wait()
        self._seconds += self._clock() - begin_s
        self._num_done += 1
        if self.is_done:
            counts = self._num_done, len(self._batches)
            logger.info("%d of %d shapes prepared in %.1f s", *counts, self._seconds)


def on_block(batch: ScheduledBatch, block: int) -> ScheduledBatch:
    """Return the batch with block tables that consist of this block alone."""
    sequences = (
        replace(
            sequence,
            block_table=(block,) * len(sequence.block_table),
            source=sequence.source and _source_on(block, sequence.source),
        )
        for sequence in batch.sequences
    )
    return replace(batch, sequences=tuple(sequences))


def _source_on(block: int, source: SourceTable) -> SourceTable:
    return replace(source, block_table=(block,) * len(source.block_table))


def warm_up_batches(limits: StepLimits) -> Iterator[ScheduledBatch]:
    """Yield one batch for each usual shape; block tables consist of block 0 alone."""
    for step_id, sequences in enumerate(_steps(limits)):
        yield ScheduledBatch(step_id=step_id, sequences=tuple(sequences))


def _steps(limits: StepLimits) -> Iterator[list[ScheduledSequence]]:
    if limits.source_len:
        yield from _source_steps(limits)
    # A compiled forward needs a step before it that shows what the layers need of a plan.
    for step in chain([[_decode_row(0, 1, 2)]], _decode_steps(limits), _prompt_steps(limits)):
        yield _with_source(step, 1, 1) if limits.source_len else step


def _source_steps(limits: StepLimits) -> Iterator[list[ScheduledSequence]]:
    """Yield short decode steps by lengths of sources' tables, and whether their keys are cut.

    Combinations of long sources and long sequences are left to the steps that have them.
    """
    row = _decode_row(0, 1, 2)
    yield _with_source([row], 1, 1)
    longest = -(-limits.source_len // limits.block_size)
    for width, count, end in _shapes(limits.source_len, limits):
        rows = [row, *(_decode_row(i, 1, 2) for i in range(1, count))]
        yield _with_source(rows, end, min(width, longest))


def _with_source(
    rows: list[ScheduledSequence], num_tokens: int, num_blocks: int
) -> list[ScheduledSequence]:
    """Return the rows of a step with sources, of which the first has this length and table."""
    first, *others = rows
    source = SourceTable(block_table=(0,) * num_blocks, num_tokens=num_tokens)
    short = SourceTable(block_table=(0,), num_tokens=1)
    return [replace(first, source=source), *(replace(row, source=short) for row in others)]


def _decode_steps(limits: StepLimits) -> Iterator[list[ScheduledSequence]]:
    """Yield decode steps by lengths of block tables, row counts, and whether keys are cut."""
    longest = -(-limits.model_len // limits.block_size)
    for width, count, end in _shapes(limits.model_len, limits):
        first = _decode_row(0, end - 1, min(width, longest))
        yield [first, *(_decode_row(i, 1, 2) for i in range(1, count))]


def _shapes(max_len: int, limits: StepLimits) -> Iterator[tuple[int, int, int]]:
    """Yield lengths of tables in blocks, row counts, and numbers of keys that are cut and not."""
    widths = {table_length(blocks) for blocks in range(1, -(-max_len // limits.block_size) + 1)}
    numbers = range(1, limits.num_seqs + 1)
    counts = {min(padded_rows(number), limits.num_seqs) for number in numbers}
    for width, count in product(sorted(widths), sorted(counts)):
        # A sequence may be no longer than its table.
        max_end = min(width * limits.block_size, max_len)
        for end in sorted({min(2, max_end), max_end}):
            yield width, count, end


def _prompt_steps(limits: StepLimits) -> Iterator[list[ScheduledSequence]]:
    """Yield steps by their tokens, the position of a prompt chunk, and decode rows beside it.

    Each size that a step can have is met, if need be without decode rows.
    """
    numbers = range(MIN_CHUNK, limits.tokens + 1)
    sizes = {min(padded_tokens(number), limits.tokens) for number in numbers}
    for size, start in product(sorted(sizes), CHUNK_STARTS):
        steps = [
            step
            for count in DECODE_COUNTS
            if (step := _prompt_step(size, start, count, limits)) is not None
        ]
        if start == 0 and not steps:
            alone = _prompt_step(size, start, 0, limits)
            steps = [] if alone is None else [alone]
        if size >= SMALL_SIZE:
            yield from steps
        elif start == 0:
            yield from steps[:1]


def _prompt_step(
    size: int, start: int, count: int, limits: StepLimits
) -> list[ScheduledSequence] | None:
    """Return a step of ``size`` tokens with ``count`` decode rows; None if there is none such.

    The other tokens are a chunk of one prompt or, if the model takes none so long, whole prompts.
    """
    length, longest = size - count, limits.model_len - start
    num_chunks = -(-length // longest) if start == 0 else 1
    if length < 2 or longest < -(-length // num_chunks) or count + num_chunks > limits.num_seqs:
        return None
    row_start = min(MIN_SPAN, limits.model_len - 1)
    row_blocks = max(ROW_BLOCKS, row_start // limits.block_size + 1)
    rows = [_decode_row(i, row_start, row_blocks) for i in range(count)]
    # Shorter chunks come first, and differ by one token at most.
    for i in range(num_chunks):
        num_tokens = (length + i) // num_chunks
        rows.append(
            ScheduledSequence(
                seq_id=-1 - count - i,
                slot=count + i,
                start=start,
                token_ids=(0,) * num_tokens,
                block_table=(0,) * -(-(start + num_tokens) // limits.block_size),
            )
        )
    return rows


def _decode_row(index: int, start: int, num_blocks: int) -> ScheduledSequence:
    sample = SampleSpec(
        params=SamplingParams(temperature=0.0),
        seed=0,
        position=start + 1,
        prompt_ids=(),
        output_ids=(),
    )
    return ScheduledSequence(
        seq_id=-1 - index,
        slot=index,
        start=start,
        token_ids=(0,),
        block_table=(0,) * num_blocks,
        sample=sample,
    )
