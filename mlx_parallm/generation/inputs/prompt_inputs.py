"""The meaning of prompt positions that are no tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from mlx_parallm.types.model_input import ModelInput, Span


class PlacedInput(NamedTuple):
    """An input with rows in the prompt, and their span."""

    input: ModelInput
    span: Span


class PromptInputs:
    """The inputs of one request, by the positions of their rows.

    Attributes:
        whole: inputs without a span, which every row needs.
    """

    def __init__(self, inputs: Sequence[ModelInput]) -> None:
        """Take inputs whose spans do not overlap."""
        self.whole = tuple(each for each in inputs if each.span is None)
        placed = [PlacedInput(each, each.span) for each in inputs if each.span is not None]
        self._placed = sorted(placed, key=lambda item: item.span.start)

    def __bool__(self) -> bool:
        return bool(self.whole or self._placed)

    @property
    def salt(self) -> str | None:
        """Return what distinguishes this prompt from those with other inputs without a span."""
        if not self.whole:
            return None
        return repr([(each.kind.value, each.content) for each in self.whole])

    def overlapping(self, start: int, stop: int) -> Iterator[PlacedInput]:
        """Yield the inputs with rows at positions ``start`` to ``stop - 1``, in order."""
        for placed in self._placed:
            if placed.span.overlaps(start, stop):
                yield placed

    def following(self, start: int, count: int) -> list[ModelInput]:
        """Return the first ``count`` inputs with a row at position ``start`` or later."""
        rest = (each.input for each in self._placed if each.span.stop > start)
        return list(islice(rest, count))

    def beginning(self, start: int) -> ModelInput | None:
        """Return the first input whose rows begin at ``start`` or later; None if none do."""
        return next((each.input for each in self._placed if each.span.start >= start), None)

    def block_key(self, start: int, stop: int) -> bytes:
        """Return what positions ``start`` to ``stop - 1`` mean besides their token ids.

        Two blocks with equal token ids and equal keys have rows of the same inputs at the same
        places. Empty if all positions are tokens.
        """
        parts = [
            (placed.input.kind.value, placed.input.content, placed.span.start - start)
            for placed in self.overlapping(start, stop)
        ]
        return repr(parts).encode() if parts else b""

    def rope_offsets(self, start: int, stop: int) -> tuple[tuple[int, int], ...]:
        """Return what is added to places for position ids, for positions ``start`` to ``stop - 1``.

        Returns:
            Pairs of an index, counted from ``start``, and the offset of positions from there on.
            Rows of inputs have that of their first row. Empty if all offsets are 0.
        """
        offsets: list[tuple[int, int]] = [(0, 0)]
        offset = 0
        for placed in self._placed:
            if placed.span.stop >= stop:
                break
            if placed.input.num_positions is not None:
                offset += placed.input.num_positions - len(placed.span)
                offsets.append((max(0, placed.span.stop - start), offset))
        # The last one that begins at the first index counts there.
        first = max(place for place, (index, _) in enumerate(offsets) if index == 0)
        return tuple(offsets[first:]) if offset else ()

    def cut(self, start: int, stop: int) -> int:
        """Return the largest end of at most ``stop`` at which rows from ``start`` may end.

        It is ``start`` if the first rows are those of an input that must not be cut and has rows
        beyond ``stop``.
        """
        for placed in self.overlapping(stop - 1, stop + 1):
            is_cut = placed.span.start < stop < placed.span.stop
            if is_cut and not placed.input.may_cut:
                return max(start, placed.span.start)
        return stop

    def end_of(self, start: int) -> int:
        """Return the smallest end beyond ``start`` at which rows from ``start`` may end."""
        for placed in self.overlapping(start, start + 1):
            if not placed.input.may_cut:
                return placed.span.stop
        return start + 1

    def is_token(self, position: int) -> bool:
        """Return True if a prompt position is a token and no row of an input."""
        return next(self.overlapping(position, position + 1), None) is None


#: ``NO_INPUTS``: those of a prompt of tokens only.
NO_INPUTS = PromptInputs(())
