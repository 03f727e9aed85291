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

    def acquire(self, start: int, stop: int, budget: int | None) -> tuple[int, int]:
        """Acquire what rows ``start`` to ``stop - 1`` need.

        Args:
            start: position of the first row.
            stop: position behind the last row.
            budget: tokens that computing products may cost; None for any number.

        Returns:
            The end of the rows that have their products, at most ``stop``, and the tokens that
            computing them costs.
        """
        cost = 0
        for first, source in self._needed(start, stop):
            key = self._key(source)
            if key in self.slots:
                continue
            own = 0 if self.cache.contains(key) else source.cost
            if own and budget is not None and cost + own > budget:
                return first, cost
            slot = self.cache.acquire(key, source)
            if slot is None:
                return first, cost
            self.slots[key] = slot
            cost += own
        return stop, cost

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
        """Release products that the row at position ``start``, the next one, does not need.

        One that a later row needs is not held until then: of two sequences that each held what the
        other lacks room for, neither could go on.
        """
        if self.slots:
            keys = {self._key(source) for _, source in self._needed(start, start + 1)}
            for key in self.slots.keys() - keys:
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
