"""Bodies of training sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    StringConstraints,
    Tag,
    model_validator,
)

from mlx_parallm.api.mezo.fields import Beta, Finite, Loss, Name, Strict, container_of, kind_of
from mlx_parallm.api.mezo.rows import AnyRow, Data
from mlx_parallm.api.rl.schema import RewardModel, RolloutRequest, Verifier
from mlx_parallm.training.batches import BatchOrder
from mlx_parallm.training.objectives import Measure
from mlx_parallm.training.records import Mode
from mlx_parallm.training.settings import Sides
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.gradients import OptimiserKind
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.request import MAX_CHOICES
from mlx_parallm.types.training import Distribution, FirstFactors

MAX_STEPS = 10_000_000
#: ``NEW_HEAD`` is the value of ``Trainable.head`` for a new head of one label.
NEW_HEAD = "reward"
#: ``Layers`` is "all", "top:" and a number of layers, or indices.
Layers = Annotated[
    Annotated[str, StringConstraints(pattern=r"^(all|top:[1-9][0-9]{0,3})$"), Tag("<name>")]
    | Annotated[list[StrictInt], Tag("<list>")],
    Discriminator(kind_of),
]


class Trainable(Strict):
    """The adapter that is trained: a LoRA of some linear layers."""

    targets: list[Name] = Field(
        default_factory=list[str],
        max_length=64,
        description="Ends of the paths of linear layers, such as query; all if there are none.",
    )
    layers: Layers = Field(
        "all", description="The model's layers: all, top:N for the last N, or indices from 0."
    )
    rank: StrictInt = Field(8, ge=1, le=1024, description="Rank of each change.")
    alpha: Finite = Field(16.0, gt=0, description="The change is scaled by alpha / rank.")
    train: Literal["b", "ab"] = Field("b", description="Train the second factors only, or both.")
    init: FirstFactors | None = Field(
        None,
        description=(
            "First factors: random, or activations, principal directions of the layers' inputs. "
            "The default is activations; random for the preset paper and the objective caller."
        ),
    )
    head: Literal[False, True, "reward"] = Field(
        False,
        description=(
            "Train the classification head of the model too; reward: a new head of one label, for "
            "pairs, which the published adapter brings."
        ),
    )


class EstimatorBody(Strict):
    """Steps from losses at perturbed parameters (MeZO)."""

    preset: Literal["paper"] | None = Field(
        None, description="paper: MeZO as published; other fields given change it."
    )
    kind: Sides = Field(Sides.TWO_SIDED, description="Losses at both signs, or at one and none.")
    directions: StrictInt = Field(1, ge=1, le=256, description="Directions of a step.")
    groups: StrictBool = Field(
        False, description="Try each direction on its own part of the batch."
    )
    distribution: Distribution = Field(
        Distribution.RADEMACHER, description="Of the directions' numbers."
    )
    epsilon: Finite = Field(1e-2, gt=0, description="Size of the perturbation.")
    learning_rate: Finite = Field(
        1e-2, ge=0, description="If normalised, how far a parameter goes in a step."
    )
    normalise: StrictBool = Field(
        True, description="Divide by the running root mean square of the estimates."
    )
    decay_steps: StrictInt | None = Field(
        None, ge=1, le=MAX_STEPS, description="The learning rate falls to 0 in so many steps."
    )
    weight_decay: Finite = Field(0.0, ge=0, description="Share taken away by a step of rate 1.")


class GradientBody(Strict):
    """Steps from gradients."""

    kind: Literal["gradient"] = Field(description="Take gradients through the model.")
    optimizer: OptimiserKind = Field(
        OptimiserKind.ADAMW, description="adamw decays the parameters, adam the gradient."
    )
    learning_rate: Finite = Field(2e-3, ge=0, description="After the warm-up.")
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="Decay of the first and of the second moment."
    )
    weight_decay: Finite = Field(0.0, ge=0, description="Share taken away by a step of rate 1.")
    max_grad_norm: Finite | None = Field(
        1.0, gt=0, description="Longer gradients are scaled to this norm; null: none is."
    )
    warmup_steps: StrictInt = Field(
        0, ge=0, le=MAX_STEPS, description="The learning rate rises in so many steps."
    )
    decay_steps: StrictInt | None = Field(
        None, ge=1, le=MAX_STEPS, description="Then it falls to 0 in so many steps."
    )
    checkpoint_every: StrictInt | None = Field(
        None, ge=1, le=MAX_STEPS, description="Steps between checkpoints; by default, a minute is."
    )


def _estimator_kind(value: Any) -> str:
    """Return which kind of estimator a value is to be; see ``_kind``."""
    kind = value.get("kind") if is_object(value) else getattr(value, "kind", None)
    return "<gradient>" if kind == "gradient" else "<perturbations>"


#: ``Estimator`` is one of both kinds.
Estimator = Annotated[
    Annotated[GradientBody, Tag("<gradient>")] | Annotated[EstimatorBody, Tag("<perturbations>")],
    Discriminator(_estimator_kind),
]


#: ``LabelMeasure`` measures how well labels are chosen.
LabelMeasure = Literal[Measure.CROSS_ENTROPY, Measure.ERROR, Measure.F1]
#: ``CandidateMeasure`` measures how well candidates are chosen, or how likely the right one is.
CandidateMeasure = Literal[Measure.CROSS_ENTROPY, Measure.LIKELIHOOD, Measure.ERROR, Measure.F1]


class LabelWords(Strict):
    """A masked LM chooses between words at the mask of a template."""

    kind: Literal["label_words"] = Field("label_words", description="Words at a mask.")
    template: Annotated[StrictStr, Field(max_length=10_000)] = Field(
        "{text} It was [MASK].", description="{text} is a row's text; it has one [MASK]."
    )
    label_words: dict[str, StrictStr | StrictInt] = Field(
        min_length=2, max_length=1000, description="The word, or token id, of each label."
    )
    measure: LabelMeasure = Field(
        default=Measure.CROSS_ENTROPY, description="The loss to minimise."
    )


class Labels(Strict):
    """A classifier chooses between its own labels."""

    kind: Literal["labels"] = Field("labels", description="The labels of a classifier.")
    template: Annotated[StrictStr, Field(max_length=10_000)] = Field(
        "{text}", description="{text} is a row's text."
    )
    measure: LabelMeasure = Field(
        default=Measure.CROSS_ENTROPY, description="The loss to minimise."
    )


class Candidates(Strict):
    """A model that generates chooses between ways to continue a prompt, by their likelihood."""

    kind: Literal["candidates"] = Field("candidates", description="Ways to continue a prompt.")
    template: Annotated[StrictStr, Field(max_length=10_000)] = Field(
        "{text}", description="{text} is a row's text; the candidates follow the template."
    )
    candidates: dict[str, StrictStr | list[StrictInt]] = Field(
        min_length=2,
        max_length=1000,
        description="The text, or token ids, of each label; most texts begin with a space.",
    )
    normalize: StrictBool | None = Field(
        None,
        description="Divide a candidate's log-likelihood by its tokens; true for the preset paper.",
    )
    measure: CandidateMeasure = Field(
        default=Measure.CROSS_ENTROPY, description="The loss to minimise."
    )


class Caller(Strict):
    """The caller measures losses, with the adapters that ``ask`` names, and reports them."""

    kind: Literal["caller"] = Field("caller", description="Losses reported by the caller.")


class Reward(Strict):
    """A model that generates learns to continue prompts so that a judge rewards it."""

    kind: Literal["reward"] = Field("reward", description="Rewards of what is generated.")
    template: Annotated[StrictStr, Field(max_length=10_000)] = Field(
        "{text}", description="{text} is a row's text."
    )
    verifier: Verifier | None = Field(None, description="Gives each sample a reward.")
    reward_model: RewardModel | None = Field(
        None, description="Gives each sample a reward, in place of a verifier."
    )
    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES, description="Samples of each prompt.")
    sampling: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Sampling fields of /v1/rl/rollout, such as max_tokens and temperature.",
    )
    measure: Literal[Measure.REWARD] = Field(
        default=Measure.REWARD, description="The reward, negated."
    )

    @model_validator(mode="after")
    def _is_sampled(self) -> Self:
        own = {"model", "adapter", "prompts", "n", "seed", "seeds", "stream", "verifier"}
        wrong = sorted(self.sampling.keys() & (own | {"reward_model"}))
        if wrong:
            raise ValueError(f"sampling cannot have {wrong[0]}, which the session sets")
        body = {**self.sampling, "prompts": ["."]}
        unknown = self.sampling.keys() - RolloutRequest.model_fields.keys()
        if unknown:
            raise ValueError(f"sampling has {min(unknown)}, which is no field of a rollout")
        RolloutRequest.model_validate(body)
        return self


class Completion(Strict):
    """A model that generates learns to continue prompts as the data do."""

    kind: Literal["completion"] = Field("completion", description="The completions of the rows.")
    template: Annotated[StrictStr, Field(max_length=10_000)] = Field(
        "{text}", description="{text} is a row's text; its completion follows the template."
    )
    ends: StrictBool = Field(True, description="An end token follows each completion.")
    measure: Literal[Measure.LIKELIHOOD] = Field(
        default=Measure.LIKELIHOOD, description="Mean over a completion's tokens."
    )


class Pairs(Strict):
    """Preferred texts become likelier (DPO), or get a higher score of a reward model."""

    kind: Literal["pairs"] = Field("pairs", description="The chosen and the rejected of the rows.")
    beta: Finite = Field(
        0.1, gt=0, description="DPO: scale of how far log-probabilities moved from the beginning."
    )
    centring: Finite = Field(
        0.0, ge=0, description="Scores: weight of their squared sum, which keeps their mean at 0."
    )
    ends: StrictBool = Field(True, description="DPO: an end token follows each text.")
    measure: Literal[Measure.PREFERENCE] = Field(
        default=Measure.PREFERENCE, description="That the chosen is preferred."
    )


class Policy(Strict):
    """Samples with advantages become likelier or less likely (PPO, GRPO), by gradients."""

    kind: Literal["policy"] = Field("policy", description="Samples, their logprobs and advantages.")
    clip_low: Finite = Field(0.2, ge=0, le=1, description="The ratio counts down to 1 less this.")
    clip_high: Finite = Field(0.2, ge=0, description="The ratio counts up to 1 and this.")
    clipped: StrictBool = Field(
        True, description="False for importance sampling: ratio times advantage."
    )
    kl: Finite = Field(0.0, ge=0, description="Weight of the KL divergence to the reference.")
    measure: Literal[Measure.POLICY] = Field(
        default=Measure.POLICY, description="The ratio times the advantage, negated."
    )


#: ``OfTexts`` are objectives of pooling models.
OfTexts = LabelWords | Labels
#: ``OfPrompts`` are objectives of models that generate.
OfPrompts = Candidates | Completion
#: ``Measured`` is an objective whose losses a session measures by forwards, on its data.
Measured = OfTexts | OfPrompts | Pairs | Policy
AnyObjective = Measured | Reward | Caller
Objective = Annotated[AnyObjective, Field(discriminator="kind")]


class CreateSession(Strict):
    """A new session."""

    model: Name = Field(description="The model.")
    trainable: Trainable = Field(
        default_factory=lambda: Trainable.model_validate({}), description="The adapter."
    )
    estimator: Estimator = Field(
        default_factory=lambda: EstimatorBody.model_validate({}),
        description="How steps are made.",
    )
    adapter: Name | None = Field(
        None, description="A loaded LoRA of the model that is trained on, instead of a new one."
    )
    objective: Objective = Field(description="What is learnt.")
    data: Data | None = Field(
        None,
        description="Rows, or the id of a file of purpose fine-tune; not of kind caller, and of "
        "kind policy only if not every step brings its own.",
    )
    validation: Data | None = Field(
        None,
        description="Likewise, for sessions with gradients: rows whose loss judges the steps.",
    )
    eval_every: StrictInt | None = Field(
        None,
        ge=1,
        le=MAX_STEPS,
        description="Steps between two evaluations of validation; default: as many as read data "
        "once. The end of a run is evaluated, too.",
    )
    batch_size: StrictInt = Field(16, ge=1, le=65536, description="Examples of a step.")
    batches: BatchOrder = Field(BatchOrder.RANDOM, description="How batches are drawn.")
    mode: Mode = Field(Mode.PAIRED, description="naive computes all copies apart, to compare.")
    max_batch_tokens: StrictInt | None = Field(
        None, ge=1, le=1 << 20, description="Most tokens of a forward; the device's by default."
    )
    seed: StrictInt = Field(
        0, ge=0, lt=2**63, description="Draws batches, directions and random first factors."
    )

    @model_validator(mode="after")
    def _normalises_as_the_preset_says(self) -> Self:
        # A session keeps its objective, so that rows of later requests are read alike.
        if isinstance(self.objective, Candidates) and self.objective.normalize is None:
            self.objective.normalize = self.is_paper
        return self

    @model_validator(mode="after")
    def _makes_no_head_in_vain(self) -> Self:
        if self.makes_head and not isinstance(self.objective, Pairs):
            raise InvalidRequestError(
                f"trainable.head: {NEW_HEAD} is learnt from pairs.", param="trainable.head"
            )
        return self

    @property
    def is_paper(self) -> bool:
        """True if the steps are those of MeZO's paper."""
        return isinstance(self.estimator, EstimatorBody) and self.estimator.preset == "paper"

    @property
    def takes_gradients(self) -> bool:
        """True if steps are made from gradients."""
        return isinstance(self.estimator, GradientBody)

    @property
    def makes_head(self) -> bool:
        """True if a new head is trained."""
        return self.trainable.head == NEW_HEAD


