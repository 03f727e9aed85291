"""SGLang's lists of tensors in a JSON body, of which only safetensors files are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mlx_parallm.adapters.safetensors import read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.api.http.uploads import from_base64
from mlx_parallm.types.errors import InvalidRequestError

SERIALIZED = "serialized_named_tensors"
FORMAT = "load_format"
SAFETENSORS = "safetensors"


def take_serialized(fields: dict[str, Any], *, dtypes: Collection[str]) -> dict[str, HostTensor]:
    """Take the tensors out of a body: those of all its entries, by name.

    Args:
        fields: of the body.
        dtypes: that they may have, by the format's names.

    Raises:
        InvalidRequestError: they are in another format, which could only be unpickled; an entry is
            no such file; or a name occurs twice.
    """
    if fields.get(FORMAT) != SAFETENSORS:
        raise InvalidRequestError(
            f"{FORMAT} must be {SAFETENSORS!r}, with safetensors files in base64 as "
            f"{SERIALIZED}: other formats are pickles, and nothing is unpickled here.",
            param=FORMAT,
        )
    entries = fields.pop(SERIALIZED, None)
    if not isinstance(entries, list) or not entries:
        raise InvalidRequestError(f"{SERIALIZED} must be a list.", param=SERIALIZED)
    tensors: dict[str, HostTensor] = {}
    for number, entry in enumerate(entries):
        data = from_base64(entry, param=f"{SERIALIZED}[{number}]")
        found = read_safetensors(data, param=SERIALIZED, dtypes=dtypes)
        if twice := found.keys() & tensors.keys():
            raise InvalidRequestError(f"{min(twice)[:100]!r} comes twice.", param=SERIALIZED)
        tensors |= found
    return tensors
