"""A high-throughput OpenAI-compatible model server built on MLX."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.llm import LLM
    from mlx_parallm.offline.beams import BeamSearchParams
    from mlx_parallm.types.beams import BeamParams
    from mlx_parallm.types.grammar import StructuredOutputsParams
    from mlx_parallm.types.request import SamplingParams

__all__ = ["LLM", "BeamParams", "BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "mlx_parallm.llm",
    "BeamParams": "mlx_parallm.types.beams",
    "BeamSearchParams": "mlx_parallm.offline.beams",
    "SamplingParams": "mlx_parallm.types.request",
    "StructuredOutputsParams": "mlx_parallm.types.grammar",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: MLX and transformers take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
