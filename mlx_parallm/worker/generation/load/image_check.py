"""Compares a path with the stock model on prompts with rows of images, when a model is loaded.

The rows are random: a tower is not tried, but all that the text model does with its rows.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.types.model_input import InputRows, Span
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.generation.inputs.forward import InputForward
from mlx_parallm.worker.generation.inputs.rotary_rows import AXES
from mlx_parallm.worker.generation.inputs.rows import EmbeddingSeam, InputFeatures
from mlx_parallm.worker.generation.load.self_check import (
    DECODE_STEPS,
    CheckedText,
    agrees_with,
    largest_difference_of,
    steps_of,
    stock_text,
)
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.step_rows import token_array

# PROMPTS: the number of tokens of each prompt, and the places of its images. They begin and end
# within a chunk, at the start of a prompt, and one after the other; the last prompt has none.
PROMPTS: tuple[tuple[int, tuple[int, ...]], ...] = ((33, (4, 19)), (24, (0,)), (7, ()))
# SIDES: rows and columns of an image.
SIDES = (3, 4)
NUM_ROWS = SIDES[0] * SIDES[1]
# VOCABULARY: token ids of the texts, and those whose embeddings show how large rows are.
VOCABULARY = 64


@dataclass(frozen=True, slots=True)
class ImageText:
    """A random text with images.

    Attributes:
        token_ids: of the text; they mean nothing at the places of rows.
        spans: of its images.
        first_slot: the slot of the first image's features; the others follow.
        has_axes: True if rows have positions on several axes, as an image has.
    """

    token_ids: list[int]
    spans: tuple[Span, ...]
    first_slot: int
    has_axes: bool

    def positions(self) -> np.ndarray:
        """Return the position ids of all tokens, int32 ``[tokens, axes]``."""
        ids = np.arange(len(self.token_ids))[:, None].repeat(AXES, axis=1)
        if self.has_axes:
            for span in self.spans:
                ids[span.start : span.stop] = ids[span.start] + image_positions()
                following = len(ids) - span.stop
                ids[span.stop :] = np.arange(following)[:, None] + ids[span.start] + max(SIDES)
        return ids.astype(np.int32)

    def with_rows(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """Return a part of this text, with the rows of its images and the offsets of RoPE."""
        start, stop = sequence.start, sequence.start + len(sequence.token_ids)
        rows = [
            InputRows(
                slot=self.first_slot + number,
                first_row=max(start, span.start) - span.start,
                num_rows=min(stop, span.stop) - max(start, span.start),
                offset=max(start, span.start) - start,
            )
            for number, span in enumerate(self.spans)
            if span.overlaps(start, stop)
        ]
        return replace(sequence, inputs=tuple(rows), rope_offsets=self._offsets(start, stop))

    def _offsets(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        if not self.has_axes:
            return ()
        saved = max(SIDES) - NUM_ROWS
        passed = sum(span.stop <= start for span in self.spans)
        later = [span.stop - start for span in self.spans if start < span.stop < stop]
        offsets = [(0, saved * passed)]
        offsets += [(index, saved * (passed + n)) for n, index in enumerate(later, 1)]
        return tuple(offsets) if len(offsets) > 1 or passed else ()

    def end(self, start: int, stop: int, *, may_cut: bool) -> int:
        """Return where rows from ``start`` end that should end at ``stop``."""
        for span in self.spans:
            if not may_cut and span.start < stop < span.stop:
                return span.start if span.start > start else span.stop
        return stop


def image_positions() -> np.ndarray:
    """Return the position ids of an image's rows, int32 ``[rows, axes]``, as M-RoPE has them."""
    rows, columns = np.divmod(np.arange(NUM_ROWS), SIDES[1])
    return np.stack([np.zeros_like(rows), rows, columns], axis=1).astype(np.int32)


def image_texts(*, has_axes: bool) -> list[ImageText]:
    """Return random texts with images, the same in every process."""
    rng = random.Random(0)
    texts: list[ImageText] = []
    slot = 0
    for length, places in PROMPTS:
        ids = [rng.randrange(VOCABULARY) for _ in range(length + DECODE_STEPS)]
        spans = tuple(Span(place, place + NUM_ROWS) for place in places)
        texts.append(ImageText(ids, spans, slot, has_axes))
        slot += len(places)
    return texts