class MakeSteps(Strict):
    """Steps to make now."""

    steps: StrictInt = Field(1, ge=1, le=10_000, description="How many.")
    batch: list[AnyRow] | None = Field(
        None, min_length=1, max_length=65536, description="Rows in place of the session's data."
    )
    seed: StrictInt | None = Field(
        None, ge=0, lt=2**64, description="Draws the directions of a single step."
    )
    epsilon: Finite | None = Field(
        None, gt=0, description="Size of the perturbation; the session's by default."
    )
    learning_rate: Finite | None = Field(
        None,
        ge=0,
        description="In place of the session's; weight decay of MeZO still goes by the session's.",
    )
    return_losses: StrictBool = Field(
        False, description="Return the loss of each example at each perturbed copy."
    )

    @model_validator(mode="after")
    def _has_own_seeds(self) -> Self:
        if self.seed is not None and self.steps > 1:
            raise InvalidRequestError("seed is that of a single step.", param="seed")
        return self


class Tell(Strict):
    """The losses that were asked for."""

    losses: Annotated[
        Annotated[dict[str, Loss], Tag("<object>")] | Annotated[list[Loss], Tag("<list>")],
        Discriminator(container_of),
    ] = Field(description="By the names of the adapters, or in their order.")


class TrainStep(MakeSteps):
    """Steps of a session that the body names."""

    session_id: Name = Field(description="The session.")


class RunSteps(Strict):
    """Steps to make in the background."""

    steps: StrictInt = Field(ge=1, le=MAX_STEPS, description="How many.")


class Evaluate(Strict):
    """Rows whose labels are predicted."""

    data: Data = Field(description="Rows, or the id of a file of purpose fine-tune.")


class Publish(Strict):
    """An adapter to be served."""

    name: Name = Field(description="The name that requests use as their model.")
    version: Name | None = Field(None, description="Label of its answers.")
    expected_version: Name | None = Field(
        None, description="The version to replace; 412 if another is loaded."
    )
    step: StrictInt | None = Field(
        None, ge=0, description="As it was after so many steps; as it is by default."
    )
