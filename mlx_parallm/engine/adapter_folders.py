"""Which folders of adapters may be read, and where one lies that is asked for by name."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

from mlx_parallm.adapters.folder import CONFIG_NAME
from mlx_parallm.config import AdapterConfig
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError

#: Most characters of an adapter's name.
MAX_NAME = 256
#: The field of requests that names one.
LORA_PATH = "lora_path"
# Of the hub: an owner and a name.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*", re.ASCII)
_HUB_HINT = " An id on the hub needs --allowed-adapter-repos."


class AdapterFolders:
    """Confines paths of requests to what the configuration allows."""

    def __init__(self, config: AdapterConfig) -> None:
        self._named = Path(config.directory).resolve() if config.directory else None
        roots = [Path(root).resolve() for root in config.allowed_roots]
        self._roots = roots if self._named is None else [*roots, self._named]
        self._repos = config.allowed_repos

    def resolve(self, path: str, *, param: str = LORA_PATH) -> Path:
        """The folder of a path.

        A relative one is below the directory of named adapters.

        Raises:
            InvalidRequestError: it is outside of every allowed root.
            NotFoundError: there is no such folder.
        """
        hint = _HUB_HINT if param == LORA_PATH and _HUB_ID.fullmatch(path) else ""
        if not self._roots:
            raise InvalidRequestError(
                "This server reads no folders: start it with --adapter-dir or "
                f"--allowed-adapter-roots, or upload the tensors.{hint}",
                param=param,
            )
        if "\0" in path:
            raise InvalidRequestError("A path has no NUL.", param=param)
        allowed = self._allowed(path)
        for folder in allowed:
            if folder.is_dir():
                return folder
        if allowed:
            # On a shared disk it may come later: trainers try again on 404.
            raise NotFoundError(f"There is no folder {path[:200]!r}.{hint}", param=param)
        raise InvalidRequestError(
            f"{path[:200]!r} is no folder below those that this server may read.{hint}",
            param=param,
        )

    def repo_of(self, path: str) -> str | None:
        """The id on the hub that a path is, if it may be loaded from there; None for a folder's.

        A folder of this name, below the directory of named adapters or a root, comes first.
        """
        if len(path) > MAX_NAME or not _HUB_ID.fullmatch(path):
            return None
        if any(folder.is_dir() for folder in self._allowed(path)):
            return None
        return path if any(fnmatchcase(path, repo) for repo in self._repos) else None

    def _allowed(self, path: str) -> list[Path]:
        """Where a path may lead that this server may read, whether there is a folder or not."""
        given = Path(path)
        bases = [self._named] if self._named is not None else self._roots
        candidates = [given] if given.is_absolute() else [base / given for base in bases]
        # Symbolic links count as where they lead.
        folders = [candidate.resolve() for candidate in candidates]
        return [one for one in folders if any(one.is_relative_to(root) for root in self._roots)]

    def find(self, name: str) -> Path | None:
        """The folder of the adapter of this name in the directory of named adapters."""
        if self._named is None or not name or "\0" in name or len(name) > MAX_NAME:
            return None
        folder = (self._named / name).resolve()
        is_inside = folder != self._named and folder.is_relative_to(self._named)
        return folder if is_inside and (folder / CONFIG_NAME).is_file() else None
