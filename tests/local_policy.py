"""A policy that acts as a served one does, without a server."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from examples.policies.rollouts import Acts, Arrays
from mlx_parallm.models.nets.plan import NetPlan
from mlx_parallm.worker.nets.layers import forward


class LocalPolicy:
    """Computes a net as the server does. Implements ``ActingPolicy``."""

    def __init__(self, plan: NetPlan) -> None:
        self._plan = plan
        self._weights: dict[str, mx.array] = {}
        self._forward = mx.compile(self._outputs)
        self.versions: list[str] = []

    def upload(self, weights: Arrays, version: str) -> None:
        self._weights = {name: mx.array(weight) for name, weight in weights.items()}
        self.versions.append(version)

    def act(
        self,
        observations: np.ndarray,
        states: Arrays,
        starts: np.ndarray,
        *,
        seed: int | None = None,
    ) -> Acts:
        before = {name: mx.array(state) for name, state in states.items()}
        outputs, after = self._forward(
            self._weights, mx.array(observations), before, mx.array(starts)
        )
        logits = outputs["logits"]
        if seed is None:
            actions = logits.argmax(axis=-1)
        else:
            actions = mx.random.categorical(logits, key=mx.random.key(seed))
        likely = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(likely, actions[:, None], axis=-1)[:, 0]
        return Acts(
            actions=np.array(actions),
            log_probs=np.array(chosen),
            values=np.array(outputs["value"][:, 0]),
            states={name: np.array(state) for name, state in after.items()},
            version=self.versions[-1],
        )

    def _outputs(
        self,
        weights: dict[str, mx.array],
        observations: mx.array,
        states: dict[str, mx.array],
        starts: mx.array,
    ) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        return forward(self._plan, weights, {"obs": observations}, states, starts)
