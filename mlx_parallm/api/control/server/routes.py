"""``GET /server_info`` and ``/model_info``, with fields of vLLM and SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, Literal

from fastapi import Request

from mlx_parallm import __version__
from mlx_parallm.api.control.server.schema import EngineInfo, ModelInfo, ServerInfo
from mlx_parallm.api.control.weights.adapters import loaded_adapters
from mlx_parallm.api.http.auth import has_admin_key, is_foreign
from mlx_parallm.api.http.dependencies import ConfigDep, EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.models import ServedModel
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.json_values import is_object

routes = Routes(SERVER)

# SECRETS: the holder of one key must not see the others.
SECRETS = frozenset({"api_keys", "admin_api_keys", "verifier_urls", "key", "peer_key", "server_id"})
# FILES, ADDRESSES: only those who may change the server see where it keeps the files of all keys,
# and which other machines it asks.
FILES = frozenset({"data_dir", "kv_disk", "peer_key_file"})
ADDRESSES = frozenset({"urls", "prefill_url", "peers", "peer_url", "engines"})
ADMIN_ONLY = FILES | ADDRESSES


@routes.get("/server_info", response_model_exclude_none=True)
@routes.get("/get_server_info", include_in_schema=False, response_model_exclude_none=True)
async def server_info(
    request: Request,
    engine: EngineDep,
    config: ConfigDep,
    config_format: Literal["json", "text"] = "json",
) -> ServerInfo:
    """Return version, settings and models; keys are left out."""
    first = first_model(engine)
    is_admin = has_admin_key(request) and not is_foreign(request.headers)
    hidden = SECRETS if is_admin else SECRETS | ADMIN_ONLY
    # An engine that hangs delays both by the same seconds.
    engines, models = await asyncio.gather(_engines(engine), _models(engine))
    known = settings(engine.config, config, hidden)
    known |= vllm_groups(first, engine.config, len(engines))
    return ServerInfo(
        **_model_info(engine, first).model_dump(),
        version=__version__,
        vllm_config=known if config_format == "json" else as_text(known),
        dtype=None if first is None or first.info is None else first.info.dtype,
        max_loras_per_batch=engine.config.scheduler.max_loras,
        max_lora_rank=engine.config.adapters.max_rank,
        lora_paths=loaded_adapters(engine.control.adapters()),
        is_paused=engine.control.is_paused,
        is_sleeping=engine.control.sleep_level > 0,
        tp_size=engine.config.ranks.size,
        dp_size=len(engines),
        api_server_count=config.api_server_count,
        max_running_requests=sum(each.max_running_requests for each in engines),
        max_total_num_tokens=sum(each.max_total_num_tokens for each in engines),
        engines=engines,
        models=models,
    )


async def _engines(engine: EngineClient) -> list[EngineInfo]:
    """Return the limits of each engine."""
    return [
        EngineInfo(
            dp_rank=report.rank,
            state=report.readiness,
            max_running_requests=engine.config.scheduler.max_num_seqs,
            max_total_num_tokens=report.load.num_kv_tokens,
        )
        for report in await engine.engines()
    ]


async def _models(engine: EngineClient) -> list[dict[str, Any]]:
    """Return the facts of each model; pooling models last, and few of unloaded ones."""
    memory = await engine.memory()
    return [
        {"names": list(each.names), "root": each.model.root if each.model else each.root}
        | (each.model.facts() if each.model else {})
        | {"memory": asdict(memory[each.names[0]])}
        for each in engine.statuses()
    ]


@routes.get("/model_info", response_model_exclude_none=True)
@routes.get("/get_model_info", include_in_schema=False, response_model_exclude_none=True)
async def model_info(engine: EngineDep) -> ModelInfo:
    """Describe the first model that generates, or the first one if none does."""
    return _model_info(engine, first_model(engine))


def first_model(engine: EngineClient) -> ServedModel | None:
    """Return the first model that generates, or else the first that was loaded, if any was."""
    loaded = [status.model for status in engine.statuses() if status.model is not None]
    return next(iter(GENERATION.client(engine).models()), next(iter(loaded), None))


def _model_info(engine: EngineClient, model: ServedModel | None) -> ModelInfo:
    if model is None:
        return ModelInfo(is_generation=False)
    return ModelInfo(
        weight_version=engine.control.version(model.names[0]).label,
        model_path=model.root,
        tokenizer_path=None if model.max_len is None else model.root,
        served_model_name=model.names[0],
        is_generation=isinstance(model, GenerationModel),
        context_length=model.max_len,
    )


def vllm_groups(
    model: ServedModel | None, config: EngineConfig, num_engines: int
) -> dict[str, Any]:
    """Return the groups of vLLM's configuration that clients read, with this server's values.

    Those of the model and the KV pool have the facts that a model of its kind has.
    """
    return {
        "model_config": _model_config(model) | {"logprobs_mode": config.logprobs_mode},
        "lora_config": {
            "max_lora_rank": config.adapters.max_rank,
            "max_loras": config.scheduler.max_loras,
            "max_cpu_loras": config.adapters.max_loaded,
        },
        "parallel_config": {
            "data_parallel_size": num_engines,
            "tensor_parallel_size": config.ranks.size,
            "pipeline_parallel_size": 1,
            "world_size": config.ranks.size,
        },
        "cache_config": _pool_config(model)
        | {"enable_prefix_caching": config.cache.enable_prefix_caching},
        "weight_transfer_config": None,
    }


def _model_config(model: ServedModel | None) -> dict[str, Any]:
    if model is None:
        return {}
    known: dict[str, Any] = {"model": model.root, "served_model_name": list(model.names)}
    if model.info is not None:
        # Clients look up PyTorch's name of the dtype.
        known |= {"dtype": f"torch.{model.info.dtype}", "max_model_len": model.max_len}
    return known


def _pool_config(model: ServedModel | None) -> dict[str, Any]:
    if not isinstance(model, GenerationModel):
        return {}
    return {"block_size": model.info.block_size, "num_gpu_blocks": model.info.num_blocks}


def settings(engine: EngineConfig, server: ServerConfig, hidden: Collection[str]) -> dict[str, Any]:
    """Return all settings as JSON, without the hidden ones of any part."""
    known = asdict(engine) | {"server": asdict(server)}
    return {
        part: {name: each for name, each in value.items() if name not in hidden}
        if is_object(value)
        else value
        for part, value in known.items()
    }


def as_text(known: dict[str, Any], prefix: str = "") -> str:
    """Return a line per setting, ``part.name=value``."""
    lines = [
        as_text(value, f"{prefix}{name}.") if is_object(value) else f"{prefix}{name}={value}"
        for name, value in known.items()
    ]
    return "\n".join(lines)
