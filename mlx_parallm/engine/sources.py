"""Limits the models that may be loaded while the server runs."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_parallm.config import LoadingConfig
from mlx_parallm.confinement import MAX_NAME, Confinement, is_gguf, is_hub_id
from mlx_parallm.demo_models.folders import DEMO_FOLDERS
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError

#: ``MODEL``: the field of requests that names a model.
MODEL = "model"


# FOREIGN: how the names begin that clients of other services send, whatever is served.
FOREIGN = ("gpt-", "claude-")


def default_for(name: str, config: LoadingConfig) -> str | None:
    """Return the model that answers for an unknown name; None if none does."""
    return config.default_model if name.startswith(FOREIGN) else None


class ModelSources:
    """Confines what requests name to what the configuration allows."""

    def __init__(self, config: LoadingConfig, served: Sequence[str]) -> None:
        """``served`` are the folders and hub ids that the server was started with."""
        self._confinement = Confinement(config.allowed_roots, config.allowed_repos)
        self._served = frozenset(served)

    def resolve(self, source: str) -> str:
        """Return the folder or the hub id that a request names.

        A folder below a root comes before an id of the same text; a relative path starts there.
        The package's own models may always be loaded.

        Raises:
            InvalidRequestError: this server may not load it.
            NotFoundError: there is no such folder.
        """
        if source in self._served or source in DEMO_FOLDERS:
            return source
        allowed = self._confinement.folders(source, param=MODEL)
        for folder in allowed:
            if folder.is_dir() or is_gguf(folder):
                return str(folder)
        if self._confinement.allows_repo(source, with_owner=False):
            return source
        is_id = len(source) <= MAX_NAME and is_hub_id(source, with_owner=False)
        if allowed and not is_id:
            raise NotFoundError(f"There is no folder {source[:200]!r}.", param=MODEL)
        raise InvalidRequestError(
            f"This server may not load {source[:200]!r}: folders need --allowed-model-roots, and "
            "hub ids need --allowed-model-repos.",
            param=MODEL,
        )
