"""A client for reinforcement learning and training sessions; it needs no MLX."""

from __future__ import annotations

from mlx_parallm.client.errors import (
    ClientError,
    RequestFailedError,
    ServerUnreachableError,
    UnexpectedAnswerError,
)
from mlx_parallm.client.mezo import MezoClient, SessionsClient, TrainingClient
from mlx_parallm.client.nets import Actions, NetsClient, Prediction
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
from mlx_parallm.client.speech import SpeechClient, SpokenSegment, Transcript
from mlx_parallm.client.sync import (
    SyncMezoClient,
    SyncNetsClient,
    SyncRLClient,
    SyncSpeechClient,
    SyncTrainingClient,
)
from mlx_parallm.client.tensors import encode_safetensors
from mlx_parallm.client.training import (
    Checkpoint,
    Evaluation,
    GradientStep,
    PerturbedAdapter,
    TrainingSession,
    TrainingStep,
    TrainingTotals,
)

__all__ = [
    "Actions",
    "AdapterInfo",
    "Checkpoint",
    "ClientError",
    "Evaluation",
    "GradientStep",
    "Group",
    "MezoClient",
    "NetsClient",
    "PerturbedAdapter",
    "Prediction",
    "Prompt",
    "RLClient",
    "RequestFailedError",
    "Rollout",
    "Sample",
    "Score",
    "ServerUnreachableError",
    "SessionsClient",
    "SpeechClient",
    "SpokenSegment",
    "SyncMezoClient",
    "SyncNetsClient",
    "SyncRLClient",
    "SyncSpeechClient",
    "SyncTrainingClient",
    "TrainingClient",
    "TrainingSession",
    "TrainingStep",
    "TrainingTotals",
    "Transcript",
    "UnexpectedAnswerError",
    "VersionSpan",
    "encode_safetensors",
]
