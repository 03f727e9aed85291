"""Errors between ART and its server."""

from __future__ import annotations

from mlx_parallm.client import ClientError


class BackendError(ClientError):
    """Base of the backend's errors."""


class ServerStartError(BackendError):
    """The server ended, or did not answer in time, while it started."""


class CheckpointError(BackendError):
    """A checkpoint is missing, or is not of the kind that ``weight_sync_method`` needs."""


class UnservedStepError(BackendError):
    """The weights of the requested step are not served."""
