"""Answers to routers and launchers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StrictStr

from mlx_parallm.api.control.adapters.schema import MAX_PATH_CHARS
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.engine.status import Readiness


class Load(BaseModel):
    """How busy one engine is, in SGLang's names."""

    dp_rank: int = Field(description="The engine's number, from 0.")
    state: Readiness = Field(
        description="ready; catching_up: loaded, and applying earlier changes of weights and "
        "adapters; starting: dead or loading, and its other values are 0; silent: its process "
        "does not answer, and is killed if that goes on."
    )
    num_running_reqs: int = Field(description="Sequences in the batch.")
    num_waiting_reqs: int = Field(description="Sequences that wait for a place in it.")
    num_total_reqs: int = Field(description="Both.")
    num_waiting_tokens: int = Field(description="Tokens of the prompts that wait.")
    num_used_tokens: int = Field(description="Tokens that the KV blocks in use have room for.")
    max_total_num_tokens: int = Field(description="Tokens that its KV pools hold.")
    token_usage: float = Field(description="Used tokens over all tokens, 0 to 1.")
    max_running_requests: int = Field(description="Sequences of a model running at once, at most.")


class Loads(BaseModel):
    """SGLang's answer of ``/v1/loads``."""

    timestamp: str = Field(description="ISO 8601.")
    version: str = Field(description="Of this server.")
    loads: list[Load] = Field(description="One entry for each engine.")
    aggregate: dict[str, Any] = Field(description="The same summed up.")


class WorldSize(BaseModel):
    """How many devices compute."""

    world_size: int = Field(description="Devices: the ranks of each engine.")


class Worker(BaseModel):
    """This server, as a router lists it."""

    id: str = Field(description="Its address.")
    url: str = Field(description="Its address.")
    model_id: str = Field(description="The first model.")
    worker_type: str = Field(default="regular", description="Always regular.")
    is_healthy: bool = Field(default=True, description="Always true.")


class NewWorker(OpenForm):
    """The body that adds a server to a router."""

    url: Annotated[StrictStr, Field(min_length=1, max_length=MAX_PATH_CHARS)] = Field(
        description="This server's own address."
    )
    worker_type: Literal["regular"] = Field(
        "regular", description="Prefill and decode are not separated here."
    )


class AddedWorker(BaseModel):
    """The worker that was added."""

    status: str = Field(default="accepted", description="Always accepted.")
    worker_id: str = Field(description="The id in /workers.")
    url: str = Field(description="Its address.")


class Workers(BaseModel):
    """The list of a router with one worker: this server itself."""

    workers: list[Worker] = Field(description="One entry.")
    total: int = Field(default=1, description="Always 1.")
