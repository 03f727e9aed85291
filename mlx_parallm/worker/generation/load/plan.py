"""The specification of a generation model to load, and the plan that its load returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.types.step import KVPlan, RunnerInfo
from mlx_parallm.worker.generation.load.proposal_check import ProposalChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """A generation model to load, or the draft model of one.

    Attributes:
        config: the model's settings.
        path: the model's folder.
        settings: the engine's settings.
        free_bytes: the free memory before the load; None if unknown. On a CPU it decides whether
            weights are kept as float32.
    """

    config: ModelConfig
    path: Path
    settings: EngineConfig
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChoices:
    """The choices that a decoder's load made by trying; they are equal on equal devices.

    Attributes:
        is_cast: True if ``dtype="auto"`` became float32, see ``load_model``.
        attention: the name of the attention backend.
        kernels: True for each of the layers' kernels that is used, by kernel and shape.
        path: the name of the forward path; None before ``Allocate``.
        head: the number of the head that computes only some rows, see ``row_selection``;
            None before ``Allocate``.
        samples_by_kernel: True if sampling kernels are used; None before ``Allocate``.
        why_no_images: why images are refused though the model has a tower; None if they are
            not, if it has none, or before ``Allocate``.
        adapts_by_kernel: True if the kernels of adapters are used; None before ``Allocate``, and
            for a draft model.
        proposals: how rows with proposals run; None before ``Allocate``, for a draft model, and
            without speculation.
    """

    is_cast: bool
    attention: str
    kernels: Mapping[str, bool] = field(default_factory=dict)
    path: str | None = None
    head: int | None = None
    why_no_images: str | None = None
    samples_by_kernel: bool | None = None
    adapts_by_kernel: bool | None = None
    proposals: ProposalChoice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierChoices:
    """The choices of an earlier load, which ``Load`` takes over as it does those of a plan."""

    choices: DecoderChoices
    draft: DecoderChoices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """The plan of a loaded generation model: its choices, and facts about it.

    Attributes:
        kv: the memory that its KV takes.
        model_config: the checkpoint's config.json.
        vocab_size: the number of rows of the embedding table.
        weight_bytes: the size of its weights, in bytes.
        choices: the choices made by trying.
        block_layout: the form of a block's bytes, see ``AttentionBackend``.
        state_layout: the form of a state's bytes, see ``state_form``; empty if there is none.
        draft: the choices for its draft model; None if it has none, or before ``Allocate``.
        info: facts about the model; None before ``Allocate``.
        prepares_shapes: True if the first step of each shape takes longer than later ones, so that
            a warm-up is worth it.
    """

    kv: KVPlan
    model_config: Mapping[str, Any]
    vocab_size: int
    weight_bytes: int
    choices: DecoderChoices
    block_layout: str
    state_layout: str
    draft: DecoderChoices | None = None
    info: RunnerInfo | None = None
    prepares_shapes: bool = False
