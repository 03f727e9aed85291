"""Answers of training sessions."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class AnyStepAnswer(BaseModel):
    """A step that was made."""

    step: int = Field(description="Its number, from 1.")
    lookups: int = Field(description="Texts looked up in the prefix cache.")
    hits: int = Field(description="Those that it had.")
    layer_tokens: int = Field(description="Tokens computed, times their layers.")
    naive_layer_tokens: int = Field(description="The same of the mode naive.")
    forward_time: float = Field(description="Seconds that the forwards took, gradients included.")


class GradientStepAnswer(AnyStepAnswer):
    """A step that was made from a gradient."""

    loss: float = Field(description="Mean loss of the batch.")
    norm: float = Field(description="Norm of the gradient, before it was clipped.")
    learning_rate: float = Field(description="Of the step.")
    tokens: int = Field(description="Tokens of the batch, without padding.")
    facts: dict[str, float] = Field(
        description="Means over the batch of what else the loss reports, such as margins."
    )
    validation_loss: float | None = Field(
        description="Mean loss of the validation data; null: not evaluated."
    )
    validation_accuracy: float | None = Field(
        description="Share of the validation data that is right, if anything is right or wrong."
    )
    losses: list[list[float]] | None = Field(
        None, description="If asked for: one list, of the loss of each example of the batch."
    )


class StepAnswer(AnyStepAnswer):
    """A step that was made from losses at perturbed parameters."""

    seed: int = Field(description="Draws its directions.")
    loss_plus: float = Field(description="Mean loss with sign 1.")
    loss_minus: float = Field(description="Mean loss with sign -1, or without a perturbation.")
    gradients: list[float] = Field(description="Projected gradient along each direction.")
    losses: list[list[float]] | None = Field(
        None,
        description="If asked for: for each copy, those of direction 0 first and sign 1 before -1, "
        "the loss of each example of the batch.",
    )


class Steps(BaseModel):
    """Steps that were made."""

    object: str = Field(default="mezo.steps", description="What this is.")
    session_id: str = Field(description="The session.")
    data: list[StepAnswer | GradientStepAnswer] = Field(description="The steps, in their order.")


class Totals(BaseModel):
    """The costs of all steps of a session."""

    lookups: int = Field(description="Texts looked up in the prefix cache.")
    hits: int = Field(description="Those that it had.")
    layer_tokens: int = Field(description="Tokens computed, times their layers.")
    naive_layer_tokens: int = Field(description="The same of the mode naive.")
    forward_time: float = Field(description="Seconds that the forwards took.")
    zero_gradient_steps: int = Field(description="Steps of which all losses were equal.")


class SessionAnswer(BaseModel):
    """A session."""

    id: str = Field(description="The session's id.")
    object: str = Field(default="mezo.session", description="What this is.")
    model: str = Field(description="The model.")
    status: str = Field(description="ready, running or paused.")
    reason: str | None = Field(description="Why the server paused it; null if a request did.")
    created_at: int = Field(description="Unix seconds.")
    step: int = Field(description="Steps that were made.")
    until: int = Field(description="Steps after which the run in the background ends.")
    num_examples: int = Field(description="Examples of its data.")
    num_parameters: int | None = Field(description="Numbers that are trained.")
    trained_layers: list[str] | None = Field(description="Paths of the linear layers.")
    first_layer: int | None = Field(description="The lowest trained layer.")
    prefix_cache: str | None = Field(description="available or unavailable.")
    base: str | None = Field(description="SHA-256 of the weights that it trains on.")
    published: list[str] = Field(description="Adapters that it has published.")
    pending: list[str] = Field(description="Adapters whose losses the session waits for.")
    gradient_form: str | None = Field(
        description="staged: a layer at a time beside streams; whole; null: none are taken."
    )
    checkpoints: list[int] | None = Field(
        description="Steps that can be returned to; null: all of them, by the log."
    )
    best: int | None = Field(description="The step of the least validation loss, if evaluated.")
    warning: str | None = Field(
        description="Why it hardly learns, or has other bits; null: nothing is known."
    )
    totals: Totals = Field(description="The costs of all steps.")
    last: StepAnswer | GradientStepAnswer | None = Field(description="The last step.")
    config: dict[str, Any] = Field(description="The settings.")


class PerturbedCopy(BaseModel):
    """An adapter whose loss is asked for."""

    name: str = Field(description="Adapter name to request until its loss is reported.")
    direction: int | None = Field(description="Which direction; null: it is not perturbed.")
    sign: int = Field(description="Of the perturbation, 1 or -1.")


class Asked(BaseModel):
    """The perturbed adapters of the next step."""

    object: str = Field(default="mezo.ask", description="What this is.")
    session_id: str = Field(description="The session.")
    step: int = Field(description="The number of the step that the losses will make.")
    data: list[PerturbedCopy] = Field(description="The adapters, in the order of their losses.")


class SessionList(BaseModel):
    """All sessions."""

    object: str = Field(default="list", description="What this is.")
    data: list[SessionAnswer] = Field(description="The sessions, oldest first.")


class EvaluationAnswer(BaseModel):
    """Quality of predicted labels."""

    object: str = Field(default="mezo.evaluation", description="What this is.")
    session_id: str = Field(description="The session.")
    step: int = Field(description="Steps that it had made.")
    num_examples: int = Field(description="Rows that were read.")
    loss: float = Field(description="Mean cross entropy.")
    accuracy: float | None = Field(description="Share of right labels, if there are labels.")
    f1: float | None = Field(description="Mean F1 of the labels.")


class CheckpointAnswer(BaseModel):
    """A step of a session that can be returned to."""

    object: str = Field(default="mezo.checkpoint", description="What this is.")
    session_id: str = Field(description="The session.")
    step: int = Field(description="Steps that it had made.")
    adapter_sha256: str = Field(description="Of what the adapter computes.")


class DeletedSession(BaseModel):
    """A session that was deleted."""

    id: str = Field(description="The session's id.")
    object: str = Field(default="mezo.session.deleted", description="What this is.")
    deleted: bool = Field(default=True, description="Always true.")
