"""The body of ``POST /v1/rl/logprobs``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from mlx_parallm.api.http.forms import Ids
from mlx_parallm.api.rl.fields import TrainerFields
from mlx_parallm.api.turns.fields import ProcessorKwargs
from mlx_parallm.api.turns.pictures import PictureUrls

MAX_ITEMS = 65_536


class ScoredItem(BaseModel):
    """A completion to be scored after a prompt."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: Ids = Field(min_length=1, description="What comes before it.")
    completion_token_ids: Ids = Field(min_length=1, description="What is scored.")
    images: PictureUrls | None = Field(
        None,
        description="Pictures of the prompt, in order: URLs or base64. The prompt has one "
        "placeholder, or all tokens, of each.",
    )


class LogprobsRequest(TrainerFields):
    """Completions to be scored, each token given all before it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    items: list[ScoredItem] = Field(
        min_length=1, max_length=MAX_ITEMS, description="Prompts and completions, as token ids."
    )
    top_logprobs: StrictInt = Field(0, ge=0, description="Likeliest tokens at each place.")
    entropy: StrictBool = Field(False, description="Of the model at each place.")
    mm_processor_kwargs: ProcessorKwargs = None
