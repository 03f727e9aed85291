"""The process of ``mlx_parallm models convert`` for a GGUF file, which imports NumPy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.cli.models.subcommands import table
from mlx_parallm.models.gguf.convert import Loss, convert
from mlx_parallm.types.errors import ParallmError


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert a file and print what its tensors lost; return the exit status."""
    parser = argparse.ArgumentParser(description="A part of models convert; not run by hand.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--mlx-path", type=Path, required=True)
    parser.add_argument("--q-bits", type=int)
    args = parser.parse_args(arguments)
    try:
        losses = convert(args.file, args.mlx_path, args.q_bits, lambda share: None)
    except (ParallmError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(report(losses))
    print(f"{args.file} is written to {args.mlx_path}")
    return 0


def report(losses: Sequence[Loss]) -> str:
    """Return a table of what tensors lost, with the mean and the worst."""
    if not losses:
        return "All tensors are kept as they are: serve the file itself."
    rows = [("TENSOR", "TYPE", "BITS", "RELATIVE RMS ERROR")]
    rows += [
        (loss.tensor.name, loss.tensor.type.name, str(loss.bits), f"{loss.relative:.5f}")
        for loss in losses
    ]
    worst = max(losses, key=lambda loss: loss.relative)
    mean = sum(loss.relative for loss in losses) / len(losses)
    last = f"mean {mean:.5f}, worst {worst.relative:.5f} ({worst.tensor.name})"
    return f"{table(rows)}\n{last}"


if __name__ == "__main__":
    sys.exit(main())
