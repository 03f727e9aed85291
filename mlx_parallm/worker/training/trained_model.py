"""The interface of a model whose adapters are trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.types.training import TrainedText, TrainingInput
from mlx_parallm.worker.lora.stack import AdapterStack
from mlx_parallm.worker.pooling.layer_stages import StagedJob
from mlx_parallm.worker.pooling.own_heads import TrainableHead


class TrainedModel(Protocol):
    """A model in memory that runs texts through given changes of its layers."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """Return the modules, by path."""
        ...

    @property
    def parameters(self) -> Mapping[str, mx.array]:
        """Return the parameters, by name."""
        ...

    @property
    def layers(self) -> Sequence[nn.Module]:
        """Return the layers, in order."""
        ...

    @property
    def shared(self) -> Collection[str]:
        """Return the paths of modules whose result all rows of a forward share."""
        ...

    @property
    def head(self) -> TrainableHead | None:
        """Return the classification head as it is now; None if the model has none."""
        ...

    def new_head(self, seed: int) -> TrainableHead | None:
        """Return a new head of one label, which the seed draws.

        None if the model generates, or has such a head.
        """
        ...

    @property
    def shares_prompts(self) -> bool:
        """Return True if the choices of a ``ChoiceInput`` can share their prompt."""
        ...

    def of_checkpoint(self, adapter: AdapterWeights) -> AdapterWeights:
        """Return changes of the model's linear layers as those of transformers' class.

        Raises:
            InvalidRequestError: transformers has no such linear layer.
        """
        ...

    def texts(self, item: TrainingInput) -> Sequence[TrainedText]:
        """Return what the layers read for an input: one row of the forward for each."""
        ...

    def length(self, inputs: Sequence[TrainedText]) -> int:
        """Return the length L of a forward of these texts."""
        ...

    def run_layers(self, text: TrainedText) -> None:
        """Build the forward of one text, without any adapter and without a head."""
        ...

    def changed_by(self, stacks: Mapping[str, AdapterStack]) -> AbstractContextManager[None]:
        """Let stacks change layers that are called in the context; a forward has wrapped them."""
        ...

    def changed_job(
        self,
        inputs: Sequence[TrainingInput],
        stacks: Mapping[str, AdapterStack],
        first_layer: int = 0,
        heads: Sequence[Any] = (),
    ) -> StagedJob:
        """Return a forward that given stacks change, in place of adapters in slots.

        Args:
            inputs: name no adapters.
            stacks: the changes, by the paths of linear layers.
            first_layer: the first layer that is computed, whose output ends the first stage.
            heads: models whose heads take equal runs of rows; empty: the model's own takes all.
        """
        ...
