"""Which folders of adapters may be read, and where one lies that is asked for by name."""

from __future__ import annotations

from pathlib import Path

from mlx_parallm.adapters.folder import CONFIG_NAME
from mlx_parallm.config import AdapterConfig
from mlx_parallm.errors import InvalidRequestError, NotFoundError

#: Most characters of an adapter's name.
MAX_NAME = 256


class AdapterFolders:
    """Confines paths of requests to the roots of the configuration."""

    def __init__(self, config: AdapterConfig) -> None:
        self._named = Path(config.directory).resolve() if config.directory else None
        roots = [Path(root).resolve() for root in config.allowed_roots]
        self._roots = roots if self._named is None else [*roots, self._named]

    def resolve(self, path: str, *, param: str = "lora_path") -> Path:
        """The folder of a path.

        A relative one is below the directory of named adapters.

        Raises:
            InvalidRequestError: it is outside of every allowed root.
            NotFoundError: there is no such folder.
        """
        if not self._roots:
            raise InvalidRequestError(
                "This server reads no folders: start it with --adapter-dir or "
                "--allowed-adapter-roots, or upload the tensors.",
                param=param,
            )
        if "\0" in path:
            raise InvalidRequestError("A path has no NUL.", param=param)
        given = Path(path)
        bases = [self._named] if self._named is not None else self._roots
        candidates = [given] if given.is_absolute() else [base / given for base in bases]
        is_allowed = False
        for candidate in candidates:
            # Symbolic links count as where they lead.
            folder = candidate.resolve()
            if any(folder.is_relative_to(root) for root in self._roots):
                if folder.is_dir():
                    return folder
                is_allowed = True
        if is_allowed:
            # On a shared disk it may come later: trainers try again on 404.
            raise NotFoundError(f"There is no folder {path[:200]!r}.", param=param)
        raise InvalidRequestError(
            f"{path[:200]!r} is no folder below those that this server may read.", param=param
        )

    def find(self, name: str) -> Path | None:
        """The folder of the adapter of this name in the directory of named adapters."""
        if self._named is None or not name or "\0" in name or len(name) > MAX_NAME:
            return None
        folder = (self._named / name).resolve()
        is_inside = folder != self._named and folder.is_relative_to(self._named)
        return folder if is_inside and (folder / CONFIG_NAME).is_file() else None
