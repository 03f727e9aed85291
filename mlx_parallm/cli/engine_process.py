"""The process ``python -m mlx_parallm.cli.engine_process``, of a server or of ``engine``.

It gets two sockets of a server on this machine, or a connection to one on another.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from mlx_parallm.cli.child_modules import begin
from mlx_parallm.cli.logs import take_over_handlers
from mlx_parallm.peers.channel import Channel
from mlx_parallm.peers.messages import Starting
from mlx_parallm.peers.network import tcp_channel
from mlx_parallm.peers.silence import SILENCE_TIMEOUT_S, beat
from mlx_parallm.process_setup.device_process import prepare_device_process


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve over inherited sockets until the server sends stop, or is gone."""
    ends = begin(arguments)
    is_elsewhere = len(ends) == 1
    channel = channel_over(ends)
    # A cable that is cut meanwhile is found out as early as later.
    stop_beats = beat(SILENCE_TIMEOUT_S, lambda: channel.send(Starting())) if is_elsewhere else None
    prepare_device_process()
    # These bring MLX.
    from mlx_parallm.peers.engines import serve_engines  # noqa: PLC0415
    from mlx_parallm.serving.build import (  # noqa: PLC0415
        build_engines,
        training_beside,
        worker_for,
    )

    take_over_handlers()
    return serve_engines(
        channel,
        build_engines,
        training_beside,
        worker_for,
        is_elsewhere=is_elsewhere,
        on_start=stop_beats or (lambda: None),
    )


def channel_over(ends: Sequence[socket.socket]) -> Channel:
    """Return the channel to the server: by two sockets of this machine, or a connection."""
    if len(ends) > 1:
        return Channel(*ends)
    channel = tcp_channel(ends[0])
    channel.limit_silence(SILENCE_TIMEOUT_S)
    return channel


if __name__ == "__main__":
    sys.exit(main())
