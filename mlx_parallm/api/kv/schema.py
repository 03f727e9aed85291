"""Bodies of the routes that give other servers KV."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

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
