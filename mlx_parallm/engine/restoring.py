"""Commands that give an engine that was started anew the versions and adapters of the others.

A model that is evicted meanwhile has no engine yet that could take them: they are kept in
``LoopState.missed`` until it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlx_parallm.engine.commands import EngineCommand, LeavesNothing, LoopState
from mlx_parallm.engine.live_weights import WeightsHistory
from mlx_parallm.engine.missed import MissedAdapter, MissedState, restore_version
from mlx_parallm.engine.policies import AdapterInfo, AdapterUpload


@dataclass(frozen=True, slots=True)
class RestoreVersion(LeavesNothing, EngineCommand[None]):
    """Give weights that are like those of other engines the same version.

    Attributes:
        model: its first name.
        history: of its weights at the other engines.
    """

    model: str
    history: WeightsHistory

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        engine = loop.engines.get(self.model)
        if engine is None:
            loop.missed.setdefault(self.model, MissedState()).history = self.history
        else:
            restore_version(engine, self.history)


@dataclass(frozen=True, slots=True)
class RestoreAdapter(LeavesNothing, EngineCommand[None]):
    """Load an adapter as it is at other engines."""

    adapter: MissedAdapter

    @classmethod
    def of(cls, upload: AdapterUpload, info: AdapterInfo) -> RestoreAdapter:
        """Return what loads an adapter that was uploaded, and now is as ``info`` says."""
        info = replace(info, is_resident=False, num_running=0)
        return cls(MissedAdapter(upload.as_loaded(info), info))

    def __call__(self, loop: LoopState) -> None:
        """Apply the command."""
        info = self.adapter.info
        engine = loop.engines.get(info.model)
        if engine is None:
            missed = loop.missed.setdefault(info.model, MissedState())
            missed.adapters[info.name] = self.adapter
        else:
            self.adapter.restore(engine)
