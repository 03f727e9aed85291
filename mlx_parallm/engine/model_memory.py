"""The memory of each model of the process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mlx_parallm.engine.interface import ModelMemory, ModelState, ModelStatus
from mlx_parallm.engine.policies import AdapterInfo


def model_memory(
    models: Iterable[ModelStatus],
    cache_bytes: Mapping[str, int],
    adapters: Iterable[AdapterInfo],
) -> dict[str, ModelMemory]:
    """Return the memory by first names; ``cache_bytes`` are of the results that models keep."""
    loaded: dict[str, int] = {}
    for info in adapters:
        loaded[info.model] = loaded.get(info.model, 0) + info.num_bytes
    memory: dict[str, ModelMemory] = {}
    for status in models:
        name = status.names[0]
        own = ModelMemory()
        if status.model is not None and status.state is ModelState.LOADED:
            own = status.model.memory
        memory[name] = replace(own, cache=cache_bytes.get(name, 0), adapters=loaded.get(name, 0))
    return memory
