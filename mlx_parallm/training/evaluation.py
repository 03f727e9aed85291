"""Evaluation of a session's parameters as they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from mlx_parallm.training.estimation import StepHost
from mlx_parallm.training.objectives import Scores
from mlx_parallm.training.records import Example
from mlx_parallm.training.step_forwards import UNPERTURBED, StepForwards, scores_of

# MAX_EVALUATED: inputs of an evaluation that are cut into forwards together.
MAX_EVALUATED = 64


async def scores_now(
    host: StepHost, examples: Sequence[Example], run: Callable[..., Awaitable[tuple[Any, ...]]]
) -> Scores:
    """Return how well labels are predicted by the session, which is open.

    Args:
        host: the session.
        examples: with all that their loss is computed from.
        run: returns the results of ops: ``StepHost.ask`` or ``StepHost.send``.
    """
    size = host.state.forwards
    assert size is not None, "it is open"
    shaped = host.in_form(examples)
    formed = [Example(item, each.label) for each in shaped for item in each.inputs]
    results: list[np.ndarray] = []
    for begin in range(0, len(formed), MAX_EVALUATED):
        forwards = StepForwards.of_evaluation(size, formed[begin : begin + MAX_EVALUATED])
        # Texts that are evaluated must not evict those that are trained on.
        ops = forwards.ops(host.config, UNPERTURBED, keeps=False)
        results += forwards.rows([(await run(op))[0] for op in ops])
    return scores_of(results, examples, host.config.loss)
