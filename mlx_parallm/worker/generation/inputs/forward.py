"""Runs a path's steps with the rows of inputs in place of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.features import TwoWay
from mlx_parallm.models.vision.registry import family_of
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.dense import TwoWayRows
from mlx_parallm.worker.generation.inputs.rotary_rows import RotarySeam, find_rotary
from mlx_parallm.worker.generation.inputs.rows import EmbeddingSeam, InputFeatures, PlacedRows
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.generation.step_rows import spread_proposals
from mlx_parallm.worker.layers.wrapped_calls import Methods, WrappedCalls
from mlx_parallm.worker.weights.loader import LoadedModel


class DeepstackSeam:
    """Lets the first layers of a text model add a step's rows to the hidden states.

    Steps without such rows do not need it.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """``layers`` are those of the text model, in order."""
        self._layers = layers

    @contextmanager
    def during(self, placed: PlacedRows, added: mx.array) -> Iterator[None]:
        """Add rows to the outputs of the first layers, for a while.

        Args:
            placed: where the rows are in a forward.
            added: ``[layers, rows, width]``: what each layer adds.
        """
        layers = self._layers[: added.shape[0]]
        assert len(layers) == added.shape[0], "the tower has rows for more layers than there are"
        by_layer = {id(layer): rows for layer, rows in zip(layers, added, strict=True)}

        def wrap(original: Any) -> Methods:
            def adding(self: Any, *args: Any, **kwargs: Any) -> mx.array:
                hidden = original.__call__(self, *args, **kwargs)
                return hidden + placed.spread(by_layer[id(self)].astype(hidden.dtype))

            return {"__call__": adding}

        with WrappedCalls(layers, wrap):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForward:
    """The forward of steps, some of which have rows of inputs.

    Attributes:
        path: runs the forward; None before it is chosen.
        embedding: puts rows in place of token embeddings; None if the model takes no inputs.
        deepstack: adds rows to the outputs of the first layers.
        rotary: turns rows by ids on several axes; None if the model has one axis.
        lacks_axes: True if rows of its images have several axes and ``rotary`` is None.
        two_way: where the rows of an image attend to later ones; None if nowhere.
        two_way_rows: lets them; None if the path cannot.
    """

    path: ForwardPath | None = None
    embedding: EmbeddingSeam | None
    deepstack: DeepstackSeam
    rotary: RotarySeam | None = None
    lacks_axes: bool = False
    two_way: TwoWay | None = None
    two_way_rows: TwoWayRows | None = None

    def on(self, path: ForwardPath) -> InputForward:
        """Return the forward of the same model by a path."""
        two_way_rows = path.two_way if isinstance(path, PackedPath) else None
        return replace(self, path=path, two_way_rows=two_way_rows)

    @property
    def why_no_rows(self) -> str | None:
        """Why no path of the model takes images; None if some may."""
        if self.lacks_axes:
            return "its config.json has no RoPE on several axes (mrope_section) that is known"
        return "rows cannot replace its token embeddings" if self.embedding is None else None

    @property
    def why_no_images(self) -> str | None:
        """Why the model takes no images on this path; None if it does."""
        if self.two_way is not None and self.two_way_rows is None:
            return "its layers do not run packed"
        return self.why_no_rows

    def logits(
        self,
        sequences: Sequence[ScheduledSequence],
        token_ids: mx.array,
        rows: list[int],
        features: InputFeatures,
    ) -> mx.array:
        """Return the logits of some of the step's rows, ``[len(rows), vocab]``.

        Args:
            sequences: of the step.
            token_ids: of its rows, int32 ``[T]``.
            rows: those whose logits are wanted.
            features: those of the inputs that sequences name.
        """
        assert self.path is not None, "a path is chosen before the first step"
        # Rows of one sequence cannot have its state at once.
        spread = sequences if self.path.has_state else spread_proposals(sequences)
        gathered = features.gather(sequences)
        if gathered is None:
            return self.path.logits(spread, token_ids, rows)
        assert self.embedding is not None, "an input was admitted that the model does not take"
        positions = None
        if self.rotary is not None:
            positions = self.rotary.positions(sequences, features)
        layers = features.gather_layers(sequences)
        with contextlib.ExitStack() as seams:
            placed = seams.enter_context(self.embedding.during(gathered))
            if self.rotary is not None and positions is not None:
                seams.enter_context(self.rotary.during(positions))
            if layers is not None:
                seams.enter_context(self.deepstack.during(placed, layers))
            if self.two_way is not None and self.two_way_rows is not None:
                seams.enter_context(self.two_way_rows.during(features.two_way_spans(sequences)))
            ids = self.embedding.place(token_ids, sequences, features)
            return self.path.logits(spread, ids, rows)


def input_forward(loaded: LoadedModel, embedding: EmbeddingSeam | None) -> InputForward:
    """Return the forward of a model, without a path; ``embedding`` as in ``InputForward``."""
    family = family_of(loaded.config)
    has_tower = getattr(loaded.model, TOWER, None) is not None
    rotary = find_rotary(loaded.model, loaded.config) if has_tower else None
    has_axes = has_tower and family is not None and family.has_axes
    return InputForward(
        embedding=embedding,
        deepstack=DeepstackSeam(loaded.model.layers),
        rotary=rotary,
        lacks_axes=has_axes and rotary is None,
        two_way=None if family is None or not has_tower else family.two_way(loaded.config),
    )
