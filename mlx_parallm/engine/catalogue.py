"""The models that lie in folders, where requests may name them before they are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from mlx_parallm.config import LoadingConfig
from mlx_parallm.confinement import DOTS, GGUF, GGUF_PART, MAX_NAME

# MAX_MODELS: models that are listed; a folder with more is not one of models.
MAX_MODELS = 10_000
# WEIGHTS: endings of the files that have weights. A folder without one is half downloaded.
WEIGHTS = (".safetensors", ".npz", ".bin", ".zip")
# HUB_PREFIX: begins the names of the folders of models in the hub's cache.
HUB_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model in a folder.

    Attributes:
        name: its path below the root, or its hub id.
        path: its folder, or its GGUF file.
        size_bytes: of its weights.
    """

    name: str
    path: Path
    size_bytes: int


class Catalogue:
    """Looks for models in folders, without opening any file but the hub's references.

    A model is a folder with ``config.json`` and weights, or a GGUF file; it lies directly in a root
    or in a folder of it (``org/name``). Links that lead out of the root are not followed.
    """

    def __init__(self, config: LoadingConfig) -> None:
        """Prepare; ``config`` names the roots."""
        self._roots = [_real(Path(root).expanduser()) for root in config.directories]
        self._hub_cache = _real(Path(HF_HUB_CACHE)) if config.scans_hub_cache else None

    def __bool__(self) -> bool:
        """Return True if there is a folder to look at."""
        return bool(self._roots) or self._hub_cache is not None

    def scan(self) -> dict[str, FoundModel]:
        """Return the models by name; of equal names the first root's. Any thread may call it."""
        models: dict[str, FoundModel] = {}
        for model in self._models():
            if len(models) >= MAX_MODELS:
                break
            if _is_name(model.name):
                models.setdefault(model.name, model)
        return models

    def _models(self) -> Iterator[FoundModel]:
        for root in self._roots:
            yield from _models_in(root, root)
            for folder in _folders(root, root):
                yield from _models_in(folder, root)
        if self._hub_cache is not None:
            yield from _hub_models(self._hub_cache)


def _real(folder: Path) -> Path:
    """Return where links lead; ``Path.resolve`` raises for a link to itself."""
    return Path(os.path.realpath(folder))


def _models_in(folder: Path, root: Path) -> Iterator[FoundModel]:
    """Yield the models directly in a folder: GGUF files, and folders."""
    for entry in _entries(folder):
        path = Path(entry.path)
        is_model = entry.name.endswith(GGUF) and _is_first(entry.name) and _holds(entry.is_file)
        if is_model and path.resolve().is_relative_to(root):
            yield FoundModel(path.relative_to(root).as_posix(), path, _split_bytes(path))
    for path in _folders(folder, root):
        if (size := _weight_bytes(path)) is not None:
            yield FoundModel(path.relative_to(root).as_posix(), path, size)


def _hub_models(cache: Path) -> Iterator[FoundModel]:
    for folder in _folders(cache, cache):
        if folder.name.startswith(HUB_PREFIX):
            snapshot = _snapshot(folder)
            if snapshot is not None and (size := _weight_bytes(snapshot)) is not None:
                hub_id = folder.name.removeprefix(HUB_PREFIX).replace("--", "/", 1)
                yield FoundModel(hub_id, snapshot, size)


def _snapshot(folder: Path) -> Path | None:
    """Return the snapshot of a hub folder's main branch, or its only one; None if it has neither.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
    """
    try:
        revision = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        revision = ""
    snapshots = _folders(folder / "snapshots", folder)
    main = [each for each in snapshots if each.name == revision]
    return main[0] if main else snapshots[0] if len(snapshots) == 1 else None


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in a folder, by name, without hidden entries; nothing if it is unreadable."""
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:
        return []
    return sorted(visible, key=lambda entry: entry.name)


def _folders(folder: Path, root: Path) -> list[Path]:
    """Return the folders in a folder that are below the root, wherever links lead."""
    folders = [Path(entry.path) for entry in _entries(folder) if _holds(entry.is_dir)]
    return [each for each in folders if each.resolve().is_relative_to(root)]


def _holds(is_kind: Callable[[], bool]) -> bool:
    """Return what a look at an entry says; False for a loop of links."""
    try:
        return is_kind()
    except OSError:
        return False


def _weight_bytes(folder: Path) -> int | None:
    """Return the size of a model's weights; None if the folder has no model, or a part of one."""
    names = {entry.name: entry for entry in _entries(folder)}
    if "config.json" not in names:
        return None
    sizes = [_size(entry) for name, entry in names.items() if name.endswith(WEIGHTS)]
    return sum(sizes) if sizes else None


def _is_first(name: str) -> bool:
    """True unless a GGUF file is a later part of a split one; the first stands for all."""
    part = GGUF_PART.fullmatch(name)
    return part is None or int(part["number"]) == 1


def _split_bytes(path: Path) -> int:
    """Return the size of a GGUF file with its other parts."""
    model = _parts_of(path.name)
    return sum(_size(entry) for entry in _entries(path.parent) if _parts_of(entry.name) == model)


def _parts_of(name: str) -> tuple[str, ...]:
    """Return what the names of all parts of a GGUF file have in common."""
    part = GGUF_PART.fullmatch(name)
    return (name,) if part is None else (part["stem"], part["count"])


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:
        return 0


def _is_name(name: str) -> bool:
    """True if requests can name a model so."""
    return len(name) <= MAX_NAME and name.isprintable() and not DOTS.intersection(name.split("/"))
