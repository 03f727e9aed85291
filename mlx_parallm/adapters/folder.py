"""Adapters in a local folder."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

CONFIG_NAME = "adapter_config.json"
#: ``WEIGHTS_NAMES``: the file names of PEFT and of mlx-lm.
WEIGHTS_NAMES = ("adapter_model.safetensors", "adapters.safetensors")
#: ``CHECKPOINT_FILES``: the files of a whole model: its weights, or the index of these.
CHECKPOINT_FILES = "model*.safetensors*"


def is_adapter_folder(path: Path) -> bool:
    """True if a folder has an adapter and no whole checkpoint."""
    return (path / CONFIG_NAME).is_file() and not any(path.glob(CHECKPOINT_FILES))


def read_adapter_folder(path: Path, *, param: str) -> AdapterWeights:
    """Return the adapter that PEFT or mlx-lm wrote into a folder.

    Raises:
        InvalidRequestError: the folder has no adapter, or one that cannot be used.
    """
    try:
        config = json.loads((path / CONFIG_NAME).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{path} has no readable {CONFIG_NAME}: {error}", param=param
        ) from None
    if not is_object(config):
        raise InvalidRequestError(f"{path / CONFIG_NAME} must be a JSON object.", param=param)
    weights_file = next((path / name for name in WEIGHTS_NAMES if (path / name).is_file()), None)
    if weights_file is None:
        raise InvalidRequestError(
            f"{path} has no {' or '.join(WEIGHTS_NAMES)}; other formats are not supported.",
            param=param,
        )
    return read_adapter(
        config, read_safetensors(weights_file.read_bytes(), param=param), param=param
    )
