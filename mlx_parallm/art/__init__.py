"""A backend of ART (Agent Reinforcement Trainer, openpipe-art) that uses this server."""

from __future__ import annotations

from mlx_parallm.art.backend import MLXParallmBackend
from mlx_parallm.art.config import DeviceConfig, ServerConfig, WeightSync
from mlx_parallm.art.server import (
    BackendError,
    CheckpointError,
    ServerStartError,
    UnservedStepError,
)
from mlx_parallm.art.training import ServerAddress, ServerTrainer, Trainer, TrainJob

__all__ = [
    "BackendError",
    "CheckpointError",
    "DeviceConfig",
    "MLXParallmBackend",
    "ServerAddress",
    "ServerConfig",
    "ServerStartError",
    "ServerTrainer",
    "TrainJob",
    "Trainer",
    "UnservedStepError",
    "WeightSync",
]
