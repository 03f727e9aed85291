"""``mlx_parallm models convert``: mlx_lm's conversion, or that of GGUF, in its own process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.cli.models.subcommands import Subcommands, add_subcommand
from mlx_parallm.confinement import GGUF, is_gguf
from mlx_parallm.peers.child_process import ChildProcess
from mlx_parallm.types.errors import ConfigError

#: ``OPTIONS``: options of mlx_lm's conversion that are passed on, by name.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--mlx-path": {"default": "mlx_model", "metavar": "DIR", "help": "folder to write"},
    "--q-bits": {"type": int, "metavar": "N", "help": "bits of a weight"},
    "--q-group-size": {"type": int, "metavar": "N", "help": "weights that share a scale"},
    "--q-mode": {
        "choices": ("affine", "mxfp4", "nvfp4", "mxfp8"),
        "help": "how weights are quantised",
    },
    "--quant-predicate": {
        "choices": ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"),
        "help": "a recipe of mixed bits",
    },
    "--dtype": {
        "choices": ("float16", "bfloat16", "float32"),
        "help": "dtype of what is not quantised",
    },
}
# GGUF_MODULE: the module that converts GGUF files.
GGUF_MODULE = "mlx_parallm.cli.models.gguf_convert"
#: ``GGUF_BITS``: bits that tensors of GGUF files may be quantised to.
GGUF_BITS = (2, 3, 4, 5, 6, 8)
#: ``SWITCHES``: its options without a value.
SWITCHES: Mapping[str, tuple[str, ...]] = {
    "quantise the weights": ("-q", "--quantize"),
    "undo a quantisation": ("-d", "--dequantize"),
    "run Python files of the tokenizer": ("--trust-remote-code",),
}


def add_subcommands(kinds: Subcommands) -> None:
    """Add ``convert``."""
    parser = add_subcommand(
        kinds, "convert", "write a model in MLX's form, quantised or not (mlx_lm.convert)", convert
    )
    parser.add_argument("model", metavar="ID_OR_FOLDER", help="a hub id, a folder or a GGUF file")
    for name, options in OPTIONS.items():
        parser.add_argument(name, **options)
    for text, names in SWITCHES.items():
        parser.add_argument(*names, action="store_true", help=text)


def convert(args: argparse.Namespace) -> int:
    """Convert a model; return the exit status of the conversion."""
    if Path(args.mlx_path).exists():
        raise ConfigError(f"--mlx-path: {args.mlx_path} exists already.")
    path = Path(args.model)
    is_file = path.suffix == GGUF or is_gguf(path)
    command = gguf_command(args) if is_file else ["mlx_lm", "convert", *conversion_arguments(args)]
    with ChildProcess(command) as process:
        return process.wait()


def gguf_command(args: argparse.Namespace) -> list[str]:
    """Return the module that converts a GGUF file, and its arguments.

    Raises:
        ConfigError: flags that are only for folders.
    """
    unused = [name for name in OPTIONS if name not in ("--mlx-path", "--q-bits")]
    unused += [names[-1] for names in SWITCHES.values()]
    if wrong := [name for name in unused if getattr(args, _attribute(name))]:
        raise ConfigError(f"{', '.join(wrong)}: a GGUF file takes --mlx-path and --q-bits alone.")
    if args.q_bits not in (None, *GGUF_BITS):
        raise ConfigError(
            f"--q-bits: {args.q_bits} is not one of {', '.join(map(str, GGUF_BITS))}."
        )
    bits = [] if args.q_bits is None else ["--q-bits", str(args.q_bits)]
    return [GGUF_MODULE, args.model, "--mlx-path", args.mlx_path, *bits]


def conversion_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments of ``mlx_lm convert`` that flags stand for."""
    arguments = ["--hf-path", args.model]
    for name in OPTIONS:
        value = getattr(args, _attribute(name))
        arguments += [] if value is None else [name, str(value)]
    switches = [names[-1] for names in SWITCHES.values()]
    return arguments + [name for name in switches if getattr(args, _attribute(name))]


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
