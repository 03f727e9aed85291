"""The trainer of GRPO with a LoRA.

Group Relative Policy Optimization, https://arxiv.org/abs/2402.03300: the advantage of a sample is
its reward above the mean of its group, in standard deviations of the group; the objective is PPO's
clipped one (https://arxiv.org/abs/1707.06347), token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

Batch = dict[str, mx.array]

# ALL_LAYERS: mlx-lm's value for all layers.
ALL_LAYERS = -1
# BETAS: decay of Adam's moments.
BETAS = (0.9, 0.99)
# LENGTH_STEP: rows are padded to a multiple of this, so that few shapes occur.
LENGTH_STEP = 8


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A sample of the server and its advantage.

    Attributes:
        prompt_ids: the prompt's ids that the server used.
        token_ids: the completion's ids.
        logprobs: one per token of the completion, under the weights that sampled it.
        advantage: see ``group_advantages``.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hyperparameters.

    Attributes:
        rank: rank of the LoRA.
        scale: the factor of the LoRA's product, which PEFT writes as alpha / rank.
        learning_rate: Adam's learning rate.
        clip: most distance of the policies' ratio from 1.
        kl: weight of the divergence from the base model; 0 leaves it out and saves a forward.
        epochs: number of passes over the samples.
        minibatch: samples per step of the optimizer.
        max_grad_norm: gradients are clipped to this norm.
    """

    rank: int = 16
    scale: float = 2.0
    learning_rate: float = 3e-4
    clip: float = 0.2
    kl: float = 0.0
    epochs: int = 1
    minibatch: int = 64
    max_grad_norm: float = 1.0


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Return a group's rewards in standard deviations above their mean; zeros if all are equal."""
    values = np.array(rewards, np.float64)
    return [float(value) for value in (values - values.mean()) / (values.std() + 1e-4)]


def minibatches(
    samples: Sequence[TrainingSample], settings: Settings, order: Random
) -> Iterator[list[TrainingSample]]:
    """Yield the samples of each step of the optimizer, in an order drawn for each epoch."""
    # A group with equal rewards has no gradient.
    useful = [sample for sample in samples if sample.advantage]
    for _ in range(settings.epochs):
        order.shuffle(useful)
        for begin in range(0, len(useful), settings.minibatch):
            yield useful[begin : begin + settings.minibatch]


class Trainer:
    """A frozen base model, a LoRA on all its linear layers, and an optimizer."""

    def __init__(self, model_path: Path, settings: Settings, seed: int = 0) -> None:
        mx.random.seed(seed)
        self._settings = settings
        self._order = Random(seed)
        # The server does this on the CPU, and other rounding would make another policy.
        model, _ = utils.load_model(model_path)
        self.model = utils.dequantize_model(model)
        self.model.set_dtype(mx.float32)
        self.model.freeze()
        self._lora = {"rank": settings.rank, "scale": settings.scale, "dropout": 0.0}
        linear_to_lora_layers(self.model, ALL_LAYERS, self._lora)
        self._optimizer = optim.Adam(settings.learning_rate, betas=list(BETAS))
        self._loss_and_grad = nn.value_and_grad(self.model, self._loss)

    def adapter(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the LoRA's tensors and its config, in the form of mlx-lm's files."""
        config = {"fine_tune_type": "lora", "lora_parameters": self._lora}
        tensors: Any = tree_flatten(self.model.trainable_parameters())
        return {name: np.array(tensor) for name, tensor in tensors}, config

    def update(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Train on samples.

        Returns:
            Figures as means over the optimizer's steps, and ``mismatch``, the largest difference
            between the server's and the trainer's log-probabilities before the first step.
        """
        parts = minibatches(samples, self._settings, self._order)
        measured = [self._step(make_batch(part)) for part in parts]
        if not measured:
            return {}
        means = {name: sum(step[name] for step in measured) / len(measured) for name in measured[0]}
        return means | {"mismatch": measured[0]["mismatch"]}

    def _step(self, batch: Batch) -> dict[str, float]:
        if self._settings.kl:
            batch["reference"] = self._reference_logprobs(batch)
        (loss, measured), grads = self._loss_and_grad(batch)
        grads, norm = optim.clip_grad_norm(grads, self._settings.max_grad_norm)
        self._optimizer.update(self.model, grads)
        mx.eval(self.model.trainable_parameters(), self._optimizer.state, measured)
        measured |= {"loss": loss, "grad_norm": norm}
        return {name: value.item() for name, value in measured.items()}

    def _loss(self, batch: Batch) -> tuple[mx.array, Batch]:
        """Return the mean loss over all completion tokens, and further figures."""
        mask, advantages, clip = batch["mask"], batch["advantages"], self._settings.clip
        logprobs = self._token_logprobs(batch)
        change = (logprobs - batch["logprobs"]) * mask
        ratio = mx.exp(change)
        clipped = mx.clip(ratio, 1 - clip, 1 + clip)
        losses = -mx.minimum(ratio * advantages, clipped * advantages)
        if self._settings.kl:
            # Schulman's estimator of the divergence from the base model is never negative.
            away = (batch["reference"] - logprobs) * mask
            losses = losses + self._settings.kl * (mx.exp(away) - away - 1)
        num_tokens = mask.sum()
        measured = {
            "mismatch": mx.abs(change).max(),
            "clipped": ((ratio != clipped) * mask).sum() / num_tokens,
        }
        return (losses * mask).sum() / num_tokens, measured

    def _token_logprobs(self, batch: Batch) -> mx.array:
        """Return the log-probability of each token after the first, [rows, length - 1]."""
        logits = self.model(batch["tokens"][:, :-1])
        return -nn.losses.cross_entropy(logits, batch["tokens"][:, 1:])

    def _reference_logprobs(self, batch: Batch) -> mx.array:
        """Return ``_token_logprobs`` of the base model, without the LoRA."""
        layers = [module for module in self.model.modules() if isinstance(module, LoRALinear)]
        for layer in layers:
            layer.scale = 0.0
        logprobs = self._token_logprobs(batch)
        mx.eval(logprobs)
        for layer in layers:
            layer.scale = self._settings.scale
        return logprobs


def make_batch(samples: Sequence[TrainingSample]) -> Batch:
    """Return samples as rows, padded on the right; the mask is 1 at completion tokens only.

    Returns:
        ``tokens`` [rows, length], ``advantages`` [rows, 1]; ``mask`` and ``logprobs``
        [rows, length - 1], whose entry i is about token i + 1.
    """
    longest = max(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP
    tokens = np.zeros((len(samples), length), np.int32)
    mask, logprobs = np.zeros((2, len(samples), length - 1), np.float32)
    for row, sample in enumerate(samples):
        begin, end = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.token_ids)
        tokens[row, :end] = [*sample.prompt_ids, *sample.token_ids]
        mask[row, begin - 1 : end - 1] = 1
        logprobs[row, begin - 1 : end - 1] = sample.logprobs
    advantages = np.array([[sample.advantage] for sample in samples], np.float32)
    return {
        "tokens": mx.array(tokens),
        "mask": mx.array(mask),
        "logprobs": mx.array(logprobs),
        "advantages": mx.array(advantages),
    }
