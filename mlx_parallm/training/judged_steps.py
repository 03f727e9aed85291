"""Steps from the rewards of what the perturbed copies of a session generate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mlx_parallm.training.mezo.copies import ServedCopies
from mlx_parallm.training.records import Example, SessionConfig
from mlx_parallm.training.settings import StepChanges
from mlx_parallm.training.step_forwards import MadeStep, StepLosses

if TYPE_CHECKING:
    from mlx_parallm.training.session import Session

T = TypeVar("T")

#: Returns the mean reward of the samples that an adapter makes of each example. Adapters that are
#: asked with the same seed draw the same random numbers.
Rewards = Callable[[SessionConfig, str, Sequence[Example], int], Awaitable[Sequence[float]]]


async def judged_step(
    session: Session,
    examples: Sequence[Example] | None,
    changes: StepChanges,
    *,
    copies: ServedCopies,
    rewards: Rewards,
) -> MadeStep:
    """Make a step from the rewards of what the perturbed copies generate.

    Args:
        session: whose losses are rewards.
        examples: see ``Session.step``.
        changes: see ``Session.step``.
        copies: serves the perturbed copies meanwhile.
        rewards: judges what they generate.

    Raises:
        ConflictError: a sample got no reward, or there is no room for the copies.
        RequestAbortedError: samples were aborted, so that the step can be tried again.
    """
    async with session.exchange:
        batch = session.batch if examples is None else examples
        uploads = await session.perturbed(changes)
        names = [upload.name for upload in uploads]
        await copies.serve(session.config.model, uploads)
        begin_s = time.perf_counter()
        try:
            seed = session.seed(changes)
            judged = [rewards(session.config, name, batch, seed) for name in names]
            values = await _all_or_none(judged)
        finally:
            await copies.drop(names)
        losses = StepLosses.of([[-reward for reward in each] for each in values])
        seconds = time.perf_counter() - begin_s
        record = await session.learn(losses.means, seconds, changes)
    return MadeStep(record, losses)


async def _all_or_none(work: Sequence[Awaitable[T]]) -> list[T]:
    """Return the results of work that is done at once; if a part fails, end the others."""
    parts = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*parts)
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
