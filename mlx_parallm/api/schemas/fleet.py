"""Answers to routers and launchers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Load(BaseModel):
    """How busy this server is, in SGLang's names."""

    dp_rank: int = Field(0, description="Always 0.")
    num_running_reqs: int = Field(description="Sequences in the batch.")
    num_waiting_reqs: int = Field(description="Sequences that wait for a place in it.")
    num_total_reqs: int = Field(description="Both.")
    max_total_num_tokens: int = Field(description="Tokens that the KV pool holds.")
    max_running_requests: int = Field(description="Sequences running at once, at most.")


class Loads(BaseModel):
    """SGLang's answer of ``/v1/loads``."""

    timestamp: str = Field(description="ISO 8601.")
    version: str = Field(description="Of this server.")
    loads: list[Load] = Field(description="One entry.")
    aggregate: dict[str, Any] = Field(description="The same summed up.")


class WorldSize(BaseModel):
    """How many processes compute a model."""

    world_size: int = Field(1, description="Always 1.")


class Worker(BaseModel):
    """This server, as a router tells of it."""

    id: str = Field(description="Its address.")
    url: str = Field(description="Its address.")
    model_id: str = Field(description="The first model.")
    worker_type: str = Field("regular", description="Always regular.")
    is_healthy: bool = Field(True, description="Always true.")


class Workers(BaseModel):
    """The answer of a router with one worker: this server itself."""

    workers: list[Worker] = Field(description="One entry.")
    total: int = Field(1, description="Always 1.")
