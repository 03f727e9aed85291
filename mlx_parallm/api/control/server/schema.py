"""Bodies of the routes about the server itself and the requests in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.engine.status import Readiness

MAX_IDS = 10_000


class LoadResponse(BaseModel):
    """Load of the server."""

    server_load: int = Field(description="Requests in the server, as vLLM counts them.")
    num_running: int = Field(description="Sequences in the batch.")
    num_waiting: int = Field(description="Sequences that wait for a place in it.")


class ReadyResponse(BaseModel):
    """Number of engines that serve."""

    ready: int = Field(description="Engines that get requests.")
    engines: int = Field(description="All engines, those that are started anew included.")
    steps_s: list[float] = Field(
        description="Seconds that the step in flight of each engine has run; 0 without one."
    )


class EngineInfo(BaseModel):
    """One engine and its limits."""

    dp_rank: int = Field(description="Its number, from 0.")
    state: Readiness = Field(description="ready, catching_up, starting or silent, as in /v1/loads.")
    max_running_requests: int = Field(description="Most running sequences of a model.")
    max_total_num_tokens: int = Field(description="Tokens in its KV pools; 0 if it is starting.")


class AbortRequests(NullIsAbsent):
    """vLLM's body of ``/abort_requests``."""

    request_ids: list[StrictStr] = Field(
        min_length=1, max_length=MAX_IDS, description="Ids of answers, or their request_id."
    )


class AbortRequest(NullIsAbsent):
    """SGLang's body of ``/abort_request``."""

    rid: StrictStr | None = Field(None, description="An id, as in /abort_requests.")
    abort_all: StrictBool = Field(False, description="All requests that the caller may reach.")


class AbortResponse(BaseModel):
    """The requests that were aborted; some may have ended just before."""

    aborted: list[str] = Field(description="Ids of the aborted answers.")


class ModelInfo(BaseModel):
    """The first model, in SGLang's form; without what a model of its kind does not have."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str | None = Field(default=None, description="Hub id or folder.")
    tokenizer_path: str | None = Field(default=None, description="The same, if it reads tokens.")
    served_model_name: str | None = Field(default=None, description="Its first name.")
    weight_version: str | None = Field(default=None, description="Label of its weights now.")
    load_format: str = Field(default="safetensors", description="Always safetensors.")
    is_generation: bool = Field(description="True if it generates text.")
    context_length: int | None = Field(
        default=None, description="Most tokens of prompt and output together, if it reads tokens."
    )


class ServerInfo(ModelInfo):
    """The server, its settings without keys, and its models."""

    version: str = Field(description="Of this server.")
    vllm_config: dict[str, Any] | str = Field(description="The settings; a text on request.")
    vllm_env: dict[str, Any] = Field(default_factory=dict, description="Always empty.")
    system_env: dict[str, Any] = Field(default_factory=dict, description="Always empty.")
    tp_size: int = Field(description="Ranks that compute one model together.")
    dp_size: int = Field(description="Engines.")
    pp_size: int = Field(default=1, description="Always 1.")
    ep_size: int = Field(default=1, description="Always 1.")
    dtype: str | None = Field(
        default=None, description="The first model's dtype, if it reads tokens."
    )
    max_loras_per_batch: int = Field(description="Most adapters in one batch.")
    max_lora_rank: int = Field(description="Largest rank of an adapter.")
    lora_paths: dict[str, str] = Field(description="Loaded adapters: folder, or name, by name.")
    is_paused: bool = Field(description="True if generation is paused.")
    is_sleeping: bool = Field(description="True if memory is released.")
    max_running_requests: int = Field(
        description="Most running sequences of a model, in all engines together."
    )
    max_total_num_tokens: int = Field(description="Tokens in the KV pools of all engines.")
    api_server_count: int = Field(description="Processes that speak HTTP.")
    engines: list[EngineInfo] = Field(description="Each engine.")
    models: list[dict[str, Any]] = Field(description="Facts about each model.")
