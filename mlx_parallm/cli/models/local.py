"""``mlx_parallm models list`` and ``rm``: models in the hub cache and in folders."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HFCacheInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name

from mlx_parallm.cli.models.subcommands import Subcommands, add_subcommand, table
from mlx_parallm.config import LoadingConfig
from mlx_parallm.confinement import is_hub_id
from mlx_parallm.engine.catalogue import HUB_PREFIX, Catalogue
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.units import readable_bytes

HEADING = ("NAME", "SIZE", "WHERE")
#: ``PARTIAL``: the ending of files whose download has not ended.
PARTIAL = ".incomplete"
DIRECTORIES = "MLX_PARALLM_MODEL_DIR"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on a disk of this machine.

    Attributes:
        name: its hub id, or its path from the folder of ``--model-dir``.
        num_bytes: size of its files.
        place: where it lies, for people.
    """

    name: str
    num_bytes: int
    place: str


def add_subcommands(kinds: Subcommands) -> None:
    """Add ``list`` and ``rm``."""
    listing = add_subcommand(kinds, "list", "show the models on this machine", show)
    listing.add_argument(
        "--model-dir",
        nargs="+",
        metavar="DIR",
        help=f"folders of models (default: {DIRECTORIES}, as for serve)",
    )
    removal = add_subcommand(kinds, "rm", "remove a model from the hub cache", remove)
    removal.add_argument("name", metavar="NAME", help="its hub id, such as org/name")
    removal.add_argument("--yes", action="store_true", help="do not ask")


def show(args: argparse.Namespace) -> int:
    """Print the models of the hub cache and of the folders as a table."""
    named = os.environ.get(DIRECTORIES, "").split(",")
    roots: list[str] = args.model_dir or [root.strip() for root in named if root.strip()]
    for root in roots:
        if not Path(root).expanduser().is_dir():
            raise ConfigError(f"--model-dir: {root} is not a folder.")
    models = [*cached_models(), *(model for root in roots for model in models_in(root))]
    rows = [(model.name, readable_bytes(model.num_bytes), model.place) for model in models]
    print(table([HEADING, *rows]))
    return 0


def remove(args: argparse.Namespace) -> int:
    """Remove a model from the hub cache, after a question unless ``--yes`` is set."""
    name: str = args.name
    if not is_hub_id(name, with_owner=False):
        raise ConfigError(f"{name!r} is not a hub id; remove a folder of yours by yourself.")
    folder = cache_folder() / repo_folder_name(repo_id=name, repo_type="model")
    if not folder.is_dir():
        raise ConfigError(f"{name} is not in the hub cache {cache_folder()}.")
    size = readable_bytes(_size(folder))
    if not args.yes and not _confirmed(f"remove {name} ({size}) from {folder}? [y/N] "):
        print("nothing was removed")
        return 1
    scanned = _scan()
    repos = scanned.repos if scanned else ()
    revisions = [
        revision.commit_hash
        for repo in repos
        if repo.repo_path == folder
        for revision in repo.revisions
    ]
    if scanned and revisions:
        scanned.delete_revisions(*revisions).execute()
    # What is left had no complete revision.
    shutil.rmtree(folder, ignore_errors=True)
    print(f"removed {name} ({size})")
    return 0


def cache_folder() -> Path:
    """Return the folder of the hub cache; it may not exist."""
    return Path(constants.HF_HUB_CACHE).expanduser()


def cached_models() -> list[LocalModel]:
    """Return the models of the hub cache, sorted by name."""
    # scan_cache_dir leaves out downloads that have not ended.
    folders = sorted(cache_folder().glob(f"{HUB_PREFIX}*"))
    return [LocalModel(_name(folder), _size(folder), _place(folder)) for folder in folders]


def models_in(root: str) -> list[LocalModel]:
    """Return the models that a server with this folder as ``--model-dir`` would have."""
    models = Catalogue(LoadingConfig(directories=(root,))).scan()
    return [LocalModel(model.name, model.size_bytes, root) for model in models.values()]


def _scan() -> HFCacheInfo | None:
    try:
        return scan_cache_dir(cache_folder())
    except CacheNotFound:
        return None


def _name(folder: Path) -> str:
    return folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)


def _place(folder: Path) -> str:
    partial = any(folder.glob(f"blobs/*{PARTIAL}"))
    return "hub cache, partly downloaded" if partial else "hub cache"


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    # Snapshots of the hub cache are links to files that several of them have.
    return sum(file.stat().st_size for file in {each.resolve() for each in files if each.is_file()})


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask; --yes removes without a question.")
    return input(question).strip().lower() in {"y", "yes"}
