"""The bodies of fine-tuning jobs.

Source: https://platform.openai.com/docs/api-reference/fine-tuning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    StrictStr,
    StringConstraints,
    Tag,
)

from mlx_parallm.api.http.forms import Metadata, NullIsAbsent
from mlx_parallm.api.mezo.schema import MAX_STEPS, Finite, Layers, Name

AUTO = "auto"
Auto = Literal["auto"]
N = TypeVar("N")


def _auto_or_number(value: Any) -> str:
    """Return which of "auto" and a number a value is to be, so that problems are those of one."""
    return "<auto>" if isinstance(value, str) else "<number>"


#: ``OrAuto`` is "auto" or a number.
OrAuto = Annotated[
    Annotated[Auto, Tag("<auto>")] | Annotated[N, Tag("<number>")], Discriminator(_auto_or_number)
]
#: ``Suffix``: part of a model's name, which colons separate.
Suffix = Annotated[StrictStr, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class Closed(NullIsAbsent):
    """A body of which every field must be known: a typing error must not train something else."""

    model_config = ConfigDict(extra="forbid")


class Hyperparameters(Closed):
    """Settings of a job."""

    n_epochs: OrAuto[Annotated[StrictInt, Field(ge=1, le=1000)]] = Field(
        AUTO, description="How often the data is read; auto: 3."
    )
    batch_size: OrAuto[Annotated[StrictInt, Field(ge=1, le=65536)]] = Field(
        AUTO, description="Examples of a step; auto: a tenth of the data, 1 to 16."
    )
    learning_rate_multiplier: OrAuto[Annotated[Finite, Field(gt=0)]] = Field(
        AUTO, description="Times Adam's rate for the method: 2e-4, dpo 5e-6, reward 1e-4; auto: 1."
    )
    rank: StrictInt = Field(8, ge=1, le=1024, description="Rank of the LoRA.")
    alpha: Finite = Field(16.0, gt=0, description="The change is scaled by alpha / rank.")
    targets: list[Name] = Field(
        default_factory=list[str], max_length=64, description="Ends of linear layers; all if none."
    )
    layers: Layers = Field("all", description="all, top:N for the last N, or indices from 0.")
    max_tokens: StrictInt | None = Field(
        None, ge=2, description="Longest example in tokens; the model's own by default."
    )
    eval_every: StrictInt | None = Field(
        None,
        ge=1,
        le=MAX_STEPS,
        description="Steps between validations and checkpoints; an epoch by default.",
    )


class PreferenceHyperparameters(Hyperparameters):
    """Settings of a job that learns from preferences."""

    beta: OrAuto[Annotated[Finite, Field(gt=0)]] = Field(
        AUTO, description="Scale of how far log-probabilities moved from the reference; auto: 0.1."
    )


class SupervisedMethod(Closed):
    """Learn the assistant's messages of conversations."""

    hyperparameters: Hyperparameters = Field(
        default_factory=lambda: Hyperparameters.model_validate({}), description="How it trains."
    )


class PreferenceMethod(Closed):
    """Learn which of two answers is preferred."""

    hyperparameters: PreferenceHyperparameters = Field(
        default_factory=lambda: PreferenceHyperparameters.model_validate({}),
        description="How it trains.",
    )


class MethodBody(Closed):
    """Method of a job."""

    type: Literal["supervised", "dpo", "reward", "reinforcement"] = Field(
        "supervised",
        description="supervised: conversations; dpo: pairs of answers; reward: pairs, for a model "
        "that scores; reinforcement is not served.",
    )
    supervised: SupervisedMethod | None = Field(None, description="Settings of supervised.")
    dpo: PreferenceMethod | None = Field(None, description="Settings of dpo.")
    reward: SupervisedMethod | None = Field(None, description="Settings of reward.")
    reinforcement: dict[str, Any] | None = Field(None, description="Not served.")


class CreateJob(Closed):
    """A new fine-tuning job."""

    model: Name = Field(description="The model that is trained.")
    training_file: Name = Field(description="A file of the purpose fine-tune.")
    validation_file: Name | None = Field(
        None, description="Likewise; the checkpoint with the least loss on it is the result."
    )
    method: MethodBody | None = Field(None, description="Default: supervised.")
    hyperparameters: Hyperparameters | None = Field(
        None, description="Of supervised jobs, in place of method.supervised (deprecated)."
    )
    suffix: Suffix | None = Field(None, description="Part of the result's name.")
    seed: StrictInt = Field(0, ge=0, lt=2**63, description="Draws batches and first factors.")
    metadata: Metadata | None = Field(None, description="Kept with the job.")
    integrations: list[dict[str, Any]] | None = Field(None, description="Not served.")
