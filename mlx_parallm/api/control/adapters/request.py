"""From uploads to adapters of the engine, and from loaded adapters to answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import FLOATS, read_safetensors
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.api.control.adapters.schema import (
    AdapterCard,
    AdapterFields,
    LoraTensors,
    UploadedAdapter,
)
from mlx_parallm.api.control.tensors import SERIALIZED, UploadTimings, take_serialized, unpacked
from mlx_parallm.api.http.uploads import Received, json_object, validated
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.errors import InvalidRequestError, NotImplementedRouteError

FILE = "adapter_model"
# NOT_SERVED: SGLang's fields for tokens that the base model lacks, and for checksums of pickles.
NOT_SERVED = ("added_tokens_config", "expected_checksums")


def read_upload(received: Received) -> tuple[AdapterUpload, AdapterFields]:
    """Return the adapter of a body, and its fields.

    It takes long, so it runs on a thread of its own: every number is checked and hashed.

    Raises:
        InvalidRequestError: a field is missing or wrong, the tensors are no safetensors file, or
            not an adapter.
    """
    fields, data, param = unpacked(received, FILE)
    known = validated(AdapterFields, fields)
    weights = read_adapter(known.config, read_safetensors(data or b"", param=param), param=param)
    return _upload(known.name, weights, known), known


def read_serialized(received: Received) -> tuple[AdapterUpload, LoraTensors]:
    """Return the adapter of SGLang's ``/load_lora_adapter_from_tensors``.

    It takes as long as ``read_upload``.

    Raises:
        InvalidRequestError: a field is wrong or not supported, or the tensors are wrong; see
            ``take_serialized``.
    """
    fields = json_object(received.body)
    tensors = take_serialized(fields, dtypes=FLOATS)
    for name in NOT_SERVED:
        if fields.pop(name, None):
            raise InvalidRequestError(f"{name} is not supported: leave it out.", param=name)
    known = validated(LoraTensors, fields)
    weights = read_adapter(known.config_dict, tensors, param=SERIALIZED)
    return _upload(known.lora_name, weights, known), known


def _upload(
    name: str, weights: AdapterWeights, fields: AdapterFields | LoraTensors
) -> AdapterUpload:
    # The digest is computed here, so that the engine thread need not do it.
    _ = weights.digest
    return AdapterUpload(
        name=name,
        weights=weights,
        version=fields.version,
        expected_version=fields.expected_version,
        replaces=True,
        is_pinned=fields.pinned,
    )


def refuse_3d_weights(is_3d: bool) -> None:
    """Raise NotImplementedRouteError if an adapter has its experts in vLLM's 3D form."""
    if is_3d:
        raise NotImplementedRouteError(
            "is_3d_lora_weight is not supported: save experts as PEFT or mlx-lm write them."
        )


def card(info: AdapterInfo) -> AdapterCard:
    """Return the description of a loaded adapter."""
    return AdapterCard.model_validate(asdict(info))


def uploaded(info: AdapterInfo, timings: UploadTimings) -> UploadedAdapter:
    """Return the description of an adapter that was just uploaded."""
    return UploadedAdapter.model_validate({**asdict(info), "timings": timings})


def loaded_adapters(infos: Sequence[AdapterInfo]) -> dict[str, str]:
    """Return the loaded adapters in SGLang's form."""
    return {info.name: info.source or info.name for info in infos}
