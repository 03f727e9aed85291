"""The process ``python -m mlx_parallm.cli.engine_process``, started by ``--engine-process``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mlx_parallm.cli.child_modules import begin
from mlx_parallm.cli.logs import take_over_handlers
from mlx_parallm.peers.channel import Channel
from mlx_parallm.process_setup.device_process import prepare_device_process


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve over inherited sockets until the server sends stop, or is gone."""
    end, files = begin(arguments)
    prepare_device_process()
    # These bring MLX.
    from mlx_parallm.peers.engines import serve_engines  # noqa: PLC0415
    from mlx_parallm.serving.build import (  # noqa: PLC0415
        build_engines,
        training_beside,
        worker_for,
    )

    take_over_handlers()
    return serve_engines(Channel(end, files), build_engines, training_beside, worker_for)


if __name__ == "__main__":
    sys.exit(main())
