"""Uploads of adapters into what the engine takes, and loaded ones into what clients read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlx_parallm.adapters.formats import read_adapter
from mlx_parallm.adapters.safetensors import FLOATS, read_safetensors
from mlx_parallm.api.control.adapters.schema import (
    AdapterCard,
    AdapterFields,
    LoraTensors,
    UploadedAdapter,
    UploadTimings,
)
from mlx_parallm.api.control.serialized import SERIALIZED, take_serialized
from mlx_parallm.api.http.uploads import Received, from_base64, is_json, json_object, validated
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload
from mlx_parallm.types.errors import InvalidRequestError

TENSORS = "tensors"
FILE = "adapter_model"
# Of SGLang: tokens that the base model lacks, and checksums of what was unpickled.
NOT_SERVED = ("added_tokens_config", "expected_checksums")


def read_upload(received: Received) -> tuple[AdapterUpload, AdapterFields, float]:
    """The adapter of a body, its fields, and the milliseconds this took.

    It is long work, for a thread of its own: every number is checked and hashed.

    Raises:
        InvalidRequestError: a field is missing or wrong, the tensors are no safetensors file, or
            not an adapter.
    """
    begin_s = time.perf_counter()
    data: bytes | bytearray = received.body
    fields: dict[str, Any] = dict(received.fields)
    param = FILE
    if is_json(received.kind):
        fields |= json_object(received.body)
        param = TENSORS
        data = from_base64(fields.pop(TENSORS, None), param=TENSORS)
    known = validated(AdapterFields, fields)
    weights = read_adapter(known.config, read_safetensors(data, param=param), param=param)
    # Computed here rather than on the engine thread.
    _ = weights.digest
    upload = AdapterUpload(
        name=known.name,
        weights=weights,
        version=known.version,
        expected_version=known.expected_version,
        replaces=True,
        is_pinned=known.pinned,
    )
    return upload, known, (time.perf_counter() - begin_s) * 1000


def read_serialized(received: Received) -> tuple[AdapterUpload, LoraTensors]:
    """The adapter of SGLang's ``/load_lora_adapter_from_tensors`` and its fields; long work too.

    Raises:
        InvalidRequestError: a field is wrong or asks for what is not served, or the tensors are
            wrong; see ``take_serialized``.
    """
    fields = json_object(received.body)
    tensors = take_serialized(fields, dtypes=FLOATS)
    for name in NOT_SERVED:
        if fields.pop(name, None):
            raise InvalidRequestError(f"{name} is not supported: leave it out.", param=name)
    known = validated(LoraTensors, fields)
    weights = read_adapter(known.config_dict, tensors, param=SERIALIZED)
    _ = weights.digest
    upload = AdapterUpload(
        name=known.lora_name,
        weights=weights,
        version=known.version,
        expected_version=known.expected_version,
        replaces=True,
        is_pinned=known.pinned,
    )
    return upload, known


def card(info: AdapterInfo) -> AdapterCard:
    """A loaded adapter as clients read it."""
    return AdapterCard(**_fields(info))


def uploaded(info: AdapterInfo, received: Received, parse_ms: float) -> UploadedAdapter:
    """An adapter that has just begun to serve."""
    timings = UploadTimings(
        receive_ms=round((received.ended_s - received.began_s) * 1000, 3),
        parse_ms=round(parse_ms, 3),
        live_ms=round((time.perf_counter() - received.ended_s) * 1000, 3),
    )
    return UploadedAdapter(**_fields(info), timings=timings)


def loaded_adapters(infos: Sequence[AdapterInfo]) -> dict[str, str]:
    """SGLang's map of what is loaded."""
    return {info.name: info.source or info.name for info in infos}


def _fields(info: AdapterInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "model": info.model,
        "version": info.version,
        "digest": info.digest,
        "rank": info.rank,
        "bytes": info.num_bytes,
        "created": info.created,
        "source": info.source,
        "pinned": info.is_pinned,
        "resident": info.is_resident,
        "num_running": info.num_running,
    }
