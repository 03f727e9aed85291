"""A net as its clients see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import override

from mlx_parallm.engine.models import KindTraits, ModelMemory, ServedModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.nets import NetRequest, NetSignature

NET_TRAITS = KindTraits(
    name="net",
    can_change=True,
    refuses_adapters="is a net: nets take whole weights, by POST /update_weights.",
    refuses_other="is a net: it answers /v1/predict and, if it is a policy, /v1/rl/act "
    "(docs/nets.md).",
)
#: ``ACT``, ``PREDICT``: the names of what requests may want of a net.
ACT, PREDICT = "act", "predict"


@dataclass(frozen=True, slots=True, kw_only=True)
class NetModel(ServedModel):
    """A loaded net; see ``ServedModel`` for the shared fields.

    Attributes:
        names: the names that requests may use; the first is the one reported.
        root: the folder it comes from.
        created: when it was loaded, in Unix seconds.
        signature: the tensors that it reads and returns.
        weight_bytes: memory of its weights.
        max_rows: most rows of a request.
    """

    names: tuple[str, ...]
    root: str
    created: int
    signature: NetSignature
    weight_bytes: int
    max_rows: int

    traits = NET_TRAITS

    @property
    @override
    def memory(self) -> ModelMemory:
        return ModelMemory(weights=self.weight_bytes)

    @override
    def facts(self) -> Mapping[str, Any]:
        return self.card()

    @override
    def card(self) -> Mapping[str, Any]:
        return {"signature": asdict(self.signature)}

    @override
    def check(self, request: NetRequest) -> None:
        if not 0 < request.num_rows <= self.max_rows:
            raise InvalidRequestError(
                f"The request has {request.num_rows} rows; a request has 1 to {self.max_rows}."
            )

    @property
    @override
    def tasks(self) -> Sequence[str]:
        return (PREDICT,) if self.signature.policy is None else (ACT, PREDICT)

    @property
    @override
    def input_modalities(self) -> Sequence[str]:
        return ("tensor",)
