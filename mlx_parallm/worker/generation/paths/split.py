"""The path of packed forwards in which some modules run once per group of sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from typing_extensions import override

from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import AttentionBackend, CompilableAttention
from mlx_parallm.worker.generation.group_cache import CacheViews
from mlx_parallm.worker.generation.module_split import ModuleSplit, ProposalStep, SplitStep
from mlx_parallm.worker.generation.paged_cache import KVPools, PackedStep
from mlx_parallm.worker.generation.paths.base import PooledPath, adapter_slots, is_decode
from mlx_parallm.worker.generation.paths.compiled_decode import CompiledDecode
from mlx_parallm.worker.generation.paths.compiled_proposals import CompiledProposals, is_verifying
from mlx_parallm.worker.generation.row_groups import (
    DecodeGroup,
    Group,
    ProposalGroup,
    RowGroup,
    make_groups,
)
from mlx_parallm.worker.generation.row_selection import RowSelector
from mlx_parallm.worker.generation.seam import ModelSeams
from mlx_parallm.worker.generation.state_store import KeptStates, States
from mlx_parallm.worker.layers.kept_states import StateNotes, note_convolutions
from mlx_parallm.worker.lora.rows import AdapterRows


class SplitPath(PooledPath):
    """The path of models with modules that cannot take one row per token.

    These modules run once per group; norms, MLP, experts and head take one row per token. All
    decode rows are one group, so that a module runs once however many sequences decode. Without
    ``batch_decode`` each is a group of its own, for modules that cannot be batched. Rows with
    proposals are groups too where the model has states; otherwise each proposal is a decode row.
    Implements ``ForwardPath``.

    Attributes:
        batch_decode: True to run decode rows as one group.
        compiles_proposals: True to run steps of decode rows and rows with proposals by a compiled
            function, which needs ``keeps_states``.
        batch_proposals: True to run rows with proposals of equal length as one group.
    """

    name = "split"

    def __init__(  # noqa: PLR0913 - parts, by name
        self,
        model: Any,
        views: CacheViews,
        pools: KVPools,
        backend: AttentionBackend,
        selector: RowSelector,
        modules: Sequence[nn.Module],
        block_size: int,
        *,
        batch_decode: bool,
        compiles: bool = False,
        max_scores: float = math.inf,
    ) -> None:
        """Split these modules.

        Args:
            model: the model.
            views: makes the caches of a step.
            pools: the KV pools of its layers.
            backend: the attention backend of the pools.
            selector: selects the rows that the head computes.
            modules: the modules that run once per group.
            block_size: the tokens of a block.
            batch_decode: True to run all decode rows as one group.
            compiles: True to run steps of decode rows by a compiled function.
            max_scores: see ``make_groups``.
        """
        super().__init__(pools, views.states)
        self._model = model
        self._views = views
        self._backend = backend
        self._selector = selector
        self._block_size = block_size
        self.batch_decode = batch_decode
        self._max_scores = max_scores
        self.batch_proposals = False
        self._seams = ModelSeams(model)
        self._notes = StateNotes()
        self._noting = note_convolutions(modules, self._notes)
        self._split = ModuleSplit(modules)
        self.compiles_proposals = False
        if compiles and isinstance(backend, CompilableAttention):
            parts = (pools.layers, backend, self.adapters, views.states, selector)
            self._compiled = CompiledDecode(self._traced, *parts)
            self._proposals = CompiledProposals(self._traced_proposals, *parts)

    def close(self) -> None:
        """Undo the split of the model's modules."""
        self._split.remove()
        self._noting.remove()

    @override
    def logits(
        self, sequences: Sequence[ScheduledSequence], token_ids: mx.array, rows: Sequence[int]
    ) -> mx.array:
        slots = adapter_slots(sequences)
        compiled = self._compiled if is_decode(sequences, rows) else None
        if compiled is not None and compiled.is_ready:
            return compiled.logits(sequences, token_ids, slots)
        if self.compiles_proposals and is_verifying(sequences, rows):
            return self._verified(sequences, token_ids)
        step = PackedStep.of(self._backend, sequences)
        groups = make_groups(
            sequences,
            self._backend,
            self._block_size,
            batch_decode=self.batch_decode,
            batch_proposals=self.batch_proposals,
            max_scores=self._max_scores,
        )
        states = self._begin(groups)
        kept = [self._keep(*each, step) for each in zip(groups, states, strict=True)]
        head_rows = mx.array(np.array(rows, dtype=np.int32)) if rows else mx.array([0])
        with self.adapters.during(AdapterRows.of_step(slots)):
            logits = self._selector.run(
                lambda: self._forward(token_ids, step, groups, states, kept), head_rows
            )
        for group, group_states, group_kept in zip(groups, states, kept, strict=True):
            self._states.commit(group.slots, group_states)
            self._states.keep(group.sequences, group_kept)
        if compiled is not None:
            compiled.learn(step.plan, self._block_size if self._views.has_gathered else None)
        return logits

    def _begin(self, groups: Sequence[RowGroup]) -> list[States]:
        """Return the states of each group; parts of a chunk have them in common."""
        states: list[States] = []
        for group in groups:
            states.append(states[-1] if group.continues else self._views.begin(group))
        return states

    def _keep(self, group: RowGroup, states: States, step: PackedStep) -> KeptStates:
        """Return the group's states before the step, and in it what the proposals make of them."""
        has_each = self.keeps_states and any(sequence.kept_slots for sequence in group.sequences)
        notes = self._notes if has_each else None
        num_rows = len(group.sequences)
        return KeptStates(states, num_rows, notes, lambda: self._seams.during(step))

    def _verified(self, sequences: Sequence[ScheduledSequence], token_ids: mx.array) -> mx.array:
        """Return the logits of all rows, by the compiled function."""
        assert self._compiled is not None
        self._proposals.learn_from(self._compiled)
        return self._proposals.verified(sequences, token_ids)

    @property
    @override
    def _functions(self) -> Sequence[CompiledDecode]:
        return () if self._compiled is None else (self._compiled, self._proposals)

    def _traced_proposals(self, token_ids: mx.array, step: PackedStep, states: States) -> mx.array:
        """Trace a step of rows with proposals; ``states`` become what they are made of."""
        taken, packed = states.pop()
        adapters = self.adapters.rows
        group = ProposalGroup(step, taken, packed, adapters)
        rows = DecodeGroup(step, self._block_size, adapters)
        kept = KeptStates(states, taken.shape[0], self._notes)
        with_positions = (step.positions, self.adapters)
        stateful = SplitStep(self._views, [group], [states], [kept], *with_positions)
        attending = SplitStep(self._views, [rows], [[]], [KeptStates([], 0)], *with_positions)
        step.notes = self._notes
        with self._seams.during(step), self._split.during(ProposalStep(attending, stateful)):
            logits = self._model(token_ids[:, None], cache=self._views.packed(step))
        states[:] = self._proposals.learn_sources(kept, partial(self._seams.during, step))
        return logits

    def _traced(self, token_ids: mx.array, step: PackedStep, states: States) -> mx.array:
        group = DecodeGroup(step, self._block_size, self.adapters.rows)
        return self._forward(token_ids, step, [group], [states], [KeptStates(states, group.length)])

    def _forward(
        self,
        token_ids: mx.array,
        step: PackedStep,
        groups: Sequence[Group],
        states: Sequence[States],
        kept: Sequence[KeptStates],
    ) -> mx.array:
        step.notes = self._notes
        splitting = SplitStep(self._views, groups, states, kept, step.positions, self.adapters)
        with self._seams.during(step), self._split.during(splitting):
            return self._model(token_ids[:, None], cache=self._views.packed(step))
