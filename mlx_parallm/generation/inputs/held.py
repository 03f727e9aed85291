"""The products of inputs that running sequences hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mlx_parallm.generation.inputs.cache import InputCache
from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.types.model_input import InputChanges, InputRows, ModelInput

ProductKey = tuple[bytes, str, str]


@dataclass(slots=True)
class HeldInputs:
    """The products that one running sequence holds, from the step that needs them first.

    Attributes:
        inputs: those of its request.
        scope: part of every product's key: whose requests may find it, and the weights.
        slots: of the held products.
    """

    inputs: PromptInputs
    scope: bytes
    slots: dict[ProductKey, int] = field(default_factory=dict[ProductKey, int])

    def key(self, source: ModelInput) -> ProductKey:
        """Return the key of a product in the cache."""
        return self.scope, source.kind.value, source.content

    def needed(self, start: int, stop: int) -> Iterator[tuple[int, ModelInput]]:
        """Yield the inputs that rows ``start`` to ``stop - 1`` need, each with its first row."""
        for source in self.inputs.whole:
            yield start, source
        for placed in self.inputs.overlapping(start, stop):
            yield max(start, placed.span.start), placed.input

    def rows(self, start: int, stop: int) -> tuple[InputRows, ...]:
        """Return the rows of inputs that a step of positions ``start`` to ``stop - 1`` runs."""
        rows: list[InputRows] = []
        for placed in self.inputs.overlapping(start, stop):
            first, last = max(start, placed.span.start), min(stop, placed.span.stop)
            rows.append(
                InputRows(
                    slot=self.slots[self.key(placed.input)],
                    first_row=first - placed.span.start,
                    num_rows=last - first,
                    offset=first - start,
                )
            )
        return tuple(rows)


class InputHolds:
    """Acquires the products that running sequences need, and releases what they have passed."""

    def __init__(self, cache: InputCache) -> None:
        self._cache = cache
        self._held: dict[int, HeldInputs] = {}

    def start(self, seq_id: int, inputs: PromptInputs, scope: bytes) -> None:
        """Let a sequence that begins to run hold products."""
        if inputs:
            self._held[seq_id] = HeldInputs(inputs, scope)

    def stop(self, seq_id: int) -> None:
        """Release all products of a sequence that runs no more."""
        held = self._held.pop(seq_id, None)
        if held is not None:
            for slot in held.slots.values():
                self._cache.release(slot)

    def acquire(self, seq_id: int, start: int, stop: int, budget: int | None) -> tuple[int, int]:
        """Acquire what rows ``start`` to ``stop - 1`` need.

        Args:
            seq_id: of a running sequence.
            start: position of the first row.
            stop: position behind the last row.
            budget: tokens that computing products may cost; None for any number.

        Returns:
            The end of the rows that have their products, at most ``stop``, and the tokens that
            computing them costs.
        """
        held, cost = self._held[seq_id], 0
        for first, source in held.needed(start, stop):
            key = held.key(source)
            if key in held.slots:
                continue
            own = 0 if self._cache.contains(key) else source.cost
            if own and budget is not None and cost + own > budget:
                return first, cost
            slot = self._cache.acquire(key, source)
            if slot is None:
                return first, cost
            held.slots[key] = slot
            cost += own
        return stop, cost

    def rows(self, seq_id: int, start: int, stop: int) -> tuple[InputRows, ...]:
        """Return the rows of inputs in a step of positions ``start`` to ``stop - 1``."""
        held = self._held.get(seq_id)
        return () if held is None else held.rows(start, stop)

    def pass_rows(self, seq_id: int, start: int) -> None:
        """Release products that the row at position ``start``, the next one, does not need.

        One that a later row needs is not held until then: of two sequences that each held what the
        other lacks room for, neither could go on.
        """
        held = self._held.get(seq_id)
        if held is None or not held.slots:
            return
        keys = {held.key(source) for _, source in held.needed(start, start + 1)}
        for key in held.slots.keys() - keys:
            self._cache.release(held.slots.pop(key))

    def take_changes(self) -> InputChanges:
        """See ``InputCache.take_changes``."""
        return self._cache.take_changes()

    def clear(self) -> None:
        """See ``InputCache.clear``."""
        self._cache.clear()

    def forget(self, changes: InputChanges) -> None:
        """See ``InputCache.forget``."""
        self._cache.forget(changes)

    def check_integrity(self) -> None:
        """Assert that every product's users are counted."""
        self._cache.check_integrity(sum(len(held.slots) for held in self._held.values()))
