"""Steps of many carts with a policy that a server has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from examples.policies.cartpole import Carts

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acts:
    """The answer for a row of each cart."""

    actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    states: Arrays
    version: str


class ActingPolicy(Protocol):
    """A policy that a server has."""

    def act(
        self,
        observations: np.ndarray,
        states: Arrays,
        starts: np.ndarray,
        *,
        seed: int | None = None,
    ) -> Acts:
        """Draw actions, or choose the likeliest ones if there is no seed."""
        ...

    def upload(self, weights: Arrays, version: str) -> None:
        """Replace its weights; later answers have this version."""
        ...


class WrongVersionError(RuntimeError):
    """An answer was made by other weights than those that were uploaded last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Steps ``[carts, steps]`` of one version of the policy.

    Attributes:
        observations: what the carts showed.
        actions: what was done.
        log_probs: their logarithmic probabilities, from the server.
        values: the critic's estimates, and one more of what came after the last step.
        rewards: those of the steps.
        starts: where an episode began.
        ends: where it ended with the step.
        states: those before the first step, by name.
    """

    observations: np.ndarray
    actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    rewards: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    states: Arrays

    def advantages(self, discount: float, trace: float) -> np.ndarray:
        """Return generalised advantage estimates ``[carts, steps]``."""
        goes_on = 1.0 - self.ends
        surprise = self.rewards + discount * goes_on * self.values[:, 1:] - self.values[:, :-1]
        advantages = np.zeros_like(surprise)
        later = np.zeros(len(surprise), np.float32)
        for time in reversed(range(surprise.shape[1])):
            later = surprise[:, time] + discount * trace * goes_on[:, time] * later
            advantages[:, time] = later
        return advantages


class Player:
    """Plays with carts, whose episodes go on from one rollout to the next."""

    def __init__(self, policy: ActingPolicy, carts: Carts, zeros: Arrays, seed: int) -> None:
        self._policy, self._carts, self._states = policy, carts, zeros
        self._starts = np.ones(len(carts.observations), bool)
        self._random = np.random.default_rng(seed)

    def play(self, steps: int, version: str, discount: float) -> Rollout:
        """Play so many steps, each worth ``1 - discount``, so that values are between 0 and 1.

        Raises:
            WrongVersionError: an answer has another version.
        """
        first_states = self._states
        columns: list[tuple[np.ndarray, ...]] = []
        for _ in range(steps):
            seen, starts = self._carts.observations, self._starts
            acts = self._act(seen, starts, version)
            outcome = self._carts.step(acts.actions)
            self._states, self._starts = acts.states, outcome.has_ended
            rewards = np.full(len(seen), 1 - discount, np.float32)
            if outcome.is_cut.any():
                # The pole would have stood longer, for what the critic expects.
                rest = self._act(outcome.last_observations, np.zeros_like(starts), version)
                rewards += discount * rest.values * outcome.is_cut
            columns.append(
                (seen, acts.actions, acts.log_probs, acts.values, rewards, starts, self._starts)
            )
        last = self._act(self._carts.observations, self._starts, version)
        observations, actions, log_probs, values, rewards, starts, ends = (
            np.stack(column, axis=1) for column in zip(*columns, strict=True)
        )
        return Rollout(
            observations=observations,
            actions=actions,
            log_probs=log_probs,
            values=np.concatenate([values, last.values[:, None]], axis=1),
            rewards=rewards,
            starts=starts,
            ends=ends,
            states=first_states,
        )

    def _act(self, observations: np.ndarray, starts: np.ndarray, version: str) -> Acts:
        seed = int(self._random.integers(1 << 32))
        acts = self._policy.act(observations, self._states, starts, seed=seed)
        if acts.version != version:
            raise WrongVersionError(f"{acts.version!r} acted; {version!r} was uploaded last")
        return acts


def evaluate(
    policy: ActingPolicy, carts: Carts, zeros: Arrays, *, keeps_states: bool = True
) -> float:
    """Return the mean return of the first episode of each cart, with the likeliest actions.

    Args:
        policy: the policy.
        carts: new ones.
        zeros: the states of a first step.
        keeps_states: False to begin every step with zeros.
    """
    states, starts = zeros, np.ones(len(carts.observations), bool)
    returns = np.zeros(len(starts), np.int64)
    is_first = starts.copy()
    while is_first.any():
        returns += is_first
        acts = policy.act(carts.observations, states, starts)
        starts = carts.step(acts.actions).has_ended
        states = acts.states if keeps_states else zeros
        is_first &= ~starts
    return float(returns.mean())
