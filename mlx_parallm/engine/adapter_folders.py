"""Where the adapters that requests name may be read from."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.adapters.folder import CONFIG_NAME
from mlx_parallm.config import AdapterConfig
from mlx_parallm.engine.confinement import MAX_NAME, Confinement, is_hub_id
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError

#: ``LORA_PATH``: the field of requests that names a folder or a hub id.
LORA_PATH = "lora_path"
_HUB_HINT = " An id on the hub needs --allowed-adapter-repos."


class AdapterFolders:
    """Confines paths of requests to what the configuration allows."""

    def __init__(self, config: AdapterConfig) -> None:
        self._named = Path(config.directory).resolve() if config.directory else None
        named = [] if self._named is None else [self._named]
        roots = [*config.allowed_roots, *map(str, named)]
        self._confinement = Confinement(roots, config.allowed_repos, bases=named or None)

    def resolve(self, path: str, *, param: str = LORA_PATH) -> Path:
        """Return the folder of a path.

        A relative path starts from the directory of named adapters.

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
            if folder.is_dir():
                return folder
        if allowed:
            # On a shared disk the folder may appear later: trainers try again on 404.
            raise NotFoundError(f"There is no folder {path[:200]!r}.{hint}", param=param)
        raise InvalidRequestError(
            f"{path[:200]!r} is not below a folder that this server may read.{hint}",
            param=param,
        )

    def repo_of(self, path: str) -> str | None:
        """Return the hub id that a path is, if it may be loaded from there; None for a folder's.

        A folder of this name, below the directory of named adapters or a root, comes first.
        """
        if not self._confinement.allows_repo(path):
            return None
        folders = self._confinement.folders(path, param=LORA_PATH)
        return None if any(folder.is_dir() for folder in folders) else path

    def find(self, name: str) -> Path | None:
        """Return the folder of an adapter in the directory of named adapters; None if absent."""
        if self._named is None or not name or "\0" in name or len(name) > MAX_NAME:
            return None
        folder = (self._named / name).resolve()
        is_inside = folder != self._named and folder.is_relative_to(self._named)
        return folder if is_inside and (folder / CONFIG_NAME).is_file() else None
