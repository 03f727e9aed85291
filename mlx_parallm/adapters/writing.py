"""Writes adapters as PEFT and mlx-lm read them; see ``formats`` for their names."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.errors import InvalidRequestError

Format = Literal["peft", "mlx"]
CONFIG = "adapter_config.json"
# PEFT_HEADS: modules that PEFT saves whole with every classifier. It refuses adapters that name a
# layer in them.
PEFT_HEADS = ("classifier", "score")
# TIME: of files in an archive, so that equal adapters give equal archives.
TIME = (1980, 1, 1, 0, 0, 0)


def adapter_archive(adapter: AdapterWeights, form: Format) -> bytes:
    """Return a zip archive of an adapter's files."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as files:
        for name, content in adapter_files(adapter, form).items():
            files.writestr(zipfile.ZipInfo(name, TIME), content)
    return archive.getvalue()


def adapter_files(adapter: AdapterWeights, form: Format) -> Mapping[str, bytes]:
    """Return the files of a LoRA of linear layers, perhaps with a head, by name.

    All modules have the same rank and scale. PEFT's format takes changes of the checkpoint's
    weights, mlx-lm's those of the model's.

    Raises:
        InvalidRequestError: the format has no place for a head.
    """
    if adapter.saved and form == "mlx":
        raise InvalidRequestError(
            "mlx-lm's format has no place for the head of this adapter; PEFT's has.", param="format"
        )
    assert adapter.of_checkpoint is (form == "peft"), "the changes are of other weights"
    scales = {module.scale for module in adapter.modules.values()}
    assert len(scales) == 1, "one session has one scale"
    (scale,) = scales
    config, tensors = _peft(adapter, scale) if form == "peft" else _mlx(adapter, scale)
    name = "adapter_model.safetensors" if form == "peft" else "adapters.safetensors"
    metadata = {"format": "pt"} if form == "peft" else {"format": "mlx"}
    return {
        CONFIG: json.dumps(config, indent=2).encode() + b"\n",
        name: save(tensors, metadata=metadata),
    }


def _peft(adapter: AdapterWeights, scale: float) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    tensors: dict[str, NDArray[Any]] = {}
    for path, module in adapter.modules.items():
        prefix = f"base_model.model.{path}"
        tensors[f"{prefix}.lora_A.weight"] = _float32(module.a)
        tensors[f"{prefix}.lora_B.weight"] = _float32(module.b)
    for name, tensor in adapter.saved.items():
        tensors[f"base_model.model.{name}"] = _float32(tensor)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": scale * adapter.rank,
        "target_modules": sorted(adapter.modules),
        "lora_dropout": 0.0,
        "fan_in_fan_out": adapter.is_transposed,
        "bias": "none",
        "task_type": adapter.task_type,
    }
    if adapter.saved:
        config["modules_to_save"] = sorted(set(map(_module_to_save, adapter.saved)))
    return config, tensors


def _module_to_save(name: str) -> str:
    """Return the module to be named for a parameter of a head: its layer, if that may be.

    More than the layer would be replaced by what is no part of the adapter: the trunk, for a pooler
    in it.
    """
    head = name.partition(".")[0]
    return head if head in PEFT_HEADS else name.rpartition(".")[0]


def _mlx(adapter: AdapterWeights, scale: float) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    tensors: dict[str, NDArray[Any]] = {}
    for path, module in adapter.modules.items():
        tensors[f"{path}.lora_a"] = _float32(module.a.transposed())
        tensors[f"{path}.lora_b"] = _float32(module.b.transposed())
    parameters = {"rank": adapter.rank, "scale": scale, "dropout": 0.0}
    keys = sorted(adapter.modules)
    config = {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {**parameters, "keys": keys},
    }
    return config, tensors


def _float32(tensor: HostTensor) -> NDArray[Any]:
    assert not tensor.is_bfloat16, "what is trained is float32"
    return np.ascontiguousarray(tensor.array, np.float32)
