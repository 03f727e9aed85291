"""What the worker is told of a model that generates, and what it has chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.types.kv_plan import KVPlan
from mlx_parallm.types.step import RunnerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A model that generates, or proposes tokens for one.

    Attributes:
        config: the model's settings.
        path: its folder.
        settings: the engine's.
        free_bytes: memory that was free before; None if unknown. On a CPU it decides whether
            weights are kept as float32.
    """

    config: ModelConfig
    path: Path
    settings: EngineConfig
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChoices:
    """What was chosen for one decoder at load, by trying it; equal on equal devices.

    Attributes:
        is_cast: True if ``dtype="auto"`` became float32, see ``load_model``.
        attention: name of the attention backend.
        kernels: whether the layers' kernels are used, by kernel and shape.
        path: name of the forward path; None before ``Allocate``.
        samples_by_kernel: True if sampling kernels are used; None before ``Allocate``.
        adapts_by_kernel: likewise for the kernels of adapters; None for a draft model too.
    """

    is_cast: bool
    attention: str
    kernels: Mapping[str, bool] = field(default_factory=dict)
    path: str | None = None
    samples_by_kernel: bool | None = None
    adapts_by_kernel: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """A loaded model that generates.

    Attributes:
        kv: what its KV takes.
        model_config: the checkpoint's config.json.
        vocab_size: rows of the embedding table.
        weight_bytes: of its parameters.
        choices: see ``DecoderChoices``.
        draft: likewise of its draft model; None if it has none, or before ``Allocate``.
        info: facts about the model; None before ``Allocate``.
        prepares_shapes: True if the first step of each shape takes longer than others, so that
            they are worth a warm-up.
    """

    kv: KVPlan
    model_config: Mapping[str, Any]
    vocab_size: int
    weight_bytes: int
    choices: DecoderChoices
    draft: DecoderChoices | None = None
    info: RunnerInfo | None = None
    prepares_shapes: bool = False
