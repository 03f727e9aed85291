"""Reads adapters from folders and from the hub."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mlx_parallm.adapters.folder import read_adapter_folder
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.engine.adapter_folders import LORA_PATH, AdapterFolders
from mlx_parallm.types.errors import ModelLoadError, ModelNotFoundError, NotFoundError
from mlx_parallm.worker.weights.hub import download_adapter, log_download


class AdapterReader:
    """Reads adapters on threads of their own. Lives on the event loop."""

    def __init__(self, folders: AdapterFolders) -> None:
        self._folders = folders
        self._downloads = asyncio.Lock()

    async def read(self, path: str) -> tuple[AdapterWeights, str]:
        """Return the adapter at a path or with a hub id, and where it was.

        Raises:
            InvalidRequestError: this server may not read it, or it is no adapter.
            NotFoundError: it is not there, or cannot be fetched.
        """
        repo = self._folders.repo_of(path)
        folder = self._folders.resolve(path) if repo is None else await self._download(repo)
        return await asyncio.to_thread(_read, folder), repo or str(folder)

    async def read_named(self, name: str) -> tuple[AdapterWeights, str]:
        """Return an adapter of the directory of adapters by name; raise ModelNotFoundError."""
        folder = self._folders.find(name)
        if folder is None:
            raise ModelNotFoundError(name)
        return await asyncio.to_thread(_read, folder), str(folder)

    async def _download(self, repo: str) -> Path:
        # One at a time: each holds a thread for as long as it takes.
        async with self._downloads:
            try:
                return await asyncio.to_thread(download_adapter, repo, log_download)
            except ModelLoadError as problem:
                raise NotFoundError(str(problem), param=LORA_PATH) from None


def _read(folder: Path) -> AdapterWeights:
    weights = read_adapter_folder(folder, param=LORA_PATH)
    # Computed here rather than on the engine thread.
    _ = weights.digest
    return weights
