"""Batches of new conversations, drawn by worker processes while the model trains."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from demo.see.conversations import (
    ROWS_PER_PICTURE,
    Rows,
    no_picture,
    one_picture,
    rows_of,
    two_pictures,
)

# TEXT_LENGTH: tokens of a conversation besides its pictures; later turns are left out.
TEXT_LENGTH = 80


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a worker for one batch."""

    tokenizer_file: Path
    rows: int
    seed: int


def make_batch(order: Order) -> tuple[Rows, Rows]:
    """Return rows about one picture (or none), and half as many about two."""
    tokenizer = Tokenizer.from_file(str(order.tokenizer_file))
    rng = np.random.default_rng(order.seed)
    singles = [
        no_picture(rng) if index % 64 == 63 else one_picture(rng) for index in range(order.rows)
    ]
    pairs = [two_pictures(rng) for _ in range(max(1, order.rows // 3))]
    lone = rows_of(tokenizer, singles, ROWS_PER_PICTURE + TEXT_LENGTH, order.seed)
    return (
        _padded(lone, order.rows),
        rows_of(tokenizer, pairs, 2 * ROWS_PER_PICTURE + TEXT_LENGTH, order.seed + 1),
    )


def _padded(rows: Rows, pictures: int) -> Rows:
    """Return rows with empty pictures at the end, so that their number is always the same."""
    missing = pictures - len(rows.pixels)
    pixels = np.pad(rows.pixels, ((0, missing), (0, 0), (0, 0), (0, 0)))
    return Rows(pixels, rows.tokens, rows.features, rows.weights)


def batches(
    tokenizer_file: Path, *, rows: int, workers: int, seed: int
) -> Generator[tuple[Rows, Rows]]:
    """Yield batches without end."""
    first = seed * 10**7

    def order(index: int) -> Order:
        return Order(tokenizer_file, rows, first + 2 * index)

    with get_context("spawn").Pool(workers) as pool:
        pending = [pool.apply_async(make_batch, (order(index),)) for index in range(3 * workers)]
        made = len(pending)
        try:
            while True:
                batch = pending.pop(0).get()
                pending.append(pool.apply_async(make_batch, (order(made),)))
                made += 1
                yield batch
        finally:
            # Workers that are stopped while they send a batch keep the pool's lock, and its end
            # would wait for that for ever.
            for waiting in pending:
                waiting.wait()
            pool.close()
            pool.join()
