"""What each model of the process takes of its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlx_parallm.engine.encoder_interface import EncoderState, EncoderStatus, ModelMemory
from mlx_parallm.engine.interface import ServedModel
from mlx_parallm.engine.policies import AdapterInfo


def model_memory(
    models: Iterable[ServedModel],
    encoders: Iterable[EncoderStatus],
    cache_bytes: Mapping[str, int],
    adapters: Iterable[AdapterInfo],
) -> dict[str, ModelMemory]:
    """By first names; ``cache_bytes`` are of the results that encoders keep."""
    loaded: dict[str, int] = {}
    for info in adapters:
        loaded[info.model] = loaded.get(info.model, 0) + info.num_bytes
    found = {
        one.names[0]: ModelMemory(
            weights=one.info.weight_bytes,
            kv=one.info.kv_bytes,
            adapters=loaded.get(one.names[0], 0),
        )
        for one in models
    }
    for status in encoders:
        name = status.names[0]
        model = status.model
        weights = 0
        if model is not None and status.state is EncoderState.LOADED:
            weights = model.info.weight_bytes
        found[name] = ModelMemory(
            weights=weights,
            cache=cache_bytes.get(name, 0),
            adapters=loaded.get(name, 0),
        )
    return found
