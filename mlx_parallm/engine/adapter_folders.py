"""Reads adapters from the folders and hub ids that requests may name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlx_parallm.adapters.formats import CONFIG_NAME, read_adapter_folder
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.config import AdapterConfig
from mlx_parallm.confinement import MAX_NAME, Confinement, is_hub_id, is_spelled
from mlx_parallm.types.errors import (
    InvalidRequestError,
    ModelLoadError,
    ModelNotFoundError,
    NotFoundError,
)
from mlx_parallm.worker.weights.hub import download_adapter, log_download

#: ``LORA_PATH``: the field of requests that names a folder or a hub id.
LORA_PATH = "lora_path"
_HUB_HINT = " An id on the hub needs --allowed-adapter-repos."


class AdapterFolders:
    """Confines paths of requests to what the configuration allows, and reads what is there.

    Lives on the event loop; files are read on other threads.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._named = Path(config.directory).resolve() if config.directory else None
        named = [] if self._named is None else [self._named]
        roots = [*config.allowed_roots, *map(str, named)]
        self._confinement = Confinement(roots, config.allowed_repos, bases=named or None)
        self._downloads = asyncio.Lock()

    async def read(self, path: str) -> tuple[AdapterWeights, str]:
        """Return the adapter at a path or with a hub id, and where it was.

        Raises:
            InvalidRequestError: this server may not read it, or it is no adapter.
            NotFoundError: it is not there, or cannot be fetched.
        """
        repo = self.repo_of(path)
        folder = self.resolve(path) if repo is None else await self._download(repo)
        return await asyncio.to_thread(_read, folder), repo or str(folder)

    async def read_named(self, name: str) -> tuple[AdapterWeights, str]:
        """Return an adapter of the directory of adapters by name; raise ModelNotFoundError."""
        folder = self.find(name)
        if folder is None:
            raise ModelNotFoundError(name)
        return await asyncio.to_thread(_read, folder), str(folder)

    async def read_own(self, folder: Path) -> AdapterWeights:
        """Return the adapter of a folder that the server has written."""
        return await asyncio.to_thread(_read, folder)

    def resolve(self, path: str, *, param: str = LORA_PATH) -> Path:
        """Return the folder of a path.

        A relative path starts from the directory of named adapters. Below its root it is spelled
        as the disk lists it, so that one folder has one path.

        Raises:
            InvalidRequestError: the path is outside of every allowed root.
            NotFoundError: there is no such folder.
        """
        hint = _HUB_HINT if param == LORA_PATH and is_hub_id(path) else ""
        if not self._confinement.roots:
            raise InvalidRequestError(
                "This server may not read folders: start it with --adapter-dir or "
                f"--allowed-adapter-roots, or upload the tensors.{hint}",
                param=param,
            )
        allowed = self._confinement.folders(path, param=param)
        for folder in allowed:
            if self._is_there(folder):
                return folder
        if allowed:
            # On a shared disk the folder may appear later: trainers try again on 404.
            raise NotFoundError(f"There is no folder {path[:200]!r}.{hint}", param=param)
        raise InvalidRequestError(
            f"{path[:200]!r} is not below a folder that this server may read.{hint}",
            param=param,
        )

    def repo_of(self, path: str) -> str | None:
        """Return a path that is a hub id which may be loaded; None for a folder.

        A folder of this name, below the directory of named adapters or a root, comes first.
        """
        if not self._confinement.allows_repo(path):
            return None
        folders = self._confinement.folders(path, param=LORA_PATH)
        return None if any(map(self._is_there, folders)) else path

    def find(self, name: str) -> Path | None:
        """Return the folder of an adapter in the directory of named adapters; None if absent.

        An adapter has one name: on a disk that ignores case, others find its folder too.
        """
        if self._named is None or not name or "\0" in name or len(name) > MAX_NAME:
            return None
        folder = (self._named / name).resolve()
        is_inside = folder != self._named and folder.is_relative_to(self._named)
        is_there = is_inside and (folder / CONFIG_NAME).is_file()
        return folder if is_there and is_spelled(name, self._named) else None

    def _is_there(self, folder: Path) -> bool:
        """True if a folder, below a root, exists and has this name."""
        return folder.is_dir() and any(
            folder == root or is_spelled(folder.relative_to(root).as_posix(), root)
            for root in self._confinement.roots
            if folder.is_relative_to(root)
        )

    async def _download(self, repo: str) -> Path:
        # Downloads run one at a time, because each occupies a thread.
        async with self._downloads:
            try:
                return await asyncio.to_thread(download_adapter, repo, log_download)
            except ModelLoadError as problem:
                raise NotFoundError(str(problem), param=LORA_PATH) from None


def _read(folder: Path) -> AdapterWeights:
    weights = read_adapter_folder(folder, param=LORA_PATH)
    # The digest is computed here, so that the engine thread does not have to.
    _ = weights.digest
    return weights
