"""Which model a request is for: the one that it names, else the first of its route's kind.

Routes that only some pooling models can serve choose among those beside what they compute:
``scoring_model``, ``reward_model`` and ``moderator``.
"""

from __future__ import annotations

from typing import get_args

from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import RequestClient, TokenizingModel
from mlx_parallm.types.errors import ModelNotFoundError
from mlx_parallm.types.pooling import Task


def generator(
    engine: RequestClient, model: str | None, adapter: str | None = None, *, field: str = "adapter"
) -> tuple[str, GenerationModel]:
    """Return the name for the answer, and the model or adapter that generates.

    An adapter is a name of its own, or belongs to the model that is given. Without either it is
    the first model that generates.

    Args:
        engine: serves the models.
        model: the body's model.
        adapter: the body's adapter, where the route has such a field.
        field: what the body calls the adapter.

    Raises:
        ModelNotFoundError: nothing has this name; names the field.
        InvalidRequestError: the name is a pooling model's, or no model generates.
    """
    if adapter is None:
        chosen = (
            GENERATION.client(engine).get_model(model)
            if model is not None
            else GENERATION.client(engine).first_model()
        )
        return model or chosen.names[0], chosen
    try:
        return adapter, GENERATION.client(engine).get_model(
            adapter if model is None else f"{model}:{adapter}"
        )
    except ModelNotFoundError as error:
        error.param = field
        raise


def tokenizing_model(engine: RequestClient, name: str | None) -> TokenizingModel:
    """Return the model of this name, else the first that generates, else the first pooling model.

    Raises:
        ModelNotFoundError: nothing has this name.
        InvalidRequestError: no model is served that reads tokens.
    """
    return encoder_meant(engine, name, *get_args(Task)) or generator(engine, name)[1]


def encoder_meant(engine: RequestClient, name: str | None, *tasks: Task) -> PoolingModel | None:
    """Return the pooling model of a request; None if it is for a model that generates.

    Without a name, models that generate come first.

    Args:
        engine: serves the models.
        name: the body's model.
        tasks: the model must be able to do one of them.

    Raises:
        ModelLoadingError: the model is loaded for the first time.
        InvalidRequestError: it can do none of the tasks, or nothing is served that could.
    """
    if (
        GENERATION.client(engine).models()
        if name is None
        else POOLING.client(engine).find(name) is None
    ):
        return None
    return POOLING.client(engine).get(name, *tasks)
