"""The sources of the random texts by which an encoder-decoder's path is checked at load."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_parallm.models.seq2seq.dense_cache import encoded, set_source
from mlx_parallm.models.seq2seq.interface import EncoderDecoder, is_encoder_decoder
from mlx_parallm.types.model_input import TOKEN_IDS
from mlx_parallm.types.step import ScheduledSequence, SourceTable
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.paths.packed import PackedPath

# LENGTHS: one source for each text. Some end within a block, and one is a single token.
LENGTHS = (5, 33, 1, 48)


class CheckedSources:
    """Ragged random sources, one for each text of the check, the same in every process.

    Attributes:
        num_blocks: how many KV blocks they take.
    """

    def __init__(
        self, model: EncoderDecoder, vocab_size: int, block_size: int, *, first_block: int
    ) -> None:
        """Put their KV into the blocks from ``first_block`` on."""
        self._model = model
        self._arrays = [_example(model, length, vocab_size) for length in _lengths(model)]
        self._tables: list[SourceTable] = []
        self.num_blocks = 0
        for length in _lengths(model):
            first, count = first_block + self.num_blocks, -(-length // block_size)
            blocks = tuple(range(first, first + count))
            self._tables.append(SourceTable(block_table=blocks, num_tokens=length))
            self.num_blocks += count

    def set_in(self, caches: Sequence[Sequence[Any]], *, is_wide: bool = True) -> None:
        """Give the stock caches of each text its source, which is encoded alone."""
        for own, arrays in zip(caches, self._arrays, strict=True):
            set_source(self._model, own, arrays)
            for cache in own:
                cache.is_wide = is_wide

    def write(self, path: PackedPath) -> None:
        """Write the KV of all sources into the path's pools.

        Texts are encoded in one run. Other sources can only be if their arrays have equal shapes.
        """
        is_text = TOKEN_IDS in self._arrays[0]
        count = len(self._arrays) if is_text else 1
        for first in range(0, len(self._arrays), count):
            run = slice(first, first + count)
            path.write_sources(self._tables[run], encoded(self._model, self._arrays[run]))
            mx.eval(path.arrays())

    def of(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """Return rows of a text with its source."""
        return replace(sequence, source=self._tables[sequence.seq_id])


def checked_sources(
    model: object, vocab_size: int, block_size: int, *, first_block: int
) -> CheckedSources | None:
    """Return the sources of an encoder-decoder's check; None for a decoder."""
    if not is_encoder_decoder(model):
        return None
    return CheckedSources(model, vocab_size, block_size, first_block=first_block)


def given(
    sources: CheckedSources | None, path: ForwardPath, steps: list[list[ScheduledSequence]]
) -> list[list[ScheduledSequence]]:
    """Return steps with the sources of their texts, if these have any, and write the sources."""
    if sources is None:
        return steps
    assert isinstance(path, PackedPath), "an encoder-decoder runs packed or not at all"
    sources.write(path)
    return [[sources.of(sequence) for sequence in step] for step in steps]


def _lengths(model: EncoderDecoder) -> list[int]:
    return [min(length, model.max_source_len or length) for length in LENGTHS]


def _example(model: EncoderDecoder, length: int, vocab_size: int) -> Mapping[str, mx.array]:
    """Return a random source; a model whose sources are no texts makes it itself."""
    make = getattr(model, "example_source", None)
    if make is not None:
        return make(length)
    rng = random.Random(length)
    rows = getattr(model, "source_vocab_size", vocab_size)
    return {TOKEN_IDS: mx.array([rng.randrange(rows) for _ in range(length)])}
