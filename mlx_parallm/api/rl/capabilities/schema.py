"""The answer of ``GET /v1/rl/capabilities``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Tolerance(BaseModel):
    """How far log-probabilities told while sampling are from scores of the same tokens.

    Absolute differences; the quantiles are of what was measured with the embedded model.
    """

    bound: float | None = Field(description="Tested: never more. Null: no bound is promised.")
    median: float = Field(description="Half of the tokens differ less.")
    p99: float = Field(description="99 of 100 tokens differ less.")
    most: float = Field(description="The largest difference that was seen.")
    device: str = Field(description="Where the quantiles were measured; elsewhere they are others.")


class RLModel(BaseModel):
    """A served model or adapter as a trainer sees it."""

    model_config = ConfigDict(protected_namespaces=())

    model: str = Field(description="The name that requests use.")
    parent: str | None = Field(description="The model that an adapter belongs to.")
    weight_version: str = Field(description="Label of its weights now.")
    dtype: str = Field(description="The dtype it computes in.")
    max_model_len: int = Field(description="Tokens of prompt and output together, at most.")
    vocab_size: int = Field(description="Token ids are below this.")
    tolerance: Tolerance | None = Field(description="For its dtype; null where none was measured.")


class RLCapabilities(BaseModel):
    """The features of the routes for trainers on this server."""

    object: str = Field("rl.capabilities", description="Always rl.capabilities.")
    models: list[RLModel] = Field(description="Models and adapters.")
    logprobs_modes: list[str] = Field(description="Values of logprobs_mode.")
    default_logprobs_mode: str = Field(description="Of requests that name none.")
    max_logprobs: int = Field(description="Most alternatives per token; -1 is no limit.")
    max_samples: int | None = Field(description="Prompts times n of a request; null: no limit.")
    pause_modes: list[str] = Field(description="Values of mode of /pause.")
    is_paused: bool = Field(description="Whether nothing is generated now.")
    has_verifier_urls: bool = Field(description="Whether rollouts may have a verifier.")
    reward_models: list[str] = Field(description="Values of model of a rollout's reward_model.")
