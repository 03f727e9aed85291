"""The kind of models that generate, as the event loop knows it."""

from __future__ import annotations

from pathlib import Path

from typing_extensions import override

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.kind import Kind
from mlx_parallm.engine.status import RequestDoor
from mlx_parallm.generation.client import GenerationClient
from mlx_parallm.generation.model import GENERATION_TRAITS


class GenerationKind(Kind[GenerationClient]):
    """Models that continue tokens."""

    traits = GENERATION_TRAITS

    @override
    def client(self, door: RequestDoor) -> GenerationClient:
        return GenerationClient(door)

    @override
    def serves(self, config: ModelConfig, path: Path) -> bool:
        """Mlx_lm says at load what it cannot run."""
        del config, path
        return True


#: ``GENERATION``: the kind, whose ``client`` routes use.
GENERATION = GenerationKind()
