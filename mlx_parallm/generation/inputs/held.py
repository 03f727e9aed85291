"""The products of inputs that running sequences hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_parallm.generation.inputs.cache import InputCache
from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.types.model_input import InputRows, ModelInput

ProductKey = tuple[bytes, str, str]


@dataclass(slots=True)
class HeldInputs:
    """The products that one running sequence holds, from the step that needs them first.

    Attributes:
        cache: keeps the products.
        inputs: those of its request.
        scope: part of every product's key: whose requests may find it, and the weights.
        slots: of the held products.
    """

    cache: InputCache
    inputs: PromptInputs
    scope: bytes
    slots: dict[ProductKey, int] = field(default_factory=dict[ProductKey, int])

    def acquire(self, start: int, stop: int) -> int:
        """Acquire what rows ``start`` to ``stop - 1`` need, up to the first product not computed.

        Returns:
            The end of the rows that have their products, at most ``stop``.
        """
        for first, source in self._needed(start, stop):
            key = self._key(source)
            slot = self.slots.get(key)
            if slot is None:
                slot = self.cache.acquire(key, source)
                if slot is None:
                    return first
                self.slots[key] = slot
            if not self.cache.is_ready(slot):
                return first
        return stop

    def is_blocked(self, start: int) -> bool:
        """Return True if the row at position ``start`` needs a product that is not computed."""
        slots = (self.slots.get(self._key(source)) for _, source in self._needed(start, start + 1))
        return any(slot is None or not self.cache.is_ready(slot) for slot in slots)

    def rows(self, start: int, stop: int) -> tuple[InputRows, ...]:
        """Return the rows of inputs that a step of positions ``start`` to ``stop - 1`` runs."""
        rows: list[InputRows] = []
        for placed in self.inputs.overlapping(start, stop):
            first, last = max(start, placed.span.start), min(stop, placed.span.stop)
            rows.append(
                InputRows(
                    slot=self.slots[self._key(placed.input)],
                    first_row=first - placed.span.start,
                    num_rows=last - first,
                    offset=first - start,
                )
            )
        return tuple(rows)

    def pass_rows(self, start: int) -> None:
        """Release products, except those of the row at position ``start`` and the next placed one.

        The rows before that one need nothing else, so they run and then it is released too. More
        is not held: of two sequences that each held what the other lacks room for, neither could
        go on.
        """
        if self.slots:
            following = self.inputs.following(start)
            needed = self.inputs.whole + (() if following is None else (following,))
            for key in self.slots.keys() - {self._key(source) for source in needed}:
                self.cache.release(self.slots.pop(key))

    def release(self) -> None:
        """Release all products: the sequence runs no more."""
        for slot in self.slots.values():
            self.cache.release(slot)

    def _key(self, source: ModelInput) -> ProductKey:
        """Return the key of a product in the cache."""
        return self.scope, source.kind.value, source.content

    def _needed(self, start: int, stop: int) -> Iterator[tuple[int, ModelInput]]:
        """Yield the inputs that rows ``start`` to ``stop - 1`` need, each with its first row."""
        for source in self.inputs.whole:
            yield start, source
        for placed in self.inputs.overlapping(start, stop):
            yield max(start, placed.span.start), placed.input
