"""The products of inputs that running sequences hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mlx_parallm.generation.inputs.cache import InputCache
from mlx_parallm.generation.inputs.prompt_inputs import PromptInputs
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.model_input import InputRows, ModelInput
from mlx_parallm.types.step import SourceTable

ProductKey = tuple[bytes, str, str]


class Held(Protocol):
    """The products of inputs that a running sequence holds."""

    @property
    def source(self) -> SourceTable | None:
        """The KV that every row attends to; None without a source."""
        ...

    @property
    def num_cached(self) -> int:
        """Return the tokens of sources whose KV was found."""
        ...

    @property
    def hits(self) -> Mapping[str, int]:
        """Return how many of these tokens each store below the pool had."""
        ...

    @property
    def is_filling(self) -> bool:
        """True while blocks are to be filled with what stores had."""
        ...

    def fill(self, limit: int) -> list[tuple[int, Buffer]]:
        """Return at most so many blocks to fill before the step that is planned, with bytes."""
        ...

    def note_use(self) -> None:
        """Note that a step has computed rows with the products, and no row failed."""
        ...

    @property
    def num_held(self) -> int:
        """Return the number of products that it counts as a user of."""
        ...

    def acquire(self, start: int, stop: int) -> int:
        """Acquire what rows ``start`` to ``stop - 1`` need, up to the first product not computed.

        Returns:
            The end of the rows that have their products, at most ``stop``.
        """
        ...

    def is_awaited(self, position: int) -> bool:
        """See ``Arrival``: the row needs a product that is not computed."""
        ...

    def rows(self, start: int, stop: int) -> tuple[InputRows, ...]:
        """Return the rows of inputs that a step of positions ``start`` to ``stop - 1`` runs."""
        ...

    def pass_rows(self, start: int) -> None:
        """Release what no row from ``start`` on needs soon."""
        ...

    def has_any(self, slots: set[int]) -> bool:
        """Return True if it holds a product in one of these slots."""
        ...

    def spoil(self) -> None:
        """Let no later sequence find KV of sources, because a row of this sequence has failed."""
        ...

    def fork(self) -> Held:
        """Return what a sequence holds that continues this one behind all rows of inputs."""
        ...

    def release(self) -> None:
        """Release all products: the sequence runs no more."""
        ...


@dataclass(slots=True)
class HeldInputs:
    """The rows and features that one running sequence holds, from the step that needs them first.

    Implements ``Held``.

    Attributes:
        cache: keeps the products.
        inputs: those of its request.
        scope: part of every product's key: whose requests may find it, and the weights.
        slots: of the held products.
        position: of the row after those that steps were given.
    """

    cache: InputCache
    inputs: PromptInputs
    scope: bytes
    slots: dict[ProductKey, int] = field(default_factory=dict[ProductKey, int])
    position: int = 0

    @property
    def source(self) -> SourceTable | None:
        """See ``Held``."""
        return None

    @property
    def num_cached(self) -> int:
        """See ``Held``."""
        return 0

    @property
    def hits(self) -> Mapping[str, int]:
        """See ``Held``."""
        return {}

    @property
    def is_filling(self) -> bool:
        """See ``Held``: stores have no features."""
        return False

    def fill(self, limit: int) -> list[tuple[int, Buffer]]:
        """See ``Held``."""
        del limit
        return []

    def note_use(self) -> None:
        """See ``Held``."""

    @property
    def num_held(self) -> int:
        """See ``Held``."""
        return len(self.slots)

    def has_any(self, slots: set[int]) -> bool:
        """See ``Held``."""
        return not slots.isdisjoint(self.slots.values())

    def acquire(self, start: int, stop: int) -> int:
        """Acquire what rows ``start`` to ``stop - 1`` need, up to the first product not computed.

        The product of the next input is acquired too, if there is room for it: so inputs of one
        prompt are computed together, or while rows before them run.

        Returns:
            The end of the rows that have their products, at most ``stop``.
        """
        for first, end, source in self._needed(start, stop):
            key = self._key(source)
            slot = self.slots.get(key)
            if slot is None:
                slot = self.cache.acquire(key, source)
                if slot is None:
                    # Later inputs may be in its place.
                    self._keep([each for *_, each in self._needed(self.position, first)])
                    slot = self.cache.acquire(key, source)
                if slot is None:
                    return first
                self.slots[key] = slot
            if not self.cache.is_ready(slot):
                self._look_ahead(end)
                return first
        self._look_ahead(stop)
        return stop

    def _look_ahead(self, start: int) -> None:
        """Acquire the product of the first input that begins at position ``start`` or later."""
        source = self.inputs.beginning(start)
        if source is not None and source.cost and self._key(source) not in self.slots:
            slot = self.cache.acquire(self._key(source), source)
            if slot is not None:
                self.slots[self._key(source)] = slot

    def is_awaited(self, position: int) -> bool:
        """See ``Arrival``: the row needs a product that is not computed."""
        needed = self._needed(position, position + 1)
        slots = (self.slots.get(self._key(source)) for *_, source in needed)
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
        """Release products, except those of the row at position ``start`` and of two inputs behind.

        The rows before them need nothing else, so they run and then these are released too.
        Holding more could deadlock: each of two sequences could hold what the other needs.
        """
        self.position = start
        if self.slots:
            self._keep(self.inputs.following(start, 2))

    def _keep(self, sources: Sequence[ModelInput]) -> None:
        """Release all products but those of some inputs."""
        for key in self.slots.keys() - {self._key(source) for source in sources}:
            self.cache.release(self.slots.pop(key))

    def spoil(self) -> None:
        """See ``Held``: features that are no numbers show in every row, and fail it."""

    def fork(self) -> HeldInputs:
        """See ``Held``: no row needs a product any more."""
        return HeldInputs(self.cache, self.inputs, self.scope)

    def release(self) -> None:
        """See ``Held``."""
        for slot in self.slots.values():
            self.cache.release(slot)

    def _key(self, source: ModelInput) -> ProductKey:
        """Return the key of a product in the cache."""
        return self.scope, source.kind.value, source.content

    def _needed(self, start: int, stop: int) -> Iterator[tuple[int, int, ModelInput]]:
        """Yield the inputs that rows ``start`` to ``stop - 1`` need.

        Each comes with the first of these rows, and the end of its own. Sources have no rows: see
        ``HeldSource``.
        """
        for placed in self.inputs.overlapping(start, stop):
            yield max(start, placed.span.start), placed.span.stop, placed.input
