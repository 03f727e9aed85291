"""Computes what value heads say of the states that the LM head reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from typing_extensions import override

from mlx_parallm.adapters.arrays import to_mlx
from mlx_parallm.adapters.weights import AdapterWeights
from mlx_parallm.models.decoder_classes import trunk_of
from mlx_parallm.models.value_heads import head_problem, value_head_in, value_layer
from mlx_parallm.types.errors import ModelLoadError
from mlx_parallm.types.pooling import OwnHead
from mlx_parallm.types.step import SampledToken, TokenLogprob
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.ranks import Ranks, agreed
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.generation.step_rows import StepRows
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, unfit_error
from mlx_parallm.worker.lora.adapter_store import SlotTarget

# OWN_SLOT: the slot of rows without an adapter, which have the model's own head.
OWN_SLOT = 0
# VALUE_HEAD: what is known of a head that an adapter brings; it serves no task of pooling.
VALUE_HEAD = OwnHead(tasks=(), num_labels=1)
_Head = tuple[mx.array, mx.array]
_Scores = tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class RowValues:
    """Lazy values of some of a step's rows.

    Attributes:
        rows: indices into the step's rows that need logits.
        values: float32, one for each of ``rows``.
        failed: by sequence, why it has no values.
    """

    rows: Sequence[int]
    values: mx.array
    failed: Mapping[int, str]

    def added(
        self, rows: StepRows, tokens: Sequence[SampledToken], scored: Mapping[int, _Scores]
    ) -> tuple[tuple[SampledToken, ...], dict[int, _Scores]]:
        """Return the step's tokens, one for each sampled row, and scores, with their values."""
        values: dict[int, float] = dict(zip(self.rows, np.array(self.values).tolist(), strict=True))
        valued = tuple(
            replace(token, logprob=token.logprob and _valued(token.logprob, row, values))
            for token, row in zip(tokens, rows.sampled, strict=True)
        )
        firsts = {sequence.seq_id: first for sequence, first in rows.scored}
        return valued, {
            seq_id: tuple(
                _valued(entry, row, values) for row, entry in enumerate(entries, firsts[seq_id])
            )
            for seq_id, entries in scored.items()
        }


class ValueHeads:
    """The value heads of one model: its own, and those that adapters bring, by slot."""

    def __init__(self, model: Any, selector: RowSelector, ranks: Ranks | None = None) -> None:
        """Begin with the model's own head, if it has one.

        Args:
            model: the model, whose head may be replaced with its other weights.
            selector: notes what the LM head reads.
            ranks: the processes that compute the model together; None for one process.
        """
        self._model = model
        self._selector = selector
        self._ranks = ranks
        self._brought: dict[int, _Head] = {}
        self._why_none: str | None = None
        self._is_checked = False
        # The numbers that a head reads; not known before the check.
        self._width = 0

    @property
    def own(self) -> _Head | None:
        """The weight and bias of the model's own head; None if it has none."""
        return _head_of(value_layer(self._model))

    def put(self, slot: int, head: _Head) -> None:
        """Use a head, its float32 weight ``[size]`` and bias ``[]``, for the rows of a slot."""
        self._brought[slot] = head

    def drop(self, slot: int) -> None:
        """Use the model's own head for the rows of a slot."""
        self._brought.pop(slot, None)

    def why_none(self) -> str | None:
        """Return why no head can be computed for this model; None if they can.

        A head reads the output of the last norm. Some LM heads read a multiple of it.
        """
        if not self._is_checked:
            self._why_none, self._is_checked = self._check()
        return self._why_none

    def why_unfit(self, head: _Head) -> str | None:
        """Return why a head cannot be computed for this model; None if it can."""
        if (why := self.why_none()) is not None:
            return f"this model cannot have a value head, because {why}"
        width = head[0].shape[0]
        if width != self._width:
            return (
                f"its value head reads {width} numbers, and the model's states have {self._width}"
            )
        return None

    def of_rows(
        self, rows: StepRows, noted: Sequence[mx.array], *, is_selected: bool
    ) -> RowValues | None:
        """Return the values that rows of a step want; None if none wants any.

        Args:
            rows: the step's rows.
            noted: what the LM head read in the step's forward.
            is_selected: True if the head read the rows that need logits alone, and no others but
                padding.
        """
        wanted = rows.value_rows()
        if not wanted:
            return None
        own = self.own
        heads = self._brought if own is None else {OWN_SLOT: own} | self._brought
        slots = {
            row: sequence.adapter_slot if sequence.adapter_slot in heads else OWN_SLOT
            for row, sequence in wanted.items()
        }
        failed = {
            wanted[row].seq_id: "Its weights have no value head any more."
            for row, slot in slots.items()
            if slot not in heads
        }
        chosen = [row for row, slot in slots.items() if slot in heads]
        if not chosen:
            return RowValues((), mx.zeros(0), failed)
        places = chosen if is_selected else [rows.logit_rows[row] for row in chosen]
        hidden = mx.concatenate([each.reshape(-1, each.shape[-1]) for each in noted])
        used = sorted({slots[row] for row in chosen})
        index = mx.array([used.index(slots[row]) for row in chosen])
        weights, biases = (mx.stack(list(part)) for part in zip(*map(heads.get, used), strict=True))
        # Sums of products, unlike a matrix product, do not depend on how many rows there are.
        products = hidden[mx.array(places)].astype(mx.float32) * weights[index]
        return RowValues(chosen, mx.sum(products, axis=-1) + biases[index], failed)

    def _check(self) -> tuple[str | None, bool]:
        """Return ``why_none``, and False if weights are away so that it is not known."""
        if not self._selector.active:
            return "its LM head could not be found", True
        read, states = self._last_states()
        if not agreed(self._ranks, states is not None):
            return "its last hidden states could not be found", True
        assert states is not None, "all ranks have found them"
        if not agreed(self._ranks, bool(mx.allclose(read, states, rtol=1e-2, atol=1e-3))):
            return "its LM head does not read the output of its last norm", True
        self._width = states.shape[-1]
        return None, bool(mx.any(states != 0).item())

    def _last_states(self) -> tuple[mx.array, mx.array | None]:
        """Return what the LM head reads of two tokens, and what the last norm returns for them.

        None: some trunks return logits, or several arrays, or are unknown.
        """
        tokens = mx.array([[0], [1]])
        with self._selector.noting() as noted:
            self._model(tokens)
        try:
            states: Any = trunk_of(self._model)(tokens)
        except (ModelLoadError, *MODEL_ERRORS):
            states = None
        return noted[-1], states if getattr(states, "shape", None) == noted[-1].shape else None


