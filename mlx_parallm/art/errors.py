"""What can go wrong between ART and the server it uses."""

from __future__ import annotations

from mlx_parallm.client import ClientError


class BackendError(ClientError):
    """Base of the backend's errors."""


class ServerStartError(BackendError):
    """The server ended, or did not answer in time, while it started."""


class CheckpointError(BackendError):
    """A checkpoint is missing, or is not what the way of syncing needs."""


class UnservedStepError(BackendError):
    """Weights of another step than the one that is served were asked for."""
