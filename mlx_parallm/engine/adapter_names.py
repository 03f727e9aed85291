"""Finds adapters by the names that requests use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from mlx_parallm.engine.adapter_folders import AdapterFolders
from mlx_parallm.engine.policies import AdapterInfo, NamedAdapter
from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError


class ServedModels(Protocol):
    """Models that requests may name."""

    def statuses(self) -> Sequence[ModelStatus]:
        """Return all of them; those that may be meant where no model is named come first."""
        ...


class AdapterNames:
    """The adapters of all models, by their names.

    Attributes:
        known: the loaded adapters by name, as of the latest change; it is replaced, not changed.
    """

    def __init__(self, models: ServedModels, folders: AdapterFolders) -> None:
        """Begin without adapters.

        Args:
            models: have the adapters.
            folders: has those that are loaded once a request names them.
        """
        self.known: Mapping[str, AdapterInfo] = {}
        self._models = models
        self._folders = folders

    def listed(self) -> Sequence[AdapterInfo]:
        """Return the loaded adapters of all models that can be named."""
        # Adapters of a model that is being unloaded can no longer be named.
        return [info for info in self.known.values() if self.names_of(info.model)]

    def find(self, name: str) -> AdapterInfo | None:
        """Return the loaded adapter of this name, perhaps "model:name"; None if there is none."""
        if name in self.known:
            return self.known[name]
        for info in self.known.values():
            if any(f"{alias}:{info.name}" == name for alias in self.names_of(info.model)):
                return info
        return None

    def named(self, name: str) -> NamedAdapter | None:
        """Return the adapter of this name, loaded or in the directory of adapters by name."""
        info = self.find(name)
        if info is not None:
            return NamedAdapter(info.name, info.model, info.source, info)
        model, _, short = name.rpartition(":")
        base = self.names_of(model)
        source = self._folders.find(short if base else name)
        if source is None:
            return None
        if base:
            return NamedAdapter(short, base[0], str(source))
        return NamedAdapter(name, self.first_base(), str(source))

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that nothing has; it lists what is served."""
        models = [model for status in self._models.statuses() for model in status.names]
        return ModelNotFoundError(name, [*models, *(info.name for info in self.listed())])

    def names_of(self, model: str) -> tuple[str, ...]:
        """Return all names of the model that has this name; empty if there is no such model."""
        all_names = (status.names for status in self._models.statuses())
        return next((names for names in all_names if model in names), ())

    def first_base(self) -> str:
        """Return the name of the model that is meant where none is named."""
        statuses = self._models.statuses()
        if not statuses:
            raise InvalidRequestError("No model is served here.", param="model")
        return statuses[0].names[0]


def with_adapter(status: ModelStatus, adapter: NamedAdapter) -> ModelStatus:
    """Return the status of an adapter whose model has ``status``."""
    model = None if status.model is None else status.model.with_adapter(adapter)
    root = adapter.source or adapter.name
    return replace(status, names=(adapter.name,), root=root, model=model, parent=adapter.base)
