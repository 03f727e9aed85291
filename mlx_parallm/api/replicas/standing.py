"""The place of this server in its fleet, for ``/ready``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request

from mlx_parallm.types.errors import NotReadyError

if TYPE_CHECKING:
    from mlx_parallm.replicas.service import Replicas


def check_standing(request: Request) -> None:
    """Raise NotReadyError if this server is not like the rest of its fleet, or is drained."""
    replicas: Replicas | None = request.app.state.replicas
    why = None if replicas is None else replicas.fleet.why_not_ready
    if why is not None:
        raise NotReadyError(why)
