"""Compares an attention backend with softmax attention, on the device where it will run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend, LayerShape, Scores
from mlx_parallm.worker.attention.quantisation import KVQuantisation

#: ``SHAPE`` and ``HEADS`` are checked if no model says otherwise.
SHAPE = LayerShape(num_kv_heads=2, key_dim=64, value_dim=64, dtype=mx.float32)
HEADS = 4
WINDOW = 5
#: ``DISTANCES`` of a bias; most keys are farther away.
DISTANCES = 24
#: ``WRITTEN``: tokens of the last sequence before its step, so many that kernels cut its keys.
WRITTEN = 1600
#: ``TABLES`` have blocks out of order, so that a wrong block table shows.
TABLES = ((7, 2, 5, 9, 8, 10), (1, 6), (4, 3, 0), tuple(range(112, 10, -1)))
#: ``STEPS``: for each sequence of a step, the position of its first token and its number of tokens.
#: The second and third step have two decode rows beside a prefill chunk.
STEPS = (
    ((0, 0, 70), (1, 0, 9)),
    ((0, 70, 1), (1, 9, 1), (2, 0, 20)),
    ((1, 10, 1), (2, 20, 1), (0, 71, 18)),
    ((3, WRITTEN, 18),),
)
#: ``SOURCES``: the sequences whose last position some rows attend from, without a write.
SOURCES = (3, 0, 3, 2, 0)
#: ``BLOCK_SIZE``: tokens of a block in ``TABLES``; smaller blocks are made by cutting these.
BLOCK_SIZE = 16
#: ``MAX_ERROR``: absolute, for inputs of unit variance; float32 leaves room for TF32.
MAX_ERROR = {mx.float32: 2e-3, mx.float16: 1e-2, mx.bfloat16: 5e-2}

#: ``ORDER_STEPS``: steps of the trial of order, each a write and attention.
ORDER_STEPS = 100
#: ``ORDER_ROWS``: its sequences, so many on GPUs that a write takes a while.
ORDER_ROWS = 64
#: ``ORDER_POOLS`` take turns, and in each the first positions of every sequence.
ORDER_POOLS, ORDER_LENGTH = 3, 8
#: ``SUBMITTED``: so many of its steps are submitted together, like a step of a model.
SUBMITTED = 30

#: ``ROUNDING``: relative error of one rounding to a dtype.
ROUNDING = {mx.float32: 1e-6, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
#: ``MAX_MISREAD``: a division that rounds differently sometimes chooses the next level.
MAX_MISREAD = 0.01


def attention_error(
    backend: AttentionBackend,
    shape: LayerShape = SHAPE,
    heads: int = HEADS,
    block_size: int = BLOCK_SIZE,
    *,
    has_bias: bool = False,
) -> float:
    """Return the largest absolute difference from softmax attention in float32.

    A quantised backend is compared with attention over keys and values that NumPy quantised. Full,
    windowed and sink attention, and with ``has_bias`` a bias by distance, run on ragged sequences
    over shuffled blocks, whose last rows attend again as rows of cross-attention do. With inputs of
    unit variance, a correct backend stays below ``MAX_ERROR``.
    """
    tables = [_cut(table, block_size) for table in TABLES]
    errors = []
    for scores in checked_scores(shape, heads, has_bias=has_bias):
        trial = _Trial(backend, shape, tables)
        trial.write(((len(tables) - 1, 0, WRITTEN),))
        errors += [trial.error(step, heads, scores) for step in STEPS]
        errors.append(trial.source_error(SOURCES, heads, scores))
    return float(np.max(errors))


def checked_scores(shape: LayerShape, heads: int, *, has_bias: bool) -> list[Scores]:
    """Return the kinds of attention to check."""
    scale = shape.key_dim**-0.5
    sinks = (mx.arange(heads) * 0.5).astype(shape.dtype)
    kinds = [Scores(scale), Scores(scale, window=WINDOW), Scores(scale, sinks=sinks)]
    if has_bias:
        table = np.random.default_rng(1).standard_normal((heads, DISTANCES), dtype=np.float32)
        kinds.append(Scores(scale, distance_bias=mx.array(table)))
    return kinds


def misread_share(
    backend: AttentionBackend, shape: LayerShape = SHAPE, block_size: int = BLOCK_SIZE
) -> float:
    """Return the share of keys and values that a quantised pool reads back wrongly.

    Attention in 16 bits is too coarse to see an error of one level; this comparison is not. The
    share is 0 for a backend that does not quantise.
    """
    quantisation = backend.quantisation
    if quantisation is None:
        return 0.0
    source = np.random.default_rng(0)
    table, length = _cut(TABLES[0], block_size), STEPS[0][0][2]
    pool = backend.new_pool(shape, 1 + max(table))
    rows = _keys_and_values(source, shape, length)
    plan = backend.plan(_sequences(((0, 0, length),), [table]))
    backend.write(pool, plan, *(_as_rows(values, shape.dtype) for values in rows))
    wrong = []
    for read, values in zip(backend.gather(pool, mx.array([table])), rows, strict=True):
        wanted = quantised(values, quantisation).swapaxes(0, 1)
        apart = np.abs(np.array(read[0, :, :length].astype(mx.float32)) - wanted)
        wrong.append(apart > ROUNDING[shape.dtype] * np.abs(wanted) + 1e-5)
    return float(np.concatenate(wrong, axis=-1).mean())


def miscopies(
    backend: AttentionBackend, shape: LayerShape = SHAPE, block_size: int = BLOCK_SIZE
) -> bool:
    """True if blocks hold something else than those that they were copied or taken from."""
    table, length = _cut(TABLES[0], block_size), STEPS[0][0][2]
    copies = tuple(max(table) + block for block in table)
    puts = tuple(max(copies) + block for block in table)
    pool = backend.new_pool(shape, 1 + max(puts))
    rows = _keys_and_values(np.random.default_rng(0), shape, length)
    plan = backend.plan(_sequences(((0, 0, length),), [table]))
    backend.write(pool, plan, *(_as_rows(values, shape.dtype) for values in rows))
    before = backend.gather(pool, mx.array([table]))
    mx.eval(before)
    backend.copy_blocks(pool, mx.array(table), mx.array(copies))
    backend.put_blocks(pool, mx.array(puts), backend.take_blocks(pool, mx.array(copies)))
    after = [backend.gather(pool, mx.array([blocks])) for blocks in (table, copies, puts)]
    return not all(
        mx.array_equal(array[:, :, :length], source[:, :, :length]).item()
        for arrays in after
        for array, source in zip(arrays, before, strict=True)
    )


def order_error(
    backend: AttentionBackend,
    shape: LayerShape = SHAPE,
    heads: int = HEADS,
    block_size: int = BLOCK_SIZE,
    *,
    rows: int | None = None,
) -> float:
    """Return the largest absolute difference that it makes not to wait between launches.

    Steps of ``rows`` sequences (None: ``ORDER_ROWS``) write and attend, and pools take turns. What
    a step writes follows from what the step before attended to in another pool, and replaces what
    its own pool had there. A device that runs a launch before another one that it follows from, in
    a command buffer or across two, reads what was there before.
    """
    trial = OrderTrial(backend, shape, heads, block_size, rows or ORDER_ROWS)
    return float(np.abs(trial.outputs(waits=False) - trial.outputs(waits=True)).max())


class OrderTrial:
    """Decode steps of ``rows`` sequences, each in a block of its own."""

    def __init__(
        self, backend: AttentionBackend, shape: LayerShape, heads: int, block_size: int, rows: int
    ) -> None:
        source = np.random.default_rng(0)
        self._backend, self._shape = backend, shape
        self._num_blocks = -(-ORDER_LENGTH // block_size) * rows
        blocks = source.permutation(self._num_blocks).reshape(rows, -1).tolist()
        tables = [tuple(table) for table in blocks]
        self._plans = [
            backend.plan(_sequences([(row, start, 1) for row in range(rows)], tables))
            for start in range(ORDER_LENGTH)
        ]
        keys, values = _keys_and_values(source, shape, rows)
        queries = _normal(source, shape.dtype, rows, heads, shape.key_dim)
        self._rows = [mx.array(each)[:, :, None] for each in (keys, values, queries)]

    def outputs(self, *, waits: bool) -> np.ndarray:
        """Return the outputs of all steps, float32 ``[ORDER_STEPS, rows, H, 1, V]``.

        ``waits``: True to evaluate after every launch.
        """
        backend, shape = self._backend, self._shape
        pools = [backend.new_pool(shape, self._num_blocks) for _ in range(ORDER_POOLS)]
        outputs = [mx.zeros((1, 1, 1, 1))]
        for step in range(ORDER_STEPS):
            pool, plan = pools[step % ORDER_POOLS], self._plans[step // ORDER_POOLS % ORDER_LENGTH]
            # Divided, so that differences by rounding do not grow from step to step.
            before, scale = outputs[-1][:, :1, :, :1] / 4, math.cos(step)
            keys, values, queries = (
                (rows * scale + before).astype(shape.dtype) for rows in self._rows
            )
            backend.write(pool, plan, keys, values)
            if waits:
                mx.eval(pool.arrays())
            scores = shape.key_dim**-0.5
            output = backend.attend(pool, plan, queries, scale=scores, window=None, sinks=None)
            outputs.append(output.astype(mx.float32))
            if waits:
                mx.eval(outputs[-1])
            elif step % SUBMITTED == SUBMITTED - 1:
                mx.async_eval(outputs[-1], pool.arrays())
        return np.array(mx.stack(outputs[1:]))


def _cut(table: Sequence[int], block_size: int) -> tuple[int, ...]:
    """Return the same places of a table in blocks of another size."""
    if block_size >= BLOCK_SIZE:
        return tuple(table)
    parts = -(-BLOCK_SIZE // block_size)
    return tuple(block * parts + part for block in table for part in range(parts))


_Step = Sequence[tuple[int, int, int]]


class _Trial:
    """A pool, and copies in float32 of everything written to it."""

    def __init__(
        self, backend: AttentionBackend, shape: LayerShape, tables: Sequence[tuple[int, ...]]
    ) -> None:
        self._source = np.random.default_rng(0)
        self._backend, self._shape, self._tables = backend, shape, tables
        self._pool = backend.new_pool(shape, 1 + max(max(table) for table in tables))
        dims = (shape.key_dim, shape.value_dim)
        self._written = [
            [np.zeros((0, shape.num_kv_heads, dim), np.float32) for dim in dims] for _ in tables
        ]

    def write(self, step: _Step) -> Any:
        """Write random keys and values for a step; return its plan."""
        backend, shape, quantisation = self._backend, self._shape, self._backend.quantisation
        total = sum(count for _, _, count in step)
        rows = _keys_and_values(self._source, shape, total)
        if quantisation is not None:
            rows = [
                _rounded(quantised(values, quantisation, decided=True), shape.dtype)
                for values in rows
            ]
        plan = backend.plan(_sequences(step, self._tables))
        backend.write(self._pool, plan, *(_as_rows(values, shape.dtype) for values in rows))
        mx.eval(self._pool.arrays())
        if quantisation is not None:
            rows = [quantised(values, quantisation) for values in rows]
        row = 0
        for sequence, _, count in step:
            written = self._written[sequence]
            written[:] = [
                np.concatenate([before, values[row : row + count]])
                for before, values in zip(written, rows, strict=True)
            ]
            row += count
        return plan

    def error(self, step: _Step, heads: int, scores: Scores) -> float:
        """Write a step and attend; return the largest absolute error."""
        return self._error(self.write(step), step, heads, scores)

    def source_error(self, sources: Sequence[int], heads: int, scores: Scores) -> float:
        """Attend to whole sequences, which may repeat; return the largest absolute error."""
        step = [(sequence, len(self._written[sequence][0]) - 1, 1) for sequence in sources]
        return self._error(self._backend.plan(_sequences(step, self._tables)), step, heads, scores)

    def _error(self, plan: Any, step: _Step, heads: int, scores: Scores) -> float:
        shape = self._shape
        total = sum(count for _, _, count in step)
        queries = _normal(self._source, shape.dtype, total, heads, shape.key_dim)
        output = self._backend.attend(
            self._pool,
            plan,
            _as_rows(queries, shape.dtype),
            scale=scores.scale,
            window=scores.window,
            sinks=scores.sinks,
            distance_bias=scores.distance_bias,
        )
        attended = np.array(output.astype(mx.float32))[:, :, 0]
        row, worst = 0, 0.0
        for sequence, _, count in step:
            part = slice(row, row + count)
            keys, values = self._written[sequence]
            wanted = dense_attention(queries[part], keys, values, scores)
            # np.maximum keeps NaN, which max() would drop.
            worst = np.maximum(worst, np.abs(attended[part] - wanted).max())
            row += count
        return float(worst)


def _keys_and_values(
    source: np.random.Generator, shape: LayerShape, count: int
) -> list[np.ndarray]:
    """Return random keys ``[count, K, D]`` and values ``[count, K, V]``, float32."""
    dims = (shape.key_dim, shape.value_dim)
    return [_normal(source, shape.dtype, count, shape.num_kv_heads, dim) for dim in dims]


def _as_rows(values: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Return values in the shape in which layers pass them, ``[count, heads, 1, dim]``."""
    return mx.array(values)[:, :, None].astype(dtype)


