"""From bodies with weights to the engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_parallm.adapters.safetensors import MODEL_DTYPES, read_safetensors
from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.api.control.tensors import take_serialized, unpacked
from mlx_parallm.api.control.weights.schema import CheckedWeights, TensorFields, UpdateFields
from mlx_parallm.api.http.uploads import Received, is_json, json_object, validated
from mlx_parallm.types.errors import InvalidRequestError, NotImplementedRouteError

FILE = "weights"
NO_TRANSFER = (
    "{what} is not served: tensors do not come by NCCL or CUDA IPC here. Send them as a "
    "safetensors body to /update_weights (an adapter's to /v1/update_adapter_weights), or name "
    "a folder."
)


def read_update(received: Received) -> tuple[UpdateFields, dict[str, HostTensor] | None]:
    """Return fields and tensors of ``/update_weights``; None for tensors if it names a folder.

    It takes long, so it runs on a thread of its own.

    Raises:
        NotImplementedRouteError: the body announces tensors that would come another way.
        InvalidRequestError: a field is wrong, the tensors are no safetensors file, or there are
            neither tensors nor a folder.
    """
    fields, data, param = unpacked(received, FILE, needs_file=False)
    if is_json(received.kind) and "update_info" in fields:
        raise NotImplementedRouteError(NO_TRANSFER.format(what="update_info"))
    known = validated(UpdateFields, fields)
    if (data is None) == (known.weight_dir is None):
        raise InvalidRequestError(
            "Give either tensors or weight_dir, not both.", param="weight_dir"
        )
    if data is None:
        return known, None
    return known, read_safetensors(data, param=param, dtypes=MODEL_DTYPES)


def read_serialized(received: Received) -> tuple[TensorFields, dict[str, HostTensor]]:
    """Return fields and tensors of SGLang's ``/update_weights_from_tensor``; see ``read_update``.

    Raises:
        InvalidRequestError: a field is wrong, or the tensors are; see ``take_serialized``.
    """
    fields = json_object(received.body)
    tensors = take_serialized(fields, dtypes=MODEL_DTYPES)
    return validated(TensorFields, fields), tensors


def checksums(by_name: dict[str, str]) -> CheckedWeights:
    """Return the answer with each tensor's checksum."""
    return CheckedWeights(message=f"{len(by_name)} tensors.", checksums=by_name)


def compared(current: Mapping[str, str], baseline: Mapping[str, str]) -> CheckedWeights:
    """Return the answer with the tensors that differ from the baseline."""
    names = sorted(current.keys() | baseline.keys())
    other = [name for name in names if current.get(name) != baseline.get(name)]
    message = f"{len(other)} of {len(names)} tensors differ."
    return CheckedWeights(message=message, match=not other, mismatches=other)
