"""Proximal policy optimisation of a policy that a server has; README.md describes the command.

The loss is that of https://arxiv.org/abs/1707.06347, the advantages are those of
https://arxiv.org/abs/1506.02438.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from examples.policies.cartpole import Carts
from examples.policies.networks import Network, Weights
from examples.policies.rollouts import ActingPolicy, Arrays, Player, Rollout

Batch = dict[str, mx.array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hyperparameters.

    Attributes:
        carts: rows of each request.
        steps: steps of each cart between two updates.
        updates: their number.
        epochs: passes over the steps of an update.
        minibatches: parts of the carts in a pass; an episode's steps stay in order.
        learning_rate: Adam's, at first; it falls to zero.
        clip: most distance of the policies' ratio from 1, at first; it falls to zero too.
        discount: worth of a reward that comes one step later.
        trace: the lambda of the advantages.
        value_weight: weight of the critic's loss.
        entropy_weight: weight of the entropy.
        max_grad_norm: gradients are clipped to this norm.
    """

    carts: int = 64
    steps: int = 32
    updates: int = 100
    epochs: int = 8
    minibatches: int = 4
    learning_rate: float = 1e-3
    clip: float = 0.2
    discount: float = 0.98
    trace: float = 0.8
    value_weight: float = 0.5
    entropy_weight: float = 0.0
    max_grad_norm: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """The figures of an update.

    Attributes:
        number: from 1.
        steps: steps of all carts so far.
        mean_return: of the last 100 episodes.
        mismatch: largest difference of the server's log-probabilities from the trainer's.
    """

    number: int
    steps: int
    mean_return: float
    mismatch: float


class Trainer:
    """A network, its weights and an optimizer."""

    def __init__(self, network: Network, settings: Settings, seed: int) -> None:
        self._network, self._settings = network, settings
        self.weights = network.new_weights(seed)
        self._optimizer = optim.Adam(settings.learning_rate, eps=1e-5)
        self._optimizer.init(self.weights)
        self._order = np.random.default_rng(seed)
        self._compute = mx.compile(mx.value_and_grad(self._loss))
        self._judge = mx.compile(self._log_probs)

    def zeros(self, rows: int) -> Arrays:
        """Return the states that begin an episode."""
        shapes = self._network.state_shapes
        return {name: np.zeros((rows, *shape), np.float32) for name, shape in shapes.items()}

    def arrays(self) -> Arrays:
        """Return the weights for an upload."""
        return {name: np.array(weight) for name, weight in self.weights.items()}

    def update(self, rollout: Rollout, remaining: float) -> float:
        """Train on a rollout and return the mismatch before; ``remaining`` falls from 1 to 0."""
        settings = self._settings
        batch = self._batch(rollout)
        mismatch = mx.abs(self._judge(self.weights, batch)[0] - batch["log_probs"]).max()
        mx.eval(mismatch)
        self._optimizer.learning_rate = settings.learning_rate * remaining
        clip = mx.array(settings.clip * remaining)
        for _ in range(settings.epochs):
            order = self._order.permutation(len(rollout.actions))
            for rows in np.split(order, settings.minibatches):
                part = {name: array[mx.array(rows)] for name, array in batch.items()}
                _, gradients = self._compute(self.weights, part, clip)
                gradients, _ = optim.clip_grad_norm(gradients, settings.max_grad_norm)
                self.weights = self._optimizer.apply_gradients(gradients, self.weights)
                mx.eval(self.weights, self._optimizer.state)
        return cast("float", mismatch.item())

    def _batch(self, rollout: Rollout) -> Batch:
        advantages = rollout.advantages(self._settings.discount, self._settings.trace)
        arrays: dict[str, np.ndarray] = {
            "observations": rollout.observations,
            "actions": rollout.actions.astype(np.int32),
            "log_probs": rollout.log_probs,
            "starts": rollout.starts,
            "returns": advantages + rollout.values[:, :-1],
            "advantages": (advantages - advantages.mean()) / (advantages.std() + 1e-8),
        }
        return {name: mx.array(array) for name, array in {**arrays, **rollout.states}.items()}

    def _log_probs(self, weights: Weights, batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
        """Return the actions' log-probabilities, entropies and values."""
        states = {name: batch[name] for name in self._network.state_shapes}
        logits, values = self._network.forward(
            weights, batch["observations"], batch["starts"], states
        )
        likely = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(likely, batch["actions"][..., None], axis=-1)[..., 0]
        return chosen, -(mx.exp(likely) * likely).sum(axis=-1), values

    def _loss(self, weights: Weights, batch: Batch, clip: mx.array) -> mx.array:
        settings = self._settings
        log_probs, entropies, values = self._log_probs(weights, batch)
        ratio = mx.exp(log_probs - batch["log_probs"])
        clipped = mx.clip(ratio, 1 - clip, 1 + clip)
        gains = mx.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
        errors = mx.square(values - batch["returns"])
        return (
            settings.value_weight * errors.mean()
            - gains.mean()
            - settings.entropy_weight * entropies.mean()
        )


def train(
    policy: ActingPolicy, trainer: Trainer, carts: Carts, settings: Settings, seed: int
) -> Iterator[Update]:
    """Yield the figures of each update, after its upload."""
    player = Player(policy, carts, trainer.zeros(settings.carts), seed)
    policy.upload(trainer.arrays(), "ppo-0")
    for number in range(1, settings.updates + 1):
        rollout = player.play(settings.steps, f"ppo-{number - 1}", settings.discount)
        mismatch = trainer.update(rollout, 1 - (number - 1) / settings.updates)
        policy.upload(trainer.arrays(), f"ppo-{number}")
        yield Update(
            number=number,
            steps=number * settings.carts * settings.steps,
            mean_return=float(np.mean(carts.returns[-100:] or [0])),
            mismatch=mismatch,
        )
