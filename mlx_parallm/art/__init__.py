"""A backend of ART (Agent Reinforcement Trainer, openpipe-art) that uses this server."""

from __future__ import annotations

from mlx_parallm.art.backend import MLXParallmBackend, Trainer, TrainJob
from mlx_parallm.art.config import DeviceConfig, ServerConfig, WeightSync
from mlx_parallm.art.server import (
    BackendError,
    CheckpointError,
    ServerStartError,
    UnservedStepError,
)

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
