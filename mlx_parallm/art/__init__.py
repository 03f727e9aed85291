"""A backend of ART (Agent Reinforcement Trainer, openpipe-art) that uses this server."""

from __future__ import annotations

from mlx_parallm.art.backend import MLXParallmBackend
from mlx_parallm.art.config import DeviceConfig, ServerConfig, WeightSync
from mlx_parallm.art.errors import (
    BackendError,
    CheckpointError,
    ServerStartError,
    UnservedStepError,
)
from mlx_parallm.art.training import Trainer, TrainJob

__all__ = [
    "BackendError",
    "CheckpointError",
    "DeviceConfig",
    "MLXParallmBackend",
    "ServerConfig",
    "ServerStartError",
    "TrainJob",
    "Trainer",
    "UnservedStepError",
    "WeightSync",
]
