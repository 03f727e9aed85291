"""``mlx_parallm models pull``: a model from the hub, checked, into its cache."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm import tqdm

from mlx_parallm.cli.models.fit import Need, free_memory, verdict
from mlx_parallm.cli.models.hub_files import BlobFolder, HubFile
from mlx_parallm.cli.models.local import cache_folder
from mlx_parallm.cli.models.subcommands import Subcommands, add_subcommand
from mlx_parallm.cli.server_client import add_server_arguments, server_of
from mlx_parallm.models.checkpoints.weight_files import INDEX, missing_files
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.weights.hub import CODE_PATTERNS, PATTERNS, hub_errors

CONFIG = "config.json"
#: ``PLANS``: the files that say which others are needed, and how large the model is.
PLANS = frozenset({CONFIG, INDEX})
WEIGHTS = (".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository of the hub at a commit.

    Attributes:
        name: its id.
        revision: the branch, tag or commit that was asked for.
        commit: the commit that it stands for.
        files: all its files.
    """

    name: str
    revision: str | None
    commit: str
    files: Sequence[HubFile]

    @property
    def blobs(self) -> Path:
        """Return the folder of its contents in the cache."""
        return cache_folder() / repo_folder_name(repo_id=self.name, repo_type="model") / "blobs"

    def matching(self, patterns: Sequence[str]) -> list[HubFile]:
        """Return the files that match patterns."""
        names = set(
            filter_repo_objects([file.name for file in self.files], allow_patterns=list(patterns))
        )
        return [file for file in self.files if file.name in names]

    def link(self, files: Sequence[HubFile]) -> Path:
        """Return the folder of a snapshot with files whose contents are there."""
        names = [file.name for file in files]
        folder = huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            self.name, revision=self.commit, allow_patterns=names
        )
        return Path(folder)


def add_subcommands(kinds: Subcommands) -> None:
    """Add ``pull``."""
    parser = add_subcommand(kinds, "pull", "fetch a model from the hub into its cache", pull)
    parser.add_argument("name", metavar="ID", help="its hub id, such as org/name")
    parser.add_argument("--revision", help="branch, tag or commit (default: main)")
    parser.add_argument(
        "--include", nargs="+", default=[], metavar="PATTERN", help="further files, such as *.gguf"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="also fetch Python files")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="context to reckon with (default: its own)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be fetched")
    add_server_arguments(parser)


def pull(args: argparse.Namespace) -> int:
    """Fetch a model, and print its folder."""
    disable_progress_bars()
    with hub_errors(args.name, args.revision):
        repository = read_repository(args.name, args.revision)
        fetch(repository, [file for file in repository.files if file.name in PLANS])
        files = wanted_files(repository, args)
        say(f"{repository.name} at {repository.commit[:12]}: {describe(repository, files)}")
        with server_of(args) as server:
            say(verdict(need_of(repository, files, args.max_model_len), free_memory(server)))
        check_disk(repository, files)
        if args.dry_run:
            return 0
        fetch(repository, files)
        folder = repository.link(files)
        _remember(repository)
    print(folder)
    return 0


def read_repository(name: str, revision: str | None) -> Repository:
    """Return what the hub says of a repository."""
    hub = HfApi()
    commit = hub.model_info(name, revision=revision).sha
    if commit is None:
        raise ModelLoadError(f"The hub names no commit of {name}.")
    entries = hub.list_repo_tree(name, recursive=True, revision=commit)
    files = [HubFile.listed(name, commit, each) for each in entries if isinstance(each, RepoFile)]
    return Repository(name, revision, commit, files)


def wanted_files(repository: Repository, args: argparse.Namespace) -> list[HubFile]:
    """Return the files that a server reads, and those that ``--include`` names.

    Raises:
        ModelLoadError: there are no weights among them.
    """
    code = CODE_PATTERNS if args.trust_remote_code else ()
    named = _named_by_index(repository)
    files = repository.matching((*PATTERNS, *code, *named, *args.include))
    if not any(file.name.endswith(WEIGHTS) for file in files):
        raise ModelLoadError(
            f"{repository.name} has no weights that are read: neither safetensors nor files of "
            "--include."
        )
    return files


def _named_by_index(repository: Repository) -> list[str]:
    """Return the files of weights that the index names, which may have any name."""
    plans = [file for file in repository.files if file.name in PLANS]
    return missing_files(repository.link(plans)) if plans else []


def need_of(repository: Repository, files: Sequence[HubFile], max_model_len: int | None) -> Need:
    """Return the memory that the model takes."""
    config: dict[str, Any] = {}
    for file in repository.files:
        if file.name == CONFIG:
            config = _read_object(repository.blobs / file.digest)
    weights = sum(file.size for file in files if file.name.endswith(WEIGHTS))
    return Need.of(config, weights, max_model_len)


def _read_object(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one for anything else, which a load will refuse."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return content if is_object(content) else {}


def describe(repository: Repository, files: Sequence[HubFile]) -> str:
    """Return how many files there are, their size, and what is still to be fetched."""
    missing = _blobs(repository).missing_bytes(files)
    total = readable_bytes(sum(file.size for file in files))
    return f"{len(files)} files, {total}, of which {readable_bytes(missing)} are not here yet"


def check_disk(repository: Repository, files: Sequence[HubFile]) -> None:
    """Refuse a download that the disk has no room for.

    Raises:
        ConfigError: it lacks room.
    """
    missing = _blobs(repository).missing_bytes(files)
    place = next(path for path in (repository.blobs, *repository.blobs.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if missing > free:
        raise ConfigError(
            f"{repository.name} needs {readable_bytes(missing)} more on the disk of {place}, which "
            f"has {readable_bytes(free)} free; HF_HOME chooses another folder."
        )


def fetch(repository: Repository, files: Sequence[HubFile]) -> None:
    """Fetch files with a progress bar on a terminal."""
    total = sum(file.size for file in files)
    bar: tqdm[Any]
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "disable": None}
    with tqdm(total=total, file=sys.stderr, **options) as bar:
        _blobs(repository, bar).fetch(files)


def _blobs(repository: Repository, bar: tqdm[Any] | None = None) -> BlobFolder:
    return BlobFolder(repository.blobs, (lambda _count: None) if bar is None else bar.update)


def _remember(repository: Repository) -> None:
    """Let the branch or tag stand for the commit, also without a network."""
    revision = repository.revision or "main"
    if revision != repository.commit:
        reference = repository.blobs.parent / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(repository.commit)


def say(line: str) -> None:
    """Write a line for people, apart from the folder on stdout."""
    print(line, file=sys.stderr)
