"""The fields of uploads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, StrictInt

DAY_S = 24 * 3600
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 30 * DAY_S

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]


class ExpiresAfter(BaseModel):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: StrictInt = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class UploadFields(BaseModel):
    """The fields of an upload besides its file."""

    purpose: Purpose = Field(description="What the file is for.")
    expires_after_anchor: Literal["created_at"] | None = Field(
        None, alias="expires_after[anchor]", description="The moment from which the time counts."
    )
    expires_after_seconds: int | None = Field(
        None,
        alias="expires_after[seconds]",
        ge=MIN_EXPIRY_S,
        le=MAX_EXPIRY_S,
        description="When the file expires; by default, a file for a batch expires after 30 days.",
    )
