"""The commands ``mlx_parallm kv status`` and ``mlx_parallm kv clear``, for ``--kv-disk``.

They need no server, and may run while servers use the folder.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.folder import SETTING
from mlx_parallm.generation.kv_cache.disk.upkeep import (
    FilesStatus,
    FolderStatus,
    clear_folder,
    folder_status,
)
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.units import readable_bytes

# OWNER_DIGITS: how many digits of a model's digest are shown.
OWNER_DIGITS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their flags."""
    # Without this, a subcommand's --help would begin with the usage of its parent.
    kinds = parser.add_subparsers(required=True, metavar="WHAT", prog=parser.prog)
    for name, action, text in (
        ("status", show_status, "show what is in the folder"),
        ("clear", clear, "remove the KV of all models from the folder"),
    ):
        kind = kinds.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        kind.add_argument(
            "--kv-disk", type=Path, required=True, metavar="FOLDER", help="the folder of servers"
        )
        kind.set_defaults(action=action)


def run(args: argparse.Namespace) -> int:
    """Run a subcommand and return the exit status."""
    folder: Path = args.kv_disk
    if not folder.is_dir():
        raise ConfigError(f"{SETTING}: {folder} is not a folder.")
    try:
        args.action(folder)
    except OSError as problem:
        raise ConfigError(f"{SETTING}: {folder} cannot be used: {problem.strerror}.") from None
    return 0


def show_status(folder: Path) -> None:
    """Print what is in a folder."""
    print("\n".join(status_lines(folder, folder_status(folder), time.time_ns())))


def clear(folder: Path) -> None:
    """Remove the KV from a folder, and print how much it was."""
    print(f"removed {_amount(clear_folder(folder))} from {folder}")


def status_lines(folder: Path, status: FolderStatus, now_ns: int) -> list[str]:
    """Return the status of a folder as lines."""
    running = f"{status.num_running} running, {status.num_ended} ended"
    lines = [f"{folder}: {_amount(status.all_files)}; engines that write to it: {running}"]
    for model in status.models:
        name = f"model {model.owner[:OWNER_DIGITS]} ({model.format})" if model.owner else "half"
        minutes = max(0, now_ns - model.used_ns) / 60e9
        lines.append(f"  {name}: {_amount(model)}, used {minutes:.0f} minutes ago")
    return lines


def _amount(files: FilesStatus) -> str:
    plural = "" if files.num_files == 1 else "s"
    return f"{readable_bytes(files.num_bytes)} in {files.num_files} file{plural}"
