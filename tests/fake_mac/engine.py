"""A process that is a fake Mac until it ends; as a program, an engine process of such a one."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from pathlib import Path

import pytest

from mlx_parallm.process_setup.device_process import prepare_device_process

#: ``VARIABLE``: its value describes the Mac that child processes are.
VARIABLE = "FAKE_MAC"
ROOT = Path(__file__).resolve().parents[2]


def become(description: str) -> None:
    """Let this process and the engine processes that it starts see a Mac.

    Call it before ``mlx_parallm.peers.launch`` is imported; ``description`` is JSON of a
    ``FakeMac``.
    """
    prepare_device_process()
    # These import MLX.
    from mlx_parallm.peers import launch  # noqa: PLC0415
    from tests.fake_mac.mac import FakeMac, pretend  # noqa: PLC0415

    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    pretend(FakeMac.from_json(description), pytest.MonkeyPatch(), Path(folder.name))
    launch.ENGINE = "tests.fake_mac.engine"
    os.environ[VARIABLE] = description
    # Engine processes look for modules in no folder of their own accord.
    os.environ["PYTHONPATH"] = str(ROOT)


def main() -> int:
    """Be an engine process of the Mac that ``VARIABLE`` describes."""
    become(os.environ[VARIABLE])
    from mlx_parallm.cli import engine_process  # noqa: PLC0415

    return engine_process.main()


if __name__ == "__main__":
    sys.exit(main())
