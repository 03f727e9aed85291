"""Which model or adapter a request is for."""

from __future__ import annotations

from mlx_parallm.engine.interface import EngineClient, ServedModel
from mlx_parallm.errors import ModelNotFoundError


def addressed_model(
    engine: EngineClient, model: str | None, adapter: str | None = None, *, field: str = "adapter"
) -> tuple[str, ServedModel]:
    """The name that is meant, and what it names.

    An adapter is a name of its own, or belongs to the model that is given; without either it is the
    first model. ``field`` is what the body calls the adapter.

    Raises:
        ModelNotFoundError: nothing has this name; names the field.
    """
    if adapter is None:
        found = engine.get_model(model) if model is not None else engine.first_model()
        return model or found.names[0], found
    name = adapter if model is None else f"{model}:{adapter}"
    try:
        return adapter, engine.get_model(name)
    except ModelNotFoundError as error:
        error.param = field
        raise
