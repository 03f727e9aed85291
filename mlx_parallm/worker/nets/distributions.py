"""Actions of policies: drawn, likeliest or judged, with their log-probabilities.

Everything is a function of arrays, so that it may be compiled with the net. Arrays have the leading
dimensions ``[rows]``, or ``[rows, time]`` of recurrent policies; an action's elements come last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import mlx.core as mx

from mlx_parallm.types.nets import ActResult, Distribution, PolicySpec

#: ``MASKED_LOGIT``: sb3-contrib's logit of a choice that a mask forbids.
MASKED_LOGIT = -1e8
#: ``SQUASH_EPSILON``: SB3 adds it to the derivative of tanh, so that its logarithm stays finite.
SQUASH_EPSILON = 1e-6
#: ``TIME_STEP``: what a key's first word grows by from one time to the next. By the golden ratio,
#: keys of n times have no word in common unless seeds are 2^32 / (2.24 n) apart.
TIME_STEP = 0x9E3779B9
#: ``LEAST_GUMBEL``: below Gumbel noise of every float32 between 0 and 1.
LEAST_GUMBEL = -10.0
_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)
_FLOAT32_EPSILON = 2.0**-23


def act(
    policy: PolicySpec,
    outputs: Mapping[str, mx.array],
    *,
    seeds: mx.array,
    is_deterministic: mx.array,
    action_mask: mx.array | None = None,
    actions: mx.array | None = None,
    is_judged: mx.array | None = None,
) -> dict[str, mx.array]:
    """Return actions and what is known of them, by the names of ``ActResult``.

    Args:
        policy: the roles of the outputs.
        outputs: the net's.
        seeds: see ``ActRows``, like the other arguments.
        is_deterministic: bool ``[rows]``.
        action_mask: for categorical and multi-categorical actions.
        actions: actions to judge, for rows where ``is_judged``.
        is_judged: bool ``[rows]``; None: all rows, if there are ``actions``.

    Returns:
        ``policy.results``, where ``DIST`` is an array for each parameter. Integers are int64,
        other numbers float32.
    """
    family = _family(policy, outputs, action_mask)
    likeliest = family.likeliest()
    latent = mx.where(_flags(is_deterministic, likeliest), likeliest, family.draw(seeds))
    chosen = family.actions(latent)
    if actions is not None:
        actions = actions.astype(chosen.dtype)
        is_judged = mx.ones(len(chosen), mx.bool_) if is_judged is None else is_judged
        flags = _flags(is_judged, chosen)
        latent = mx.where(flags, family.latent(actions), latent)
        chosen = mx.where(flags, actions, chosen)
    values = {} if policy.value is None else {ActResult.VALUES: _values(policy, outputs)}
    return {
        ActResult.ACTIONS: chosen,
        ActResult.ACTIONS_FOR_ENV: _for_env(policy, chosen),
        **family.scores(chosen, latent),
        **values,
        **{f"{ActResult.DIST}.{role}": array for role, array in family.parameters().items()},
    }


def _flags(flags: mx.array, like: mx.array) -> mx.array:
    """Return flags of rows in a shape that fits an array of as many rows."""
    return flags.reshape(-1, *[1] * (like.ndim - 1))


def _values(policy: PolicySpec, outputs: Mapping[str, mx.array]) -> mx.array:
    """Return the estimates of values, without a dimension of their own."""
    values = outputs[policy.value or ""].astype(mx.float32)
    return values[..., 0] if values.ndim == outputs[policy.parameters].ndim else values


def _for_env(policy: PolicySpec, actions: mx.array) -> mx.array:
    """Return actions within an environment's bounds, if it has any."""
    if policy.low is None or policy.high is None:
        return actions
    low, high = mx.array(policy.low), mx.array(policy.high)
    if policy.distribution is Distribution.GAUSSIAN:
        return mx.clip(actions, low, high)
    return low + 0.5 * (actions + 1.0) * (high - low)


