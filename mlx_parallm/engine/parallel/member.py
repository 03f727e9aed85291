"""One engine of several: its life, and what it has carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.engine.kind import StartedModel
from mlx_parallm.engine.life import EngineLife
from mlx_parallm.engine.status import Readiness
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.units import readable_bytes

# MAX_RESTART_DELAY_S: most seconds until an engine that dies again and again is started anew.
MAX_RESTART_DELAY_S = 60.0


@dataclass(slots=True)
class Member:
    """One engine.

    Attributes:
        life: its life, or the next one while it is dead.
        is_serving: True if it has loaded, and has had every command that the others had.
        has_loaded: True if it has loaded, and waits for those commands.
        num_missed: how many of those commands it has yet to carry out.
        num_deaths: how often it has died in a row without an answer in between.
        has_failed: True if it could not be started anew when that was tried last.
    """

    life: EngineLife
    is_serving: bool = False
    has_loaded: bool = False
    num_missed: int = 0
    num_deaths: int = 0
    has_failed: bool = False

    @property
    def readiness(self) -> Readiness:
        """Return whether it gets requests that it begins at once."""
        if not self.has_loaded:
            return Readiness.STARTING
        if not self.is_serving or self.num_missed:
            return Readiness.CATCHING_UP
        return self.life.readiness()[0]


def smallest(
    models: Sequence[StartedModel], others: Sequence[StartedModel]
) -> Sequence[StartedModel]:
    """Return each model as the engine has it whose KV pool is the smaller one.

    Engines that share a device size their pools by what is free when they load. Where that does not
    hold a whole context, the context that every engine can serve is that of the smallest pool.
    """
    pairs = zip(models, others, strict=True)
    return [min(pair, key=lambda started: started.model.cache_tokens) for pair in pairs]


def check_room(models: Sequence[StartedModel], others: int, free: int | None) -> None:
    """Raise ConfigError if the weights of other engines do not fit beside those of the first.

    Args:
        models: of the first.
        others: how many there will be.
        free: bytes of memory; None if that is not known.
    """
    weights = sum(started.model.memory.weights for started in models)
    if free is not None and weights * others > free:
        raise ConfigError(
            f"--data-parallel-size {others + 1}: each engine has its own copy of the weights, "
            f"{readable_bytes(weights)}, and only {readable_bytes(free)} of memory are free "
            "beside the first one."
        )


def delay_after(num_deaths: int) -> float:
    """Return no delay after the first death, then one second, and twice as much each time."""
    return min(2.0 ** (num_deaths - 1), MAX_RESTART_DELAY_S) if num_deaths else 0.0
