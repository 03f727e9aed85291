"""The entry point of the command line, which runs the command that is named.

Only the chosen command's modules are imported, and those of its flags before those that run. So
``--help`` is quick, and ``doctor`` works even if other modules of an installation fail to import.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_parallm import __version__
from mlx_parallm.cli.logs import report
from mlx_parallm.cli.parser import CommandParser
from mlx_parallm.process_setup.descriptors import keep_descriptor_limit, raise_descriptor_limit
from mlx_parallm.process_setup.device_process import prepare_device_process
from mlx_parallm.types.errors import ConfigError, ParallmError


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        module: the module with ``run(args) -> int``.
        summary: a description for the overview.
        flags: the module with ``add_arguments(parser)``; None: ``module``.
        brings_mlx: True if importing the module imports MLX.
    """

    module: str
    summary: str
    flags: str | None = None
    brings_mlx: bool = False


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        "mlx_parallm.cli.serve_start",
        "serve models over HTTP with OpenAI's API",
        flags="mlx_parallm.cli.configure",
    ),
    "engine": Command(
        "mlx_parallm.cli.engine_listener", "start engines for servers on other machines"
    ),
    "batch": Command("mlx_parallm.cli.batch", "answer a file of OpenAI batch lines"),
    "bench": Command("mlx_parallm.bench.cli", "measure a running server, or the engine by itself"),
    "chat": Command("mlx_parallm.cli.chat.command", "chat with a model in the terminal"),
    "launch": Command(
        "mlx_parallm.cli.launch.command", "run a coding agent or Open WebUI with a server"
    ),
    "models": Command(
        "mlx_parallm.cli.models.command",
        "list, fetch, convert and remove models, or load them into a running server",
    ),
    "fleet": Command("mlx_parallm.cli.fleet.command", "show and mend servers that change together"),
    "kv": Command("mlx_parallm.cli.kv", "show or remove the KV that servers keep on a disk"),
    "doctor": Command(
        "mlx_parallm.cli.doctor.command",
        "report backend, BLAS, versions and advice",
        brings_mlx=True,
    ),
}


NO_MLX = (
    "MLX is not installed. On Linux install one of its builds with the package: "
    "mlx-parallm[cpu], mlx-parallm[cuda12] or mlx-parallm[cuda13]."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 2 for wrong usage or settings, 1 for a failure."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = overview_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    name = parser.parse_args(arguments[:1]).command
    return _guard(name, lambda: run_command(name, arguments[1:]))


def overview_parser() -> argparse.ArgumentParser:
    """Return the parser of the first argument."""
    width = max(map(len, COMMANDS)) + 2
    listing = "\n".join(f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mlx_parallm",
        description="A high-throughput OpenAI-compatible model server built on MLX.",
        epilog=f"commands:\n{listing}\n\n`mlx_parallm COMMAND --help` shows a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="mlx_parallm [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"mlx_parallm {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Parse a command's own arguments and run it."""
    command = COMMANDS[name]
    parser = CommandParser(
        prog=f"mlx_parallm {name}",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    raise_descriptor_limit()
    keep_descriptor_limit()
    if command.brings_mlx:
        prepare_device_process()
    importlib.import_module(command.flags or command.module).add_arguments(parser)
    args = parser.parse_args(arguments)
    return importlib.import_module(command.module).run(args)


def _guard(name: str, run: Callable[[], int]) -> int:
    try:
        return run()
    except ConfigError as error:
        report(f"mlx_parallm {name}: error: {error}")
        return 2
    except ParallmError as error:
        report(f"mlx_parallm {name}: {error}")
        return 1
    except ModuleNotFoundError as error:
        # On Linux MLX has several builds, of which none is a dependency.
        if error.name not in {"mlx", "mlx.core"}:
            raise
        report(f"mlx_parallm {name}: error: {NO_MLX}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe; without this, Python would report it again at the final flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