def _noise(draw: Callable[..., mx.array], seeds: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Return random numbers, those of each row and time by a key of their own.

    Args:
        draw: a function of ``mlx.core.random``.
        seeds: uint32 ``[rows, 2]``.
        shape: of the result: rows, time if there is one, numbers.
    """
    *leading, size = shape
    keys = seeds
    if len(leading) > 1:
        steps = mx.arange(leading[1], dtype=mx.uint32) * mx.array(TIME_STEP, mx.uint32)
        first = seeds[:, :1] + steps
        second = mx.broadcast_to(seeds[:, 1:], first.shape)
        keys = mx.stack([first, second], axis=-1).reshape(-1, 2)
    return mx.vmap(lambda key: draw(shape=(size,), key=key))(keys).reshape(shape)


class _Family(ABC):
    """A distribution of each row's action.

    A latent is what is drawn. It differs from the action only where this is a function of it.
    """

    @abstractmethod
    def likeliest(self) -> mx.array:
        """Return the latents of the likeliest actions."""

    @abstractmethod
    def draw(self, seeds: mx.array) -> mx.array:
        """Return random latents."""

    @abstractmethod
    def scores(self, actions: mx.array, latent: mx.array) -> dict[str, mx.array]:
        """Return log-probabilities, and the entropy where it has a formula."""

    @abstractmethod
    def parameters(self) -> dict[str, mx.array]:
        """Return the distribution's parameters by their roles."""

    def actions(self, latent: mx.array) -> mx.array:
        """Return the actions of latents."""
        return latent

    def latent(self, actions: mx.array) -> mx.array:
        """Return the latents of actions."""
        return actions


@dataclass(frozen=True)
class _Choices(_Family):
    """One choice of several, or one for each of several sizes that share the logits."""

    logits: mx.array
    sizes: tuple[int, ...]
    mask: mx.array | None
    is_single: bool

    @cached_property
    def log_probs(self) -> mx.array:
        """Log-probabilities of all choices, each size's by itself."""
        logits = self.logits
        if self.mask is not None:
            logits = mx.where(self.mask, logits, MASKED_LOGIT)
        parts = [part - mx.logsumexp(part, -1, keepdims=True) for part in self._split(logits)]
        return mx.concatenate(parts, axis=-1)

    def _split(self, logits: mx.array) -> list[mx.array]:
        return list(mx.split(logits, list(accumulate(self.sizes))[:-1], axis=-1))

    def _best(self, logits: mx.array) -> mx.array:
        if self.mask is not None:
            # Logits that are allowed may be less than those that are not.
            logits = mx.where(self.mask, logits, -mx.inf)
        best = [mx.argmax(part, axis=-1) for part in self._split(logits)]
        chosen = best[0] if self.is_single else mx.stack(best, axis=-1)
        return chosen.astype(mx.int64)

    def likeliest(self) -> mx.array:
        return self._best(self.log_probs)

    def draw(self, seeds: mx.array) -> mx.array:
        noise = _noise(mx.random.gumbel, seeds, self.log_probs.shape)
        # The noise of a uniform 0 is infinite, and would exclude the only choice that is allowed.
        return self._best(self.log_probs + mx.maximum(noise, LEAST_GUMBEL))

    def scores(self, actions: mx.array, latent: mx.array) -> dict[str, mx.array]:
        index = actions[..., None] if self.is_single else actions
        starts = [0, *accumulate(self.sizes)][:-1]
        of_choices = mx.take_along_axis(self.log_probs, index + mx.array(starts), axis=-1)
        probs = mx.exp(self.log_probs)
        # A choice of no probability adds nothing, though 0 times its infinite logarithm is NaN.
        entropy = mx.where(probs > 0, probs * mx.abs(self.log_probs), 0).sum(-1)
        return {ActResult.LOG_PROBS: of_choices.sum(-1), ActResult.ENTROPY: entropy}

    def parameters(self) -> dict[str, mx.array]:
        return {"logits": self.log_probs}


@dataclass(frozen=True)
class _Bits(_Family):
    """Zeros and ones."""

    logits: mx.array

    def likeliest(self) -> mx.array:
        return (self.logits > 0).astype(mx.int64)

    def draw(self, seeds: mx.array) -> mx.array:
        uniform = _noise(mx.random.uniform, seeds, self.logits.shape)
        return (uniform < mx.sigmoid(self.logits)).astype(mx.int64)

    def scores(self, actions: mx.array, latent: mx.array) -> dict[str, mx.array]:
        log_one, log_zero = -mx.logaddexp(-self.logits, 0.0), -mx.logaddexp(self.logits, 0.0)
        log_probs = mx.where(actions > 0, log_one, log_zero).sum(-1)
        prob = mx.sigmoid(self.logits)
        of_ones = mx.where(prob > 0, prob * mx.abs(log_one), 0)
        of_zeros = mx.where(prob < 1, (1 - prob) * mx.abs(log_zero), 0)
        entropy = (of_ones + of_zeros).sum(-1)
        return {ActResult.LOG_PROBS: log_probs, ActResult.ENTROPY: entropy}

    def parameters(self) -> dict[str, mx.array]:
        return {"logits": self.logits}


@dataclass(frozen=True)
class _Gaussian(_Family):
    """Independent normal numbers."""

    mean: mx.array
    log_std: mx.array

    def likeliest(self) -> mx.array:
        return self.mean

    def draw(self, seeds: mx.array) -> mx.array:
        noise = _noise(mx.random.normal, seeds, self.mean.shape)
        return self.mean + mx.exp(self.log_std) * noise

    def scores(self, actions: mx.array, latent: mx.array) -> dict[str, mx.array]:
        entropy = (0.5 + _LOG_SQRT_2_PI + self.log_std).sum(-1)
        return {ActResult.LOG_PROBS: self._density(latent), ActResult.ENTROPY: entropy}

    def _density(self, latent: mx.array) -> mx.array:
        distance = (latent - self.mean) * mx.exp(-self.log_std)
        return (-0.5 * distance.square() - self.log_std - _LOG_SQRT_2_PI).sum(-1)

    def parameters(self) -> dict[str, mx.array]:
        return {"mean": self.mean, "log_std": self.log_std}


class _SquashedGaussian(_Gaussian):
    """The tanh of normal numbers, with SB3's log-probabilities."""

    def actions(self, latent: mx.array) -> mx.array:
        return mx.tanh(latent)

    def latent(self, actions: mx.array) -> mx.array:
        limit = 1.0 - _FLOAT32_EPSILON
        inside = mx.clip(actions, -limit, limit)
        return 0.5 * (mx.log1p(inside) - mx.log1p(-inside))

    def scores(self, actions: mx.array, latent: mx.array) -> dict[str, mx.array]:
        # Near the bounds the square's rounding matters, so it is written as SB3 writes it.
        squash = mx.log(1 - actions * actions + SQUASH_EPSILON).sum(-1)
        return {ActResult.LOG_PROBS: self._density(latent) - squash}


@dataclass(frozen=True)
class _Fixed(_Family):
    """Actions that the net returns."""

    output: mx.array

    def likeliest(self) -> mx.array:
        return self.output

    def draw(self, seeds: mx.array) -> mx.array:
        return self.output

    def scores(self, actions: mx.array, latent: mx.array) -> dict[str, mx.array]:
        return {}

    def parameters(self) -> dict[str, mx.array]:
        return {"mean": self.output}


def _family(policy: PolicySpec, outputs: Mapping[str, mx.array], mask: mx.array | None) -> _Family:
    first = outputs[policy.parameters].astype(mx.float32)
    match policy.distribution:
        case Distribution.CATEGORICAL:
            return _Choices(first, (first.shape[-1],), mask, is_single=True)
        case Distribution.MULTI_CATEGORICAL:
            return _Choices(first, policy.sizes, mask, is_single=False)
        case Distribution.BERNOULLI:
            return _Bits(first)
        case Distribution.GAUSSIAN:
            return _Gaussian(first, _log_std(policy, outputs, first))
        case Distribution.SQUASHED_GAUSSIAN:
            return _SquashedGaussian(first, _log_std(policy, outputs, first))
        case Distribution.DETERMINISTIC:
            return _Fixed(first)


def _log_std(policy: PolicySpec, outputs: Mapping[str, Any], mean: mx.array) -> mx.array:
    """Return ``log_std`` in the shape of the mean; a free parameter lacks time, if not rows too."""
    log_std = outputs[policy.log_std or ""].astype(mx.float32)
    if 1 < log_std.ndim < mean.ndim:
        log_std = log_std[:, None]
    return mx.broadcast_to(log_std, mean.shape)
