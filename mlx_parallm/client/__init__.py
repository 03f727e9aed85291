"""A client that runs reinforcement-learning loops against a server; it needs no MLX."""

from __future__ import annotations

from mlx_parallm.client.errors import (
    ClientError,
    RequestFailedError,
    ServerUnreachableError,
    UnexpectedAnswerError,
)
from mlx_parallm.client.results import (
    AdapterInfo,
    Group,
    Prompt,
    Rollout,
    Sample,
    Score,
    VersionSpan,
)
from mlx_parallm.client.rl import RLClient
from mlx_parallm.client.tensors import encode_safetensors

__all__ = [
    "AdapterInfo",
    "ClientError",
    "Group",
    "Prompt",
    "RLClient",
    "RequestFailedError",
    "Rollout",
    "Sample",
    "Score",
    "ServerUnreachableError",
    "UnexpectedAnswerError",
    "VersionSpan",
    "encode_safetensors",
]
