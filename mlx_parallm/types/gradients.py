"""Plain values of training by gradients: losses, the optimiser's settings and its arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


class LossKind(StrEnum):
    """The loss of a row, from what the model's head returns for its inputs.

    likelihood: the negative result of the right choice: its log-probability, or the weighted sum
        of its tokens' (``ChoiceInput.weights``).
    cross_entropy: the negative log-probability of the right label or choice.
    dpo: direct preference optimisation (arXiv:2305.18290): the first choice is preferred to the
        second.
    pairwise: Bradley-Terry: of two inputs with one score each, the first is preferred.
    policy: PPO's clipped ratio (arXiv:1707.06347), summed over the tokens of a single choice, for
        inputs with ``ChoiceInput.by_token``, whose ``weights`` multiply the losses of tokens.
    """

    LIKELIHOOD = "likelihood"
    CROSS_ENTROPY = "cross_entropy"
    DPO = "dpo"
    PAIRWISE = "pairwise"
    POLICY = "policy"

    @property
    def inputs_per_row(self) -> int:
        """The number of inputs that make a row; they follow each other."""
        return 2 if self is LossKind.PAIRWISE else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A loss and its settings.

    Attributes:
        kind: the loss.
        beta: dpo: scale of how far the log-probabilities moved from the reference.
        centring: pairwise: weight of the squared sum of both scores, which keeps their mean at 0
            (TRL's center_rewards_coefficient).
        clip_low: policy: the ratio counts down to 1 - clip_low.
        clip_high: policy: the ratio counts up to 1 + clip_high.
        is_clipped: policy: False for importance sampling, the plain product of ratio and advantage.
        kl: policy: weight of the KL divergence to the reference, by the estimator "k3" of each
            token (http://joschu.net/blog/kl-approx.html); targets must have a reference.
    """

    kind: LossKind
    beta: float = 0.1
    centring: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    is_clipped: bool = True
    kl: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """The facts that make a row's loss, beside its inputs. Losses ignore what is not theirs.

    Attributes:
        label: likelihood, cross_entropy: index of the right label or choice.
        margin: pairwise: by how much the first score should exceed the second.
        reference: log-probabilities under the reference; dpo: of both choices; policy: of each
            token.
        logprobs: policy: of each token, when it was drawn.
        advantage: policy: of the row.
        weight: the row's loss is multiplied by it.
    """

    label: int = 0
    margin: float = 0.0
    reference: tuple[float, ...] = ()
    logprobs: tuple[float, ...] = ()
    advantage: float = 0.0
    weight: float = 1.0


class GradientForm(StrEnum):
    """Ways to compute a session's gradients.

    staged: a layer at a time beside streams, as one graph otherwise: a trial has shown equal bits.
    whole: as one graph, always; streams wait for each micro-batch.
    """

    STAGED = "staged"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class GradientResult:
    """The results of a forward whose gradient was added to a session's.

    Attributes:
        losses: of each row, float64 ``[rows]``, its weight included.
        facts: numbers of each row, float64 ``[rows]``, by name: dpo and pairwise have ``margins``,
            by how much the first is ahead (dpo: times beta), and ``accuracies``, 1 where it is
            ahead and 0 otherwise; policy has means over its tokens:
            ``ratios``, ``clipped`` (0 or 1) and, if all rows have a reference, ``kl``.
        lookups: texts whose states before the lowest trained layer were looked up.
        hits: those that were kept.
        frozen_tokens: tokens that were computed before the lowest trained layer, for texts that
            were not kept.
    """

    losses: np.ndarray
    facts: Mapping[str, np.ndarray] = field(default_factory=dict[str, "np.ndarray"])
    lookups: int = 0
    hits: int = 0
    frozen_tokens: int = 0


class OptimiserKind(StrEnum):
    """The optimiser: Adam (arXiv:1412.6980) with corrected bias, computed in float32.

    adam: weight decay is added to the gradient.
    adamw: weight decay shrinks the parameters (arXiv:1711.05101).
    """

    ADAM = "adam"
    ADAMW = "adamw"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimiserSettings:
    """Settings of an optimiser, beside the learning rate of each step.

    Attributes:
        kind: the optimiser.
        betas: decay of the first and of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: see ``OptimiserKind``.
        max_grad_norm: longer gradients are scaled to this norm; None: none is.
    """

    kind: OptimiserKind = OptimiserKind.ADAMW
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0


@dataclass(frozen=True, slots=True)
class TrainingArrays:
    """The parameters of a session, and the moments of its optimiser, float32 ``[P]`` each."""

    theta: np.ndarray
    first_moment: np.ndarray
    second_moment: np.ndarray
