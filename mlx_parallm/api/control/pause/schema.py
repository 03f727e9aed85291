"""Bodies and answers of the routes that pause the engine and empty its caches."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, StrictBool

from mlx_parallm.api.http.forms import OpenForm


class StatusAnswer(BaseModel):
    """The server's state after an operation, in vLLM's form."""

    status: str = Field(description="The server's state now.")


class PausedAnswer(StatusAnswer):
    """Generation is paused."""

    num_requests: int = Field(description="Requests that were kept, or that were aborted.")


class IsPaused(BaseModel):
    """True if generation is paused."""

    is_paused: bool = Field(description="True until generation is resumed.")


class ResetRequest(OpenForm):
    """SkyRL's body of ``/reset_prefix_cache``; vLLM has the same in the query."""

    reset_running_requests: StrictBool = Field(
        False, description="Recompute running requests, too."
    )


class ResetAnswer(BaseModel):
    """The cache is empty."""

    success: bool = Field(default=True, description="Always true.")


class PauseGeneration(OpenForm):
    """SGLang's body of ``/pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="End running requests, recompute them afterwards, or continue them.",
    )


class MessageAnswer(BaseModel):
    """SGLang's answer."""

    success: bool = Field(default=True, description="Always true; errors have another status.")
    message: str = Field(description="What was done.")
    status: str = Field(default="ok", description="Always ok.")


class PausedGeneration(MessageAnswer):
    """SGLang's answer to a pause."""

    num_paused_requests: int = Field(description="Requests that were kept, or that were aborted.")
