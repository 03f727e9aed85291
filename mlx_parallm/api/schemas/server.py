"""Bodies of the routes about the server itself and the requests in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from mlx_parallm.api.schemas.common import NullIsAbsent

MAX_IDS = 10_000


class LoadResponse(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="Requests in the server, as vLLM counts them.")
    num_running: int = Field(description="Sequences in the batch.")
    num_waiting: int = Field(description="Sequences that wait for a place in it.")


class AbortRequests(NullIsAbsent):
    """vLLM's body of ``/abort_requests``."""

    model_config = ConfigDict(extra="ignore")

    request_ids: list[StrictStr] = Field(
        min_length=1, max_length=MAX_IDS, description="Ids of answers, or the request_id sent."
    )


class AbortRequest(NullIsAbsent):
    """SGLang's body of ``/abort_request``."""

    model_config = ConfigDict(extra="ignore")

    rid: StrictStr | None = Field(None, description="As an id of /abort_requests.")
    abort_all: StrictBool = Field(False, description="Every request that the caller may reach.")


class AbortResponse(BaseModel):
    """What was told to end; a request that has just ended may be among it."""

    aborted: list[str] = Field(description="Ids of the answers that end early.")


class ModelInfo(BaseModel):
    """What is served first, in SGLang's names."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str = Field(description="Hub id or folder.")
    tokenizer_path: str = Field(description="The same.")
    served_model_name: str = Field(description="Its first name.")
    is_generation: bool = Field(description="Whether it generates text.")
    context_length: int = Field(description="Tokens of prompt and output together, at most.")


class ServerInfo(ModelInfo):
    """The server, its settings without keys, and its models."""

    version: str = Field(description="Of this server.")
    vllm_config: dict[str, Any] | str = Field(description="The settings; a text on request.")
    max_running_requests: int = Field(description="Sequences of a model running at once.")
    max_total_num_tokens: int = Field(description="Tokens that the first model's KV pool holds.")
    models: list[dict[str, Any]] = Field(description="What was found out about each model.")
