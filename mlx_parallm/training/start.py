"""The parameters that a session starts from, where they are not drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from mlx_parallm.adapters.tensors import HostTensor
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.errors import InvalidRequestError

# SECOND, HEAD: what the names of second factors and of a head's parameters begin with in files.
SECOND, HEAD = "second ", "head "

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class StartParameters:
    """The first values of an adapter, float32.

    Attributes:
        first: the first factors by path, ``[rank, inputs]``.
        second: the second factors by path, ``[rank, outputs]``; empty: zeros.
        head: the parameters of a trained head by name; empty: the model's own.
    """

    first: Arrays
    second: Arrays = field(default_factory=dict[str, np.ndarray])
    head: Arrays = field(default_factory=dict[str, np.ndarray])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays by the names that they have in files."""
        second = {SECOND + path: array for path, array in self.second.items()}
        return {**self.first, **second, **{HEAD + name: array for name, array in self.head.items()}}

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> Self:
        """Return what ``arrays`` was made of."""
        first = {name: array for name, array in arrays.items() if " " not in name}
        return cls(first, _without(SECOND, arrays), _without(HEAD, arrays))

    @classmethod
    def of_adapter(cls, adapter: AdapterWeights) -> Self:
        """Return the parameters of an adapter.

        Raises:
            InvalidRequestError: it is more than a LoRA of linear layers with one rank and scale.
        """
        modules = adapter.modules
        for path, module in modules.items():
            if module.magnitude is not None:
                raise _unfit("it is a DoRA, and a session trains a LoRA")
            if module.kind != "linear":
                raise _unfit(f"{path[:100]} is no linear layer")
        if len({(module.rank, module.scale) for module in modules.values()}) > 1:
            raise _unfit("its layers have several ranks or scales")
        if adapter.saved and adapter.task_type == "TOKEN_CLS":
            raise _unfit("its head is one of tokens")
        return cls(
            {path: _float32(module.a) for path, module in modules.items()},
            {path: _float32(module.b.transposed()) for path, module in modules.items()},
            {name: _float32(tensor) for name, tensor in adapter.saved.items()},
        )


def _without(prefix: str, arrays: Arrays) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _float32(tensor: HostTensor) -> np.ndarray:
    array = tensor.array
    if tensor.is_bfloat16:
        return np.ascontiguousarray((array.astype(np.uint32) << 16).view(np.float32))
    return np.ascontiguousarray(array, np.float32)


def _unfit(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"A session cannot start from this adapter: {why}.", param="adapter")
