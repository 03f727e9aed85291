"""Bodies and answers of the routes that pause the engine and empty its caches."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, StrictBool

from mlx_parallm.api.http.forms import OpenForm


class StatusAnswer(BaseModel):
    """What an operation left, in vLLM's words."""

    status: str = Field(description="What the server does now.")


class PausedAnswer(StatusAnswer):
    """The server generates nothing."""

    num_requests: int = Field(description="Requests that were kept, or that were aborted.")


class IsPaused(BaseModel):
    """Whether the server generates nothing."""

    is_paused: bool = Field(description="Until it is resumed.")


class ResetRequest(OpenForm):
    """SkyRL's body of ``/reset_prefix_cache``; vLLM has the same in the query."""

    reset_running_requests: StrictBool = Field(
        False, description="Compute anew what running requests have, too."
    )


class ResetAnswer(BaseModel):
    """The cache is empty."""

    success: bool = Field(True, description="Always true.")


class PauseGeneration(OpenForm):
    """SGLang's body of ``/pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="End running requests, compute them anew afterwards, or go on with them.",
    )


class MessageAnswer(BaseModel):
    """SGLang's answer."""

    success: bool = Field(True, description="Always true; errors have another status.")
    message: str = Field(description="What was done.")
    status: str = Field("ok", description="Always ok.")


class PausedGeneration(MessageAnswer):
    """SGLang's answer of a pause."""

    num_paused_requests: int = Field(description="Requests that were kept, or that were aborted.")
