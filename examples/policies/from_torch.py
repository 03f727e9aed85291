"""Write a torch module as a folder that the server loads.

Run it where the module's code is, since it needs torch and that code:

    python -m examples.policies.from_torch my_nets:make_critic folder --input obs=4 --output value

The object that is named is a module, a sequence of modules, or a function that returns either:
``nn.Sequential`` (nested ones too), ``nn.LSTM`` and ``nn.GRU``, which may stand among the modules
of a sequence. Weights keep torch's names and dtypes. For an embedding the input has whole numbers:
``--input tokens=``, or ``--input tokens=3`` for three a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from examples.policies.net_writer import NetWriter, UnknownPartError

RECURRENT = (nn.LSTM, nn.GRU)


def main() -> None:
    """Convert the module that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("module", help="a Python module and an object in it: MODULE:NAME")
    parser.add_argument("folder", type=Path, help="where to write the net")
    parser.add_argument(
        "--input", default="x=", help="name and sizes of a row: obs=4, image=4,84,84"
    )
    parser.add_argument("--dtype", help="of the input: uint8, bfloat16 (default: float32 or int64)")
    parser.add_argument("--output", default="y", help="the output's name")
    options = parser.parse_args()
    name, _, sizes = options.input.partition("=")
    convert(
        _found(options.module),
        tuple(int(size) for size in sizes.split(",") if size),
        input_name=name,
        dtype=options.dtype,
        output_name=options.output,
    ).save(options.folder)


def convert(
    module: nn.Module | Sequence[nn.Module],
    sizes: Sequence[int],
    *,
    input_name: str = "x",
    dtype: str | None = None,
    output_name: str = "y",
) -> NetWriter:
    """Return the net of a module, or of modules one after another.

    Args:
        module: what to convert; it is put in evaluation mode.
        sizes: the input's, without rows and time.
        input_name: the input's name.
        dtype: the input's; None for "int64" before an embedding, and else "float32".
        output_name: the output's name.

    Raises:
        UnknownPartError: it has a part that no layer of a net computes.
    """
    chain: Any = module if isinstance(module, nn.Module) else nn.Sequential(*module)
    parts = [part for part in chain.eval().modules() if not isinstance(part, nn.Sequential)]
    if not parts:
        raise UnknownPartError("there is no module")
    writer = NetWriter(has_time=any(isinstance(part, RECURRENT) for part in parts))
    reads_choices = isinstance(parts[0], nn.Embedding)
    source = writer.add_input(
        input_name, dtype or ("int64" if reads_choices else "float32"), *sizes
    )
    if dtype and not reads_choices and not dtype.startswith(("float", "bfloat")):
        source = writer.add(f"{input_name}.as_floats", "scale", source, factor=1.0)
    name = "" if isinstance(chain, nn.Sequential) else type(chain).__name__.lower()
    last = writer.add_module(name, chain, source)
    writer.add_output(output_name, last, *_sizes_after(parts, sizes))
    return writer


def _found(path: str) -> Any:
    """Return the module that ``MODULE:NAME`` names, made if it is a function."""
    module, _, name = path.partition(":")
    target = getattr(import_module(module), name)
    is_ready = isinstance(target, nn.Module) or not callable(target)
    return target if is_ready else target()


def _sizes_after(parts: Sequence[nn.Module], sizes: Sequence[int]) -> Sequence[int]:
    """Return the sizes of a row after all modules."""
    dtype = torch.int64 if isinstance(parts[0], nn.Embedding) else torch.float32
    x = torch.zeros(1, *sizes, dtype=dtype)
    with torch.no_grad():
        for part in parts:
            if isinstance(part, RECURRENT):
                x = x.new_zeros(*x.shape[:-1], part.hidden_size)
            else:
                weights = [weight.dtype for weight in part.parameters()]
                x = part(x.to(weights[0]) if weights and x.is_floating_point() else x)
    return x.shape[1:]


if __name__ == "__main__":
    main()
