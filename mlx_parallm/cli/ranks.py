"""A server whose generation models several processes compute, as ``mlx.launch`` started them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.serving.launched import launched_in
from mlx_parallm.types.errors import ConfigError


def with_ranks(
    engine: EngineConfig, server: ServerConfig, environment: Mapping[str, str]
) -> EngineConfig:
    """Return the settings with the ranks that the launcher started, if there are several.

    Raises:
        ConfigError: a setting cannot be used with several ranks.
    """
    launched = launched_in(environment)
    if launched is None:
        return engine
    refused = {
        f"--data-parallel-size {server.data_parallel_size}": server.data_parallel_size != 1,
        "--engine-process": server.engine_process,
        "--restart-engine": engine.restart_on_failure,
        "--speculative-config with a draft model": engine.speculative is not None
        and engine.speculative.model is not None,
    }
    for flag, is_used in refused.items():
        if is_used:
            raise ConfigError(
                f"{flag} cannot be used under mlx.launch, which starts one process for each part "
                "of one model."
            )
    ranks = replace(
        engine.ranks,
        rank=launched.rank,
        size=launched.size,
        backend=launched.backend,
    )
    return replace(engine, ranks=ranks)
