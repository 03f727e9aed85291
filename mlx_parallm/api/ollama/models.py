"""The models that are served, as Ollama describes them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, Protocol

from mlx_parallm.api.completions.infill import infill_format
from mlx_parallm.api.ollama.answer import timestamp
from mlx_parallm.engine.status import ModelState, ModelStatus
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError

LATEST = ":latest"
#: ``ARCHITECTURE``: the prefix of a model's facts, where Ollama has that of its GGUF file.
ARCHITECTURE = "mlx"
# FOREVER: the time at which what stays in memory for ever leaves it; Ollama's own is as far away.
FOREVER = "2318-01-01T00:00:00Z"


class NameFinder(Protocol):
    """Knows the names of models."""

    def find(self, name: str) -> ModelStatus | None:
        """Return the model of a name; None if there is none."""
        ...


def tagged(name: str) -> str:
    """Return a name as Ollama lists it: clients add ``:latest`` to a name without a tag."""
    return name if ":" in name else name + LATEST


def served_name(door: NameFinder, name: str | None) -> str | None:
    """Return the name of a body without ``:latest``, unless a model is called so."""
    if name is None or not name.endswith(LATEST) or door.find(name) is not None:
        return name
    return name.removesuffix(LATEST)


def answered_name(requested: str | None, served: str | None, name: str) -> str:
    """Return what an answer calls a model: as its body did, unless another answers for that name.

    Args:
        requested: the name in the body.
        served: the same as ``served_name`` has it.
        name: of the model that answers.
    """
    return requested if requested is not None and served == name else name


def capabilities(model: Any) -> list[str]:
    """Return what Ollama's routes can do with a model; nothing for kinds of other routes."""
    if isinstance(model, PoolingModel):
        return ["embedding"] if "embed" in model.info.tasks else []
    if not isinstance(model, GenerationModel):
        return []
    reads_calls = model.tool_format is not None or not model.parses_tools
    able = {
        "completion": True,
        "tools": model.tokenizer.takes_tools and model.allows_auto_tools and reads_calls,
        "vision": model.images is not None,
        "thinking": model.reasoning_format is not None,
        "insert": _fills_in(model),
    }
    return [name for name, is_able in able.items() if is_able]


def _fills_in(model: GenerationModel) -> bool:
    try:
        infill_format(model.tokenizer)
    except InvalidRequestError:
        return False
    return True


def listed(card: Mapping[str, Any], model: Any) -> dict[str, Any] | None:
    """Return a model's entry in the list of models; None if Ollama's routes cannot use it.

    Args:
        card: the entry in ``GET /v1/models``.
        model: what is known of it; None before it was loaded once.
    """
    able = capabilities(model)
    if model is not None and not able:
        return None
    name = tagged(card["id"])
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(card["created"]),
        "size": _size(card),
        "digest": hashlib.sha256(str(card["root"]).encode()).hexdigest(),
        "details": details(card, model),
        "capabilities": able,
    }


def running(card: Mapping[str, Any], model: Any) -> dict[str, Any] | None:
    """Return a model's entry in the list of what is in memory; None if it is not there."""
    entry = listed(card, model)
    if entry is None or card["status"] != ModelState.LOADED:
        return None
    left_s = card.get("expires_in_s")
    memory = sum(_memory(card).values())
    return entry | {
        "size": memory,
        "size_vram": memory,
        "expires_at": FOREVER if left_s is None else timestamp(time.time() + left_s),
        "context_length": card["max_model_len"],
    }


def described(card: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return a model's description."""
    facts: dict[str, Any] = {
        "general.architecture": ARCHITECTURE,
        "general.basename": card["id"],
        f"{ARCHITECTURE}.context_length": card["max_model_len"],
    }
    if isinstance(model, PoolingModel):
        facts[f"{ARCHITECTURE}.embedding_length"] = model.info.dims
    template = model.tokenizer.chat_template if isinstance(model, GenerationModel) else None
    return {
        "license": "",
        "modelfile": f"FROM {card['root']}",
        "parameters": "",
        "template": template or "",
        "details": details(card, model),
        "model_info": facts,
        "capabilities": capabilities(model),
        "modified_at": timestamp(card["created"]),
    }


def details(card: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Return facts about a model's files; what is not known is empty."""
    is_gguf = str(card["root"]).endswith(".gguf")
    return {
        "parent_model": card["parent"] or "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": ARCHITECTURE,
        "families": [ARCHITECTURE],
        "parameter_size": "",
        "quantization_level": getattr(getattr(model, "info", None), "dtype", ""),
    }


def _size(card: Mapping[str, Any]) -> int:
    """Return the bytes of a model's files, or else of its weights in memory."""
    size: int | None = card.get("size_bytes")
    return _memory(card).get("weights_bytes", 0) if size is None else size


def _memory(card: Mapping[str, Any]) -> Mapping[str, int]:
    return card["memory"] or {}