class ImageCheck:
    """Compares paths of one model with the stock model on texts with images."""

    def __init__(self, model: Any, forward: InputForward, dtype: mx.Dtype, num_layers: int) -> None:
        """Compute what the stock model makes of the texts.

        Args:
            model: the model, before any path is made of it.
            forward: of the model; its path is not used.
            dtype: of the model.
            num_layers: to how many of the first layers' outputs rows are added.
        """
        self._model = model
        self._forward = forward
        self._texts = image_texts(has_axes=forward.rotary is not None)
        num_images = sum(len(text.spans) for text in self._texts)
        self._rows = _random_rows(num_images, forward.embedding, dtype, num_layers)
        self._features = _features_of(self._rows, forward)
        self._expected: list[CheckedText] = []
        self._error: str | None = forward.why_no_rows
        if self._error is None:
            try:
                self._expected = [self._stock(text) for text in self._texts]
            except MODEL_ERRORS as cause:
                self._error = f"mlx_lm's model does not compute them: {_message(cause)}"

    def why_not(
        self, path: ForwardPath, block_size: int, dtype: str
    ) -> Generator[None, None, str | None]:
        """Return why a path cannot compute images; None if it agrees with the stock model."""
        forward = self._forward.on(path)
        error = self._error or forward.why_no_images
        if error is not None:
            return error

        def logits(sequences: Sequence[ScheduledSequence], rows: list[int]) -> mx.array:
            return forward.logits(sequences, token_array(sequences), rows, self._features)

        try:
            difference = yield from largest_difference_of(
                self._steps(block_size), self._expected, logits, path.arrays, all_rows=True
            )
        except MODEL_ERRORS as cause:
            return _message(cause)
        if agrees_with(difference, dtype):
            return None
        return f"log-probabilities behind rows of images differ from mlx_lm's by {difference:.3g}"

    def _steps(self, block_size: int) -> list[list[ScheduledSequence]]:
        """Return steps in which the texts run together, in chunks through images."""
        texts, may_cut = self._texts, self._forward.two_way is None

        def end(number: int, start: int, stop: int) -> int:
            return texts[number].end(start, stop, may_cut=may_cut)

        steps = steps_of([text.token_ids for text in texts], block_size, end)
        return [[texts[row.seq_id].with_rows(row) for row in step] for step in steps]

    def _stock(self, text: ImageText) -> CheckedText:
        """Return what the stock model computes for a text: a prompt at once, then single tokens."""
        forward, caches = self._forward, make_prompt_cache(self._model)
        if not text.spans:
            return stock_text(self._model, text.token_ids, caches)
        assert forward.embedding is not None, "there is a reason why it takes no images"
        whole = text.with_rows(
            ScheduledSequence(
                seq_id=0, slot=0, start=0, token_ids=tuple(text.token_ids), block_table=()
            )
        )
        ids = forward.embedding.place(mx.array(text.token_ids), [whole], self._features)
        own = self._rows[text.first_slot : text.first_slot + len(text.spans)]
        rows, *layers = mx.concatenate(own, axis=1)
        if forward.two_way is not None:
            caches = [_TwoWayCache(cache, text.spans, forward.two_way) for cache in caches]
        with contextlib.ExitStack() as seams:
            placed = seams.enter_context(forward.embedding.during(rows))
            if forward.rotary is not None:
                seams.enter_context(forward.rotary.during_stock(text.positions()))
            if layers:
                seams.enter_context(forward.deepstack.during(placed, mx.stack(layers)))
            return stock_text(self._model, np.array(ids).tolist(), caches)


class _TwoWayCache:
    """A cache of the stock model whose mask lets rows of images see each other."""

    def __init__(self, cache: Any, spans: Sequence[Span], two_way: TwoWay) -> None:
        self._cache = cache
        self._spans = spans
        self._two_way = two_way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, length: int, **options: Any) -> Any:
        """Return the mask of the next tokens."""
        if length == 1:
            return self._cache.make_mask(length, **options)
        window = options.get("window_size") or getattr(self._cache, "max_size", None)
        return mx.array(self._mask(length, window))

    def _mask(self, length: int, window: int | None) -> np.ndarray:
        places = np.arange(length)
        seen = places[:, None] >= places
        same = np.zeros_like(seen)
        for span in self._spans:
            same[span.start : span.stop, span.start : span.stop] = True
        near = places[:, None] - places < (window or length)
        if self._two_way is TwoWay.ALL_LAYERS:
            return (seen & near) | same
        return (seen | same) & near if window else seen


class _NoRun:
    """Stands for the run that computes features, where none does."""

    def drop(self) -> None:
        """Nothing is being computed."""


def _random_rows(
    count: int, embedding: EmbeddingSeam | None, dtype: mx.Dtype, num_layers: int
) -> list[mx.array]:
    """Return random rows of images, as large as the model's embeddings.

    Returns:
        ``[1 + layers, rows, width]`` for each: rows in place of embeddings, then those added to the
        outputs of layers.
    """
    if embedding is None:
        return []
    size = mx.std(embedding.rows(mx.arange(VOCABULARY)).astype(mx.float32))
    shape = (1 + num_layers, NUM_ROWS, embedding.width)
    keys = map(mx.random.key, range(count))
    return [(size * mx.random.normal(shape, key=key)).astype(dtype) for key in keys]


def _features_of(images: Sequence[mx.array], forward: InputForward) -> InputFeatures:
    features, source = InputFeatures(), _NoRun()
    positions = None if forward.rotary is None else image_positions()
    for slot, (rows, *layers) in enumerate(images):
        features.expect([slot], source)
        added = mx.stack(layers) if layers else None
        features.put(slot, source, rows, positions, layers=added, two_way=forward.two_way)
    return features


def _message(cause: Exception) -> str:
    return f"{type(cause).__name__}: {cause}"
