"""Budgets hold, no client keeps another waiting beyond its turn, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.fairness import Client, Holding, SharedBudget


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_images_wait_until_they_fit():
    budget = SharedBudget(10)
    await budget.acquire(6)
    second = asyncio.create_task(budget.acquire(5))
    await settle()
    assert not second.done()
    budget.release(6)
    await second
    assert budget.num_free == 5


async def test_a_small_image_does_not_overtake_a_large_one():
    budget = SharedBudget(10)
    await budget.acquire(6)
    large = asyncio.create_task(budget.acquire(10))
    await settle()
    small = asyncio.create_task(budget.acquire(1))
    await settle()
    assert not small.done()
    budget.release(6)
    await large
    assert not small.done()
    budget.release(10)
    await small


async def test_a_large_image_that_leaves_lets_smaller_ones_begin():
    budget = SharedBudget(10)
    await budget.acquire(6)
    large = asyncio.create_task(budget.acquire(10))
    await settle()
    small = asyncio.create_task(budget.acquire(4))
    await settle()
    large.cancel()
    await small
    assert budget.num_free == 0
    assert large.cancelled()


async def test_a_image_that_leaves_at_its_turn_gives_its_room_back():
    budget = SharedBudget(10)
    await budget.acquire(10)
    waiting = asyncio.create_task(budget.acquire(10))
    await settle()
    budget.release(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.num_free == 10


async def test_a_client_beyond_its_share_keeps_no_other_waiting():
    budget = SharedBudget(10)
    await budget.acquire(4, "greedy")
    second = asyncio.create_task(budget.acquire(2, "greedy"))
    third = asyncio.create_task(budget.acquire(1, "greedy"))
    await settle()
    await budget.acquire(3, "other")
    assert not second.done()
    assert not third.done(), "a client's images keep their order"
    budget.release(4, "greedy")
    await second
    await third
    assert budget.num_free == 4


async def test_a_image_of_more_than_a_share_is_taken_alone():
    budget = SharedBudget(10)
    await budget.acquire(10, "one")
    assert budget.num_free == 0


async def test_clients_that_wait_begin_by_turns():
    budget, begun = SharedBudget(2), []

    async def use(client: str) -> None:
        await budget.acquire(1, client)
        begun.append(client)
        budget.release(1, client)

    await budget.acquire(1, "x")
    await budget.acquire(1, "y")
    waiting = [asyncio.create_task(use(client)) for client in ("a", "a", "a", "b", "c")]
    await settle()
    budget.release(1, "x")
    await asyncio.gather(*waiting)
    assert begun == ["a", "b", "c", "a", "a"]


AMOUNT = 10
CLIENTS: tuple[Client, ...] = (None, "a", "b", "c")


@dataclass(eq=False)
class Task:
    """A task that takes an amount; ``since`` has the grants to others while it could begin."""

    client: Client
    amount: int
    running: asyncio.Task[None]
    since: Counter[Client] = field(default_factory=Counter)


class History:
    """A budget, and what its tasks may rely on."""

    def __init__(self) -> None:
        self.budget = SharedBudget(AMOUNT)
        self.waiting: list[Task] = []
        self.holding: list[Task] = []
        # Those that waited for nothing but room when the loop was idle.
        self.may_begin: list[Task] = []

    def acquire(self, client: Client, amount: int) -> None:
        taking = asyncio.ensure_future(self.budget.acquire(amount, client))
        self.waiting.append(Task(client, amount, taking))

    def release(self, number: int) -> None:
        if self.holding:
            task = self.holding.pop(number % len(self.holding))
            self.budget.release(task.amount, task.client)

    def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting.pop(number % len(self.waiting)).running.cancel()

    async def settle(self) -> None:
        await settle()
        begun = [task for task in self.waiting if task.running.done()]
        self.waiting = [task for task in self.waiting if not task.running.done()]
        self.holding += begun
        self.check_bounds()
        self.check_waiting(begun)

    def check_bounds(self) -> None:
        assert self.budget.num_taken == sum(task.amount for task in self.holding) <= AMOUNT
        for client in CLIENTS[1:]:
            own = [task.amount for task in self.holding if task.client == client]
            assert len(own) <= 1 or sum(own) <= AMOUNT // 2

    def check_waiting(self, begun: list[Task]) -> None:
        # The first of each client's tasks waits for its turn, the others for the first.
        firsts = {task.client: task for task in reversed(self.waiting)}.values()
        may_begin = [task for task in firsts if not self.is_beyond_share(task)]
        assert not may_begin or any(task.amount > self.budget.num_free for task in may_begin)
        for task in self.waiting:
            if task in self.may_begin:
                task.since.update(other.client for other in begun)
            if task not in may_begin:
                task.since.clear()
            assert max(task.since.values(), default=0) <= 1, "others had two turns meanwhile"
        self.may_begin = may_begin

    def is_beyond_share(self, task: Task) -> bool:
        taken = sum(other.amount for other in self.holding if other.client == task.client)
        return bool(task.client and taken) and taken + task.amount > AMOUNT // 2


OPERATIONS = st.one_of(
    st.tuples(st.just("acquire"), st.sampled_from(CLIENTS), st.integers(1, AMOUNT)),
    st.tuples(st.just("release"), st.integers(0, 99)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
)


@given(st.lists(st.lists(OPERATIONS, min_size=1, max_size=3), max_size=25))
def test_budgets_are_fair_and_lose_nothing(rounds: list[list[tuple]]):
    async def run() -> None:
        history, order = History(), dict.fromkeys(CLIENTS, -1)
        arrivals: list[Task] = []
        for operations in rounds:
            # What comes in one round of the loop: a task may be cancelled as its turn comes.
            for name, *arguments in operations:
                getattr(history, name)(*arguments)
            arrivals += [task for task in history.waiting if task not in arrivals]
            held = list(history.holding)
            await history.settle()
            for task in history.holding:
                if task not in held:
                    assert arrivals.index(task) > order[task.client], "a client's tasks keep order"
                    order[task.client] = arrivals.index(task)
        while history.holding or history.waiting:
            assert history.holding, "somebody waits for nothing"
            history.release(0)
            await history.settle()
        assert history.budget.num_free == AMOUNT
        assert not history.budget._waiting

    asyncio.run(run())


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=30),
    st.integers(1, 20),
    st.integers(1, 20),
)
def test_what_grows_stays_within_the_budget(pieces: list[tuple[int, int]], amount: int, share: int):
    budget = SharedBudget(amount, share=share)
    clients = ["a", "a", "b", "b", None]
    holdings = [Holding(budget, client) for client in clients]
    for number, piece in pieces:
        before = [holding.amount for holding in holdings]
        own = sum(
            size for size, client in zip(before, clients, strict=True) if client == clients[number]
        )
        is_alone = clients[number] is None or own == before[number]
        fits = sum(before) + piece <= amount and (is_alone or own + piece <= share)
        assert holdings[number].grow(piece) == fits
        before[number] += piece * fits
        assert [holding.amount for holding in holdings] == before
        assert budget.num_taken == sum(before)
    for holding in holdings:
        holding.release()
    assert budget.num_free == amount


async def test_a_product_counts_until_the_block_has_ended():
    budget = SharedBudget(10)

    async def make() -> str:
        return "made"

    async with budget.product(6, "a", make) as made:
        assert (made, budget.num_free) == ("made", 4)
    assert budget.num_free == 10


async def test_a_product_of_a_cancelled_task_counts_until_it_is_made():
    budget, is_made = SharedBudget(10), asyncio.Event()

    async def take() -> None:
        async with budget.product(6, None, is_made.wait):
            raise AssertionError("it was cancelled before")

    task = asyncio.create_task(take())
    await settle()
    task.cancel()
    await settle()
    assert task.cancelled()
    assert budget.num_free == 4
    is_made.set()
    await settle()
    assert budget.num_free == 10
