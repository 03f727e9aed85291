"""Which model a request is for: the one that it names, else the first of its route's kind.

Routes that only some encoders can serve choose among those beside what they compute:
``scoring_model``, ``reward_model`` and ``moderator``.
"""

from __future__ import annotations

from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import ModelNotFoundError
from mlx_parallm.types.pooling import Task


def generator(
    engine: EngineClient, model: str | None, adapter: str | None = None, *, field: str = "adapter"
) -> tuple[str, GenerationModel]:
    """Return the name that the answer tells, and the model or adapter that generates.

    An adapter is a name of its own, or belongs to the model that is given. Without either it is
    the first model that generates.

    Args:
        engine: serves the models.
        model: the body's model.
        adapter: the body's adapter, where the route has such a field.
        field: what the body calls the adapter.

    Raises:
        ModelNotFoundError: nothing has this name; names the field.
        InvalidRequestError: the name is an encoder's, or no model generates.
    """
    if adapter is None:
        chosen = engine.get_model(model) if model is not None else engine.first_model()
        return model or chosen.names[0], chosen
    try:
        return adapter, engine.get_model(adapter if model is None else f"{model}:{adapter}")
    except ModelNotFoundError as error:
        error.param = field
        raise


def generator_or_encoder(
    engine: EngineClient, name: str | None, *tasks: Task
) -> GenerationModel | PoolingModel:
    """Return the model of this name, else the first that generates, else the first encoder.

    Args:
        engine: serves the models.
        name: the body's model.
        tasks: an encoder must be able to do one of them.

    Raises:
        ModelNotFoundError: nothing has this name.
        InvalidRequestError: the encoder can do none of the tasks, or there is no encoder.
    """
    if name is None and engine.models():
        return engine.first_model()
    if name is None or engine.encoders.find(name) is not None:
        return engine.encoders.get(name, *tasks)
    return engine.get_model(name)
