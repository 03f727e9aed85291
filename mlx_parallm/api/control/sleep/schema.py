"""Bodies and answers of the routes that release memory and allocate it again."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from mlx_parallm.api.http.forms import OpenForm


class SleepAnswer(BaseModel):
    """The server sleeps."""

    status: str = Field(default="sleeping", description="Always sleeping.")
    level: int = Field(description="0: nothing is released; 1: KV; 2: KV and weights.")
    mode: str = Field(description="The mode of the pause.")


class WakeAnswer(BaseModel):
    """The memory that is allocated again."""

    status: str = Field(description="awake, or sleeping while some memory is released.")
    tags: list[str] = Field(description="The memory that is still released.")


class IsSleeping(BaseModel):
    """True if memory is released."""

    is_sleeping: bool = Field(description="True until memory is allocated again.")


class MemoryTags(OpenForm):
    """SGLang's body for releasing and resuming memory."""

    without_effect = frozenset({"rid"})

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = Field(
        None, description="The memory to release or to allocate; all by default."
    )
