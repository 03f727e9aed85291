"""The models that generate among those that are served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mlx_parallm.engine.status import ModelStatus
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.errors import InvalidRequestError, ModelNotFoundError


class Generators(ABC):
    """Finds models that generate; see ``RequestClient``."""

    @abstractmethod
    def statuses(self) -> Sequence[ModelStatus]:
        """See ``RequestClient``."""

    @abstractmethod
    def find(self, name: str) -> ModelStatus | None:
        """See ``RequestClient``."""

    @abstractmethod
    def not_found(self, name: str) -> ModelNotFoundError:
        """See ``RequestClient``."""

    def models(self) -> Sequence[GenerationModel]:
        """See ``RequestClient``."""
        models = (status.model for status in self.statuses())
        return [model for model in models if isinstance(model, GenerationModel)]

    def first_model(self) -> GenerationModel:
        """See ``RequestClient``."""
        models = self.models()
        if not models:
            raise InvalidRequestError("No model that generates is served here.", param="model")
        return models[0]

    def get_model(self, name: str) -> GenerationModel:
        """See ``RequestClient``."""
        status = self.find(name)
        if status is None:
            raise self.not_found(name)
        if not isinstance(status.model, GenerationModel):
            raise status.wrong_kind(name)
        return status.model
