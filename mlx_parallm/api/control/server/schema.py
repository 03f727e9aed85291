"""Bodies of the routes about the server itself and the requests in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from mlx_parallm.api.http.forms import NullIsAbsent

MAX_IDS = 10_000


class LoadResponse(BaseModel):
    """How busy the server is."""

    server_load: int = Field(description="Requests in the server, as vLLM counts them.")
    num_running: int = Field(description="Sequences in the batch.")
    num_waiting: int = Field(description="Sequences that wait for a place in it.")


class AbortRequests(NullIsAbsent):
    """vLLM's body of ``/abort_requests``."""

    request_ids: list[StrictStr] = Field(
        min_length=1, max_length=MAX_IDS, description="Ids of answers, or the request_id sent."
    )


class AbortRequest(NullIsAbsent):
    """SGLang's body of ``/abort_request``."""

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
    weight_version: str = Field(description="Label of the tokens that its weights make now.")
    load_format: str = Field("safetensors", description="Always safetensors.")
    is_generation: bool = Field(description="Whether it generates text.")
    context_length: int = Field(description="Tokens of prompt and output together, at most.")


class ServerInfo(ModelInfo):
    """The server, its settings without keys, and its models."""

    version: str = Field(description="Of this server.")
    vllm_config: dict[str, Any] | str = Field(description="The settings; a text on request.")
    vllm_env: dict[str, Any] = Field(default_factory=dict, description="Always empty.")
    system_env: dict[str, Any] = Field(default_factory=dict, description="Always empty.")
    tp_size: int = Field(1, description="Always 1, as the other sizes.")
    dp_size: int = Field(1, description="Always 1.")
    pp_size: int = Field(1, description="Always 1.")
    ep_size: int = Field(1, description="Always 1.")
    dtype: str = Field(description="That the first model computes in.")
    max_loras_per_batch: int = Field(description="Adapters in one batch, at most.")
    max_lora_rank: int = Field(description="Largest rank of an adapter.")
    lora_paths: dict[str, str] = Field(description="Loaded adapters: folder, or name, by name.")
    is_paused: bool = Field(description="Whether nothing is generated.")
    is_sleeping: bool = Field(description="Whether memory is given back.")
    max_running_requests: int = Field(description="Sequences of a model running at once.")
    max_total_num_tokens: int = Field(description="Tokens that the first model's KV pool holds.")
    models: list[dict[str, Any]] = Field(description="What was found out about each model.")