def _normal(source: np.random.Generator, dtype: mx.Dtype, *shape: int) -> np.ndarray:
    """Return values of unit variance that the dtype holds exactly, as float32."""
    return _rounded(source.standard_normal(shape, dtype=np.float32), dtype)


def _rounded(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Return values rounded to a dtype, as float32."""
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


def quantised(
    values: np.ndarray, quantisation: KVQuantisation, *, decided: bool = False
) -> np.ndarray:
    """Return values ``[..., dim]`` as a quantised pool reads them back, computed by NumPy.

    With ``decided``, values stay between the same two levels but move away from the middle, where
    backends that divide differently could choose different levels.
    """
    groups = []
    for first in range(0, values.shape[-1], quantisation.group_size):
        group = values[..., first : first + quantisation.group_size].astype(np.float32)
        least = _rounded(group.min(axis=-1, keepdims=True), quantisation.scale_dtype)
        span = group.max(axis=-1, keepdims=True) - least
        step = _rounded(span / np.float32(quantisation.levels), quantisation.scale_dtype)
        inverse = np.float32(1) / np.where(step > 0, step, np.float32(np.inf))
        exact = (group - least) * inverse
        level = np.rint(exact)
        if decided:
            level += (exact - level) / 2
        groups.append(level.clip(0, quantisation.levels) * step + least)
    return np.concatenate(groups, axis=-1, dtype=np.float32)


def dense_attention(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    scores: Scores,
) -> np.ndarray:
    """Return softmax attention of the last L positions: ``[L, H, D]`` over ``[S, K, D]``."""
    length, heads, _ = queries.shape
    total, window = len(keys), scores.window
    groups = heads // keys.shape[1]
    by_head = keys.repeat(groups, axis=1).transpose(1, 2, 0)
    products = queries.swapaxes(0, 1) @ by_head * scores.scale
    distance = np.arange(total - length, total)[:, None] - np.arange(total)
    if scores.distance_bias is not None:
        table = np.array(scores.distance_bias)
        products += table[:, distance.clip(0, table.shape[1] - 1)]
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    products = np.where(seen, products, -np.inf)
    if scores.sinks is not None:
        sinks = np.array(scores.sinks.astype(mx.float32))[:, None, None]
        products = np.concatenate([products, np.broadcast_to(sinks, (heads, length, 1))], axis=-1)
    weights = np.exp(products - products.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    summed = weights[..., :total] @ values.repeat(groups, axis=1).swapaxes(0, 1)
    return summed.swapaxes(0, 1)


def _sequences(
    step: Sequence[tuple[int, int, int]], tables: Sequence[tuple[int, ...]]
) -> list[ScheduledSequence]:
    return [
        ScheduledSequence(
            seq_id=sequence,
            slot=sequence,
            start=start,
            token_ids=(1,) * count,
            block_table=tables[sequence],
        )
        for sequence, start, count in step
    ]
