"""Compares weights and the KV of one context with the memory that is free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_parallm.cli.server_client import ServerClient
from mlx_parallm.client.errors import ClientError
from mlx_parallm.models.checkpoints.decoder_sizes import (
    DEFAULT_MAX_MODEL_LEN,
    context_length,
    kv_bytes_per_token,
)
from mlx_parallm.types.json_values import is_list, is_object
from mlx_parallm.units import readable_bytes

#: ``GENERATORS``: endings of the names of classes whose models keep KV.
GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a model takes.

    Attributes:
        weights: bytes of its weight files.
        kv: bytes of one context's KV, 0 for a model without; None if unknown.
        context: tokens of that context.
    """

    weights: int
    kv: int | None
    context: int

    @classmethod
    def of(cls, config: Mapping[str, Any], weights: int, max_model_len: int | None) -> Need:
        """Return the need of a model by its config.json and the size of its weights."""
        context = max_model_len or context_length(dict(config)) or DEFAULT_MAX_MODEL_LEN
        names = config.get("architectures")
        if is_list(names) and names and not str(names[0]).endswith(GENERATORS):
            return cls(weights, 0, context)
        per_token = kv_bytes_per_token(config)
        return cls(weights, None if per_token is None else per_token * context, context)

    @property
    def total(self) -> int:
        """Return the bytes of both; unknown KV counts as none."""
        return self.weights + (self.kv or 0)

    def __str__(self) -> str:
        weights = f"weights {readable_bytes(self.weights)}"
        if self.kv == 0:
            return weights
        kv = "unknown" if self.kv is None else readable_bytes(self.kv)
        return f"{weights} + KV of one context ({self.context:,} tokens) {kv}"


@dataclass(frozen=True, slots=True)
class Room:
    """Free memory; ``num_bytes`` is None if unknown, and ``where`` says whose it is."""

    num_bytes: int | None
    where: str


def verdict(need: Need, room: Room) -> str:
    """Return a line that says whether a model fits, and how it is computed."""
    if room.num_bytes is None:
        return f"memory: {need}; the free memory of {room.where} is unknown"
    answer = "does not fit"
    if need.total <= room.num_bytes:
        answer = "the weights fit" if need.kv is None else "fits"
    free = f"{room.where} has {readable_bytes(room.num_bytes)} free"
    return f"{answer}: {need} = {readable_bytes(need.total)}; {free}"


def free_memory(server: ServerClient) -> Room:
    """Return what a running server may still promise; without one, what this machine has."""
    try:
        ledger = server.ask("GET", "/v1/memory")
    except ClientError:
        return _machine()
    free = ledger.get("free_bytes") if is_object(ledger) else None
    if isinstance(free, int):
        return Room(free, server.url)
    # A server knows its limit with the first load.
    return _machine() if server.is_here else Room(None, server.url)


def _machine() -> Room:
    # MLX, which says what a GPU has free, is imported only if it is needed.
    from mlx_parallm.worker.device.properties import free_memory_bytes  # noqa: PLC0415

    return Room(free_memory_bytes(), "this machine")
