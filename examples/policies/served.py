"""A policy that a server has, by the Python client."""

from __future__ import annotations

import numpy as np

from examples.policies.rollouts import Acts, Arrays
from mlx_parallm.client import SyncRLClient


class ServedPolicy:
    """Acts by ``POST /v1/rl/act``. Implements ``ActingPolicy``."""

    def __init__(self, client: SyncRLClient, model: str) -> None:
        self._client = client
        self._model = model
        self._version: str | None = None

    def act(
        self,
        observations: np.ndarray,
        states: Arrays,
        starts: np.ndarray,
        *,
        seed: int | None = None,
    ) -> Acts:
        """See ``ActingPolicy``."""
        draw = {"deterministic": True} if seed is None else {"seed": seed}
        memory = {"hidden_states": states, "episode_start": starts} if states else {}
        answer = self._client.nets.act(observations, model=self._model, **draw, **memory)
        return Acts(
            actions=np.asarray(answer.actions),
            log_probs=np.asarray(answer.log_probs),
            values=np.asarray(answer.value_estimates),
            states={name: np.asarray(state) for name, state in answer.new_hidden_states.items()},
            version=answer.policy_version,
        )

    def upload(self, weights: Arrays, version: str) -> None:
        """See ``ActingPolicy``. The server refuses it if others have changed the policy since."""
        self._version = self._client.update_weights(
            weights, model=self._model, version=version, expected_version=self._version
        )
