"""Bodies of the routes that give other servers KV."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from mlx_parallm.generation.kv_cache.peer.exports import MAX_BLOCKS

OWNER = r"^[0-9a-f]{64}$"
CONTENT = r"^[0-9a-f]{64}$"


class BlocksRequest(BaseModel):
    """Blocks of a chain, in order."""

    model_config = ConfigDict(extra="forbid")

    owner: str = Field(
        pattern=OWNER, description="Digest of all that decides the bytes of KV beside weights."
    )
    contents: list[str] = Field(
        min_length=1,
        max_length=MAX_BLOCKS,
        description="Contents of consecutive blocks, in hexadecimal digits.",
    )
    waits: StrictBool = Field(False, description="Wait for the first one, which is being computed.")


class PrefillRequest(BaseModel):
    """A prompt whose KV is to be computed for another server."""

    model_config = ConfigDict(extra="forbid")

    owner: str = Field(pattern=OWNER, description="See the blocks.")
    weights: str = Field(pattern=OWNER, description="Content of the weights and the adapter.")
    token_ids: list[StrictInt] = Field(min_length=1, description="The prompt.")
    scope: str | None = Field(None, description="The client that the KV is for.")
    cache_salt: str | None = Field(None, description="Of the request.")
    extra_key: str | None = Field(None, description="Of the request.")
