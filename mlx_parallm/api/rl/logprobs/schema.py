"""The body of ``POST /v1/rl/logprobs``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import INT64, Ids, NullIsAbsent

MAX_ITEMS = 65_536


class ScoredItem(BaseModel):
    """A completion to be scored after a prompt."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: Ids = Field(min_length=1, description="What comes before it.")
    completion_token_ids: Ids = Field(min_length=1, description="What is scored.")


class LogprobsRequest(NullIsAbsent):
    """Completions to be scored, each token given all before it."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    items: list[ScoredItem] = Field(
        min_length=1, max_length=MAX_ITEMS, description="Prompts and completions, as token ids."
    )
    model: StrictStr | None = Field(
        None, description="A served model or adapter; default: the first model."
    )
    adapter: StrictStr | None = Field(
        None, description="An adapter, of the model if that is given."
    )
    top_logprobs: StrictInt = Field(0, ge=0, description="Likeliest tokens at each place.")
    entropy: StrictBool = Field(False, description="Of the model at each place.")
    priority: StrictInt = Field(0, ge=-INT64, lt=INT64, description="Lower runs first.")
    cache_salt: StrictStr | None = Field(
        None, max_length=1024, description="Share cached prefixes only with the same salt."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="The answer's id; must be unique."
    )
