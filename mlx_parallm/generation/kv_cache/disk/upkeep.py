"""The folder of the disk store as operators see it, also while servers use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk import folder as folders
from mlx_parallm.generation.kv_cache.disk.catalog import Catalog, format_of, owner_of
from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.files import Files
from mlx_parallm.generation.kv_cache.disk.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesStatus:
    """Some files of the folder.

    Attributes:
        owner: digest of what wrote them: a model with its settings and versions. Empty if they
            are of several, or half files.
        format: the format of the files, such as ``kv1``.
        num_files: how many there are.
        num_bytes: their bytes.
        used_ns: when one of them was used last, in ns since 1970; 0 if there is none.
    """

    owner: str = ""
    format: str = ""
    num_files: int
    num_bytes: int
    used_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderStatus:
    """The folder of ``--kv-disk``.

    Attributes:
        all_files: all files together.
        models: the files of each model and format, those used last first.
        num_running: engines that write to it now.
        num_ended: folders that engines which have ended left.
    """

    all_files: FilesStatus
    models: tuple[FilesStatus, ...]
    num_running: int
    num_ended: int


def folder_status(folder: Path) -> FolderStatus:
    """Return what is in a folder.

    Raises:
        OSError: it cannot be read.
    """
    if not folders.is_ours(folder):
        return FolderStatus(all_files=_status([]), models=(), num_running=0, num_ended=0)
    catalog = _catalog(folder)
    with folders.locked(folder):
        catalog.refresh(everything=True)
        running = [folders.is_alive(folder / name) for name in catalog.sizes()]
    by_model: dict[tuple[str, str], list[Run]] = {}
    for run in catalog.runs():
        by_model.setdefault((owner_of(run.name), format_of(run.name)), []).append(run)
    models = [_status(runs, *model) for model, runs in by_model.items()]
    return FolderStatus(
        all_files=_status(catalog.runs()),
        models=tuple(sorted(models, key=lambda model: model.used_ns, reverse=True)),
        num_running=sum(running),
        num_ended=len(running) - sum(running),
    )


def clear_folder(folder: Path) -> FilesStatus:
    """Remove the files of all models, and the folders of engines that have ended.

    Engines that run find nothing of what was written before; they keep what they did not write
    yet. Files that no engine wrote stay.

    Raises:
        OSError: it cannot be changed.
    """
    if not folders.is_ours(folder):
        return _status([])
    files, catalog = Files(), _catalog(folder)
    with folders.locked(folder) as counter:
        counter.increase()
        catalog.refresh(everything=True)
        runs = catalog.runs()
        for run in runs:
            files.remove(run.path(folder))
        for name in catalog.sizes():
            if (ended := folders.take_over(folder / name)) is not None:
                ended.remove()
    return _status(runs)


def _catalog(folder: Path) -> Catalog:
    return Catalog(folder, Files(), Clocks())


def _status(runs: Iterable[Run], owner: str = "", format_: str = "") -> FilesStatus:
    runs = list(runs)
    return FilesStatus(
        owner=owner,
        format=format_,
        num_files=len(runs),
        num_bytes=sum(run.file_bytes for run in runs),
        used_ns=max((run.used_ns for run in runs), default=0),
    )
