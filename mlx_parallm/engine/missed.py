"""State of an evicted model that was made before this engine was started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_parallm.engine.live_weights import WeightsHistory
from mlx_parallm.engine.models import ServedEngine
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload


@dataclass(frozen=True, slots=True)
class MissedAdapter:
    """An adapter that other engines have: what loads it as it is there, and its facts there."""

    upload: AdapterUpload
    info: AdapterInfo

    def restore(self, engine: ServedEngine) -> None:
        """Load it at the engine of its model."""
        engine.policies.ensure(self.upload)


@dataclass(slots=True)
class MissedState:
    """State that other engines keep of an evicted model; it gets it once it is loaded here.

    Attributes:
        history: of its weights; None if they never changed.
        adapters: by their names.
    """

    history: WeightsHistory | None = None
    adapters: dict[str, MissedAdapter] = field(default_factory=dict[str, MissedAdapter])

    def infos(self) -> Sequence[AdapterInfo]:
        """Return the adapters that the model will have."""
        return [adapter.info for adapter in self.adapters.values()]

    def restore(self, engine: ServedEngine) -> None:
        """Give it to the engine of the model, which was loaded again."""
        if self.history is not None:
            restore_version(engine, self.history)
        for adapter in self.adapters.values():
            adapter.restore(engine)


def restore_version(engine: ServedEngine, history: WeightsHistory) -> None:
    """Give weights that are like those of other engines the same version, if they can change."""
    if engine.live is not None:
        engine.live.restore(history)
