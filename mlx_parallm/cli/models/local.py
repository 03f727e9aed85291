"""``mlx_parallm models list`` and ``rm``: models in the hub cache and in folders."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HFCacheInfo, constants, scan_cache_dir
from huggingface_hub.errors import CacheNotFound
from huggingface_hub.file_download import repo_folder_name

from mlx_parallm.cli.models.subcommands import Subcommands, add_subcommand, table
from mlx_parallm.confinement import is_hub_id
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.units import readable_bytes

HEADING = ("NAME", "SIZE", "WHERE")
#: ``PARTIAL``: the ending of files whose download has not ended.
PARTIAL = ".incomplete"
#: ``REPOSITORY``: the beginning of the names of folders of models in the hub cache.
REPOSITORY = "models--"
#: ``MAX_DEPTH``: folders between one of ``--model-dir`` and a model: ``org/name``.
MAX_DEPTH = 2


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
        "--model-dir", type=Path, nargs="+", default=[], metavar="DIR", help="folders of models"
    )
    removal = add_subcommand(kinds, "rm", "remove a model from the hub cache", remove)
    removal.add_argument("name", metavar="NAME", help="its hub id, such as org/name")
    removal.add_argument("--yes", action="store_true", help="do not ask")


def show(args: argparse.Namespace) -> int:
    """Print the models of the hub cache and of the folders as a table."""
    for folder in args.model_dir:
        if not folder.is_dir():
            raise ConfigError(f"--model-dir: {folder} is not a folder.")
    models = [*cached_models(), *(each for root in args.model_dir for each in models_in(root))]
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
    folders = sorted(cache_folder().glob(f"{REPOSITORY}*"))
    return [LocalModel(_name(folder), _size(folder), _place(folder)) for folder in folders]


def models_in(root: Path) -> Iterator[LocalModel]:
    """Yield the models below a folder, by their paths: folders with config.json, and GGUF files."""
    for path in _candidates(root, MAX_DEPTH):
        name = path.relative_to(root).as_posix()
        yield LocalModel(name, _size(path), str(root))


def _candidates(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".gguf" or (path / "config.json").is_file():
            yield path
        elif depth > 1 and path.is_dir() and not path.name.startswith("."):
            yield from _candidates(path, depth - 1)


def _scan() -> HFCacheInfo | None:
    try:
        return scan_cache_dir(cache_folder())
    except CacheNotFound:
        return None


def _name(folder: Path) -> str:
    return folder.name.removeprefix(REPOSITORY).replace("--", "/")


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
