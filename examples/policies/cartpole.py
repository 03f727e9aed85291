"""The task CartPole-v1 of gymnasium, for many carts at once, in NumPy.

The physics are those of Barto, Sutton and Anderson, "Neuronlike Adaptive Elements That Can Solve
Difficult Learning Control Problem" (1983), in gymnasium's order of operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GRAVITY, CART_MASS, POLE_MASS, HALF_LENGTH, FORCE, TICK_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
# MAX_POSITION, MAX_ANGLE: an episode ends beyond them, in metres and in radians.
MAX_POSITION, MAX_ANGLE = 2.4, 12 * 2 * np.pi / 360
# MAX_STEPS: the longest episode; each step is rewarded with 1.
MAX_STEPS = 500
# PLACES: the indices of position and angle in a state; the others are their velocities.
PLACES = (0, 2)


def advance(state: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Return the states ``[carts, 4]`` after a push to the left (0) or right (1)."""
    _, velocity, angle, spin = state.T
    mass = CART_MASS + POLE_MASS
    push = np.where(actions == 1, FORCE, -FORCE)
    sine, cosine = np.sin(angle), np.cos(angle)
    pulled = (push + POLE_MASS * HALF_LENGTH * np.square(spin) * sine) / mass
    lever = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * np.square(cosine) / mass)
    turn = (GRAVITY * sine - cosine * pulled) / lever
    pace = pulled - POLE_MASS * HALF_LENGTH * turn * cosine / mass
    rates = np.stack([velocity, pace, spin, turn], axis=1)
    return state + TICK_S * rates


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a step of all carts.

    Attributes:
        observations: the next ones; those of a new episode where the last one ended.
        last_observations: the next ones before a new episode began.
        has_fallen: where the episode ended because the pole fell or the cart left.
        is_cut: where it ended because it was long enough.
    """

    observations: np.ndarray
    last_observations: np.ndarray
    has_fallen: np.ndarray
    is_cut: np.ndarray

    @property
    def has_ended(self) -> np.ndarray:
        """Where a new episode has begun."""
        return self.has_fallen | self.is_cut


class Carts:
    """Carts whose episodes begin anew when they end; each step is worth 1."""

    def __init__(self, num_carts: int, seed: int, *, shows_velocities: bool = True) -> None:
        self._random = np.random.default_rng(seed)
        self._state = self._fresh(num_carts)
        self._ages = np.zeros(num_carts, np.int64)
        self._seen = slice(None) if shows_velocities else list(PLACES)
        self.returns: list[int] = []

    @property
    def observations(self) -> np.ndarray:
        """Observations ``[carts, 4]``, or ``[carts, 2]`` without velocities."""
        return self._state[:, self._seen].astype(np.float32)

    def step(self, actions: np.ndarray) -> Outcome:
        """Push every cart; the returns of episodes that end are added to ``returns``."""
        self._state = advance(self._state, actions)
        self._ages += 1
        limits = np.array([MAX_POSITION, MAX_ANGLE])
        has_fallen = np.any(np.abs(self._state[:, list(PLACES)]) > limits, axis=1)
        is_cut = (self._ages >= MAX_STEPS) & ~has_fallen
        last = self.observations
        has_ended = has_fallen | is_cut
        self.returns += self._ages[has_ended].tolist()
        self._state[has_ended] = self._fresh(int(has_ended.sum()))
        self._ages[has_ended] = 0
        return Outcome(self.observations, last, has_fallen, is_cut)

    def _fresh(self, num_carts: int) -> np.ndarray:
        return self._random.uniform(-0.05, 0.05, (num_carts, 4))
