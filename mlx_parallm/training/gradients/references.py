"""Log-probabilities under a session's first parameters, which some losses compare with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.training.estimation import StepHost
from mlx_parallm.training.records import Example
from mlx_parallm.training.step_forwards import UNPERTURBED, StepForwards
from mlx_parallm.types.gradients import LossKind, LossSpec

Reference = tuple[float, ...]


class References:
    """Adds references to examples that need one. Those of the data are computed once, and kept."""

    def __init__(self, host: StepHost, loss: LossSpec) -> None:
        """Prepare."""
        self._host, self._loss = host, loss
        self._is_ready = False

    async def prepare(self) -> None:
        """Add references to the data of the session, which is open."""
        if self._is_ready:
            return
        host = self._host
        known = await asyncio.to_thread(host.files.references)
        if known is None and any(map(self._needs, host.examples)):
            known = await self._computed(host.examples)
            await asyncio.to_thread(host.files.save_references, known)
        if known is not None:
            host.examples[:] = _with(host.examples, known)
        self._is_ready = True

    async def added(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples with references."""
        if not any(map(self._needs, examples)):
            return list(examples)
        return _with(examples, await self._computed(examples))

    def _needs(self, example: Example) -> bool:
        is_compared = self._loss.kind is LossKind.DPO or bool(
            self._loss.kind is LossKind.POLICY and self._loss.kl
        )
        return is_compared and not example.loss_target.reference

    async def _computed(self, examples: Sequence[Example]) -> list[Reference]:
        """Return the log-probabilities of each example's choices, or of its tokens."""
        host, size = self._host, self._host.state.forwards
        assert size is not None, "it is open"
        forwards = StepForwards.of_evaluation(size, examples)
        ops = forwards.ops(host.config, UNPERTURBED, keeps=False)
        rows = forwards.rows(await host.beside(None, *ops))
        return [tuple(row.reshape(-1).astype(float).tolist()) for row in rows]


def _with(examples: Sequence[Example], references: Sequence[Reference]) -> list[Example]:
    """Return examples with references; those that have one keep it."""
    return [
        example
        if example.loss_target.reference
        else replace(example, target=replace(example.loss_target, reference=reference))
        for example, reference in zip(examples, references, strict=True)
    ]
