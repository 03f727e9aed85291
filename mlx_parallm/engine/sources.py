"""Which models may be loaded while the server runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mlx_parallm.config import LoadingConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDERS
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError

#: The field of requests that names one.
MODEL = "model"
#: Most characters of a model's name.
MAX_NAME = 256
# Of the hub: an owner and a name; a few models have no owner.
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?\w[\w.-]*", re.ASCII)


class ModelSources:
    """Confines what requests name to what the configuration allows."""

    def __init__(self, config: LoadingConfig, given: Sequence[str]) -> None:
        """``given`` are the folders and hub ids that the server was started with."""
        self._roots = [Path(root).resolve() for root in config.allowed_roots]
        self._repos = config.allowed_repos
        self._given = frozenset(given)

    def resolve(self, source: str) -> str:
        """The folder, or the id on the hub, that a request names.

        A folder below a root comes before an id of the same text; a relative one is below a root.
        The package's own models may always be loaded.

        Raises:
            InvalidRequestError: this server may not load it.
            NotFoundError: there is no such folder.
        """
        if source in self._given or source in DEMO_FOLDERS:
            return source
        if "\0" in source:
            raise InvalidRequestError("A path has no NUL.", param=MODEL)
        allowed = self._allowed(source)
        for folder in allowed:
            if folder.is_dir():
                return str(folder)
        is_id = len(source) <= MAX_NAME and _HUB_ID.fullmatch(source) is not None
        if is_id and any(fnmatchcase(source, repo) for repo in self._repos):
            return source
        if allowed and not is_id:
            raise NotFoundError(f"There is no folder {source[:200]!r}.", param=MODEL)
        raise InvalidRequestError(
            f"This server may not load {source[:200]!r}: folders need --allowed-model-roots, ids "
            "on the hub --allowed-model-repos.",
            param=MODEL,
        )

    def _allowed(self, source: str) -> list[Path]:
        """Where a path may lead that this server may read, whether there is a folder or not."""
        given = Path(source)
        candidates = [given] if given.is_absolute() else [root / given for root in self._roots]
        # Symbolic links count as where they lead.
        folders = [candidate.resolve() for candidate in candidates]
        return [one for one in folders if any(one.is_relative_to(root) for root in self._roots)]
