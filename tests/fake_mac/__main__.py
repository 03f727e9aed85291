"""Run a command of ``mlx_parallm`` as if on a Mac: ``python -m tests.fake_mac serve …``.

Options of the Mac come before the command, such as ``--memory-gb 8 --rejects attend``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from mlx_parallm.cli.main import main as run
from tests.fake_mac.engine import become


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_mac", description=__doc__)
    parser.add_argument("--memory-gb", type=int, default=16)
    parser.add_argument("--held-gb", type=float, default=4.0)
    parser.add_argument("--rejects", help="kernels that do not compile: a pattern, '' for all")
    parser.add_argument("--wrong", help="kernels that return zeros: a pattern, '' for all")
    parser.add_argument("--broken-by", help="while this file exists, all launches fail")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    become(json.dumps(options))
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