class ValuedLayers(SlotTarget):
    """Adapters of a generator, some of which bring a value head."""

    def __init__(self, layers: AdaptedLayers, heads: ValueHeads) -> None:
        self._layers = layers
        self._heads = heads

    @property
    @override
    def num_bytes(self) -> int:
        return self._layers.num_bytes

    @override
    def of_model(self, adapter: AdapterWeights, *, param: str) -> AdapterWeights:
        return self._layers.of_model(adapter, param=param)

    @override
    def check(self, adapter: AdapterWeights, *, param: str) -> OwnHead | None:
        head = self._head(adapter, param)
        self._layers.check(_without(adapter, head), param=param)
        if head is None:
            return None
        if (why := self._heads.why_unfit(head)) is not None:
            raise unfit_error(why, param)
        return VALUE_HEAD

    @override
    def begin(self, slot: int, adapter: AdapterWeights, *, param: str) -> None:
        head = self._head(adapter, param)
        self._layers.begin(slot, _without(adapter, head), param=param)
        self._heads.drop(slot)
        if head is not None:
            self._heads.put(slot, head)

    @override
    def put_modules(self, slot: int, count: int) -> bool:
        return self._layers.put_modules(slot, count)

    @override
    def drop(self, slot: int) -> None:
        self._layers.drop(slot)
        self._heads.drop(slot)

    @override
    def refresh(self) -> None:
        self._layers.refresh()

    def _head(self, adapter: AdapterWeights, param: str) -> _Head | None:
        """Return the head that an adapter brings; None if it brings none, or other layers too."""
        name = value_head_in(adapter.saved)
        prefix = f"{name}."
        if name is None or not all(key.startswith(prefix) for key in adapter.saved):
            return None
        saved = {key.removeprefix(prefix): tensor for key, tensor in adapter.saved.items()}
        problem = head_problem({leaf: tensor.shape for leaf, tensor in saved.items()})
        if problem is not None:
            raise unfit_error(f"modules_to_save: {name} is no value head: {problem}", param)
        return _head_of({leaf: to_mlx(tensor) for leaf, tensor in saved.items()})


def _valued(entry: TokenLogprob, row: int, values: Mapping[int, float]) -> TokenLogprob:
    return replace(entry, value=values.get(row))


def _without(adapter: AdapterWeights, head: _Head | None) -> AdapterWeights:
    """Return an adapter without its head; layers that are none stay, and are refused."""
    return adapter if head is None else replace(adapter, saved={})


def _head_of(layer: Any) -> _Head | None:
    """Return the weight and bias of a layer, float32; None if there is no layer."""
    if layer is None:
        return None
    bias = layer["bias"][0] if "bias" in layer else mx.array(0.0)
    return layer["weight"][0].astype(mx.float32), bias.astype(mx.float32)
