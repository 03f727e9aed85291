"""Chooses which inputs are computed before a step: in runs of equal shapes, by stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from mlx_parallm.generation.inputs.cache import Product, ProductCache
from mlx_parallm.types.model_input import InputKind, InputStages, without_arrays
from mlx_parallm.types.step import NO_MOVES, Moves

# ROUNDING: what a sum of shares may lack of a whole number of stages.
ROUNDING = 1e-6


class StageAllowance:
    """The stages that one step may compute, by the tokens of a step's budget that they cost.

    The first run always gets a stage, so that it ends however little is allowed.

    Attributes:
        tokens: that are left.
        taken: tokens that were taken.
        begun: the cost of all stages of runs that begin in the step, in tokens.
        is_whole: whether runs end in the step in which they begin.
    """

    def __init__(self, tokens: float, most: float, *, is_whole: bool) -> None:
        """Allow stages.

        Args:
            tokens: that they may cost.
            most: tokens that the inputs of one run may cost, unless it has one only.
            is_whole: True if runs end in the step in which they begin, even the first one, and
                steps may name their products at once. False if the products wait for the next
                step, which is then no longer than this one.
        """
        self.tokens = tokens
        self.taken = 0.0
        self.begun = 0
        self._most = most
        self.is_whole = is_whole

    def fits(self, cost: int, num_stages: int) -> bool:
        """Return True if several inputs of this cost may be one run."""
        return cost <= self._most and self.allows(cost, num_stages)

    def allows(self, cost: int, num_stages: int) -> bool:
        """Return True if a run of this cost may begin, by the tokens that are left."""
        return cost <= (self.tokens if self.is_whole else self.tokens * num_stages)

    def take(self, cost: int, num_stages: int, num_left: int) -> int:
        """Return how many of a run's stages that are left are computed, and count them.

        Args:
            cost: of all stages.
            num_stages: of the run.
            num_left: those that were not computed.
        """
        affordable = int(self.tokens * num_stages / cost + ROUNDING)
        if self.is_whole:
            number = num_left if affordable >= num_left or not self.taken else 0
        else:
            number = min(num_left, max(affordable, 0 if self.taken else 1))
        spent = cost * number / num_stages
        self.taken += spent
        self.tokens -= spent
        return number


@dataclass(slots=True)
class _Run:
    """Inputs that are computed together.

    Attributes:
        number: of the run.
        products: of the inputs.
        cost: of all stages, in tokens.
        num_stages: all.
        num_left: those that were not computed.
    """

    number: int
    products: tuple[Product, ...]
    cost: int
    num_stages: int
    num_left: int


class InputRuns:
    """Computes the products that wait in a cache, one run after the other.

    The worker applies the changes before the next step, see ``take_moves``.

    Attributes:
        num_images_computed: how often the computation of an image's features was begun.
        num_sources_computed: likewise of a source.
    """

    def __init__(self, cache: ProductCache, num_stages: int = 1) -> None:
        """``num_stages`` are those of an image or a source; other inputs have one."""
        self.num_images_computed = 0
        self.num_sources_computed = 0
        self._cache = cache
        self._num_stages = num_stages
        self._numbers = count()
        self._current: _Run | None = None
        self._abandoned: list[int] = []
        # Products that are ready for the next step.
        self._finished: list[Product] = []
        self._stages: dict[int, InputStages] = {}

    @property
    def next_cost(self) -> int:
        """Return the cost of the run that goes on, or of the next input; 0 if there is none."""
        self._leave_unneeded()
        if self._current is not None:
            return self._current.cost
        return next((each.source.cost for each in self._costly()), 0)

    @property
    def begins_next(self) -> bool:
        """Return True if no run goes on, so that the next stage begins one."""
        return self._current is None

    def settle(self) -> None:
        """Let the step that is planned now name all products computed before."""
        for product in self._finished:
            product.is_ready = True
        self._finished.clear()

    def advance(self, allowance: StageAllowance) -> bool:
        """Plan stages for the next step within an allowance; True if it may name a new product."""
        self._leave_unneeded()
        has_ready = False
        while True:
            run = self._current or self._begin(allowance)
            if run is None:
                return has_ready
            number = allowance.take(run.cost, run.num_stages, run.num_left)
            if not number:
                return has_ready
            self._plan(run, number)
            if not run.num_left:
                self._current = None
                self._finished += run.products
                self._cache.finish(run.products)
                if allowance.is_whole:
                    has_ready = True
                    self.settle()

    def take_moves(self) -> Moves:
        """Return what the worker must do before the next step; the caller passes it on."""
        for product in list(self._cache.waiting.values()):
            if product.is_ready:
                self._plan(self._run_of((product,)), 1)
        stages, self._stages = tuple(self._stages.values()), {}
        abandoned, self._abandoned = tuple(self._abandoned), []
        dropped = self._cache.take_dropped()
        if not (dropped or abandoned or stages):
            return NO_MOVES
        return Moves(dropped=dropped, abandoned=abandoned, stages=stages)

    def forget(self, moves: Moves) -> None:
        """Drop what a step that failed should have computed."""
        if self._current is not None and any(
            each.run == self._current.number for each in moves.stages
        ):
            self._abandon(self._current)
        self._cache.forget(slot for each in moves.stages for slot in each.slots)

    def check_integrity(self) -> None:
        """Assert that no product is computed twice."""
        products = () if self._current is None else self._current.products
        assert not any(product.is_ready for product in products)
        assert not set(map(id, products)) & set(map(id, self._cache.waiting.values()))

    def _costly(self) -> list[Product]:
        return [each for each in self._cache.waiting.values() if not each.is_ready]

    def _leave_unneeded(self) -> None:
        """Abandon the run that no sequence waits for."""
        run = self._current
        if run is not None and not any(product.num_users for product in run.products):
            self._abandon(run)
            self._cache.drop_unused(run.products)

    def _abandon(self, run: _Run) -> None:
        self._current = None
        planned = self._stages.pop(run.number, None)
        if planned is None or not planned.begun:
            self._abandoned.append(run.number)

    def _begin(self, allowance: StageAllowance) -> _Run | None:
        """Begin a run of the next input and of others that have its shapes; None if none waits."""
        costly = self._costly()
        if not costly:
            return None
        first, *others = costly
        products, cost, number = [first], first.source.cost, self._stages_of(first)
        if allowance.taken and not allowance.allows(cost, number):
            return None
        for other in others:
            if not _has_shapes_of(first, other):
                continue
            if not allowance.fits(cost + other.source.cost, number):
                break
            products.append(other)
            cost += other.source.cost
        allowance.begun += cost
        run = self._current = self._run_of(tuple(products))
        return run

    def _run_of(self, products: tuple[Product, ...]) -> _Run:
        """Return a run of products, which wait no longer."""
        for product in products:
            del self._cache.waiting[product.slot]
            self.num_images_computed += product.source.kind is InputKind.IMAGE
            self.num_sources_computed += product.source.kind is InputKind.SOURCE
        cost = sum(product.source.cost for product in products)
        number = self._stages_of(products[0])
        return _Run(next(self._numbers), products, cost, number, number)

    def _stages_of(self, product: Product) -> int:
        return 1 if product.source.kind is InputKind.PROMPT_EMBEDS else self._num_stages

    def _plan(self, run: _Run, number: int) -> None:
        """Plan stages of a run for the next step."""
        earlier = self._stages.get(run.number)
        is_new = run.num_left == run.num_stages
        begun = tuple(each.source for each in run.products) if is_new else ()
        places = self._cache.places(run.products) if is_new else ()
        self._stages[run.number] = InputStages(
            run=run.number,
            slots=tuple(product.slot for product in run.products),
            begun=begun if earlier is None else earlier.begun,
            places=places if earlier is None else earlier.places,
            num_stages=number + (0 if earlier is None else earlier.num_stages),
            is_last=run.num_left == number,
            tokens=run.cost * number / run.num_stages + (0 if earlier is None else earlier.tokens),
        )
        run.num_left -= number
        for product in run.products if is_new else ():
            product.source = without_arrays(product.source)


def _has_shapes_of(first: Product, other: Product) -> bool:
    key = first.source.shape_key
    is_same = key is not None and key == other.source.shape_key
    return is_same and first.source.kind is other.source.kind
