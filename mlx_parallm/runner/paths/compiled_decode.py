"""The packed forward of a step of decode rows as one compiled function.

Most steps decode one token of every sequence. Their forwards differ in nothing but their index
arrays, so that MLX can repeat the operations it traced once, which costs a tenth of what running
the model's Python does (``docs/decisions/008-compiled-decode.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.attention.base import CompilableAttention, LayerPool
from mlx_parallm.batch import ScheduledSequence
from mlx_parallm.runner.paged_cache import PackedStep
from mlx_parallm.runner.row_counts import padded_rows


class CompiledDecode:
    """Compiles a packed forward for decode steps.

    Weights and pools become constants of what is traced: whoever replaces them must make a new
    one of these.
    """

    def __init__(
        self,
        forward: Callable[[mx.array, PackedStep], mx.array],
        pools: Sequence[LayerPool],
        backend: CompilableAttention,
    ) -> None:
        """``forward`` gives logits ``[T, 1, vocab]`` of tokens ``[T]``."""
        self._forward = forward
        self._pools = pools
        self._backend = backend
        self._kinds: Any = None
        self._compiled = mx.compile(self._run)

    @property
    def is_ready(self) -> bool:
        """Whether a step has shown what the layers ask of a plan."""
        return self._kinds is not None

    def learn(self, plan: Any) -> None:
        """See what the layers asked of the plan of a step of decode rows."""
        self._kinds = self._backend.decode_kinds(plan)

    def logits(self, sequences: Sequence[ScheduledSequence], token_ids: mx.array) -> mx.array:
        """Logits ``[len(sequences), vocab]`` after each sequence's one token, int32 ``[T]``."""
        count = len(sequences)
        num_rows = padded_rows(count)
        positions = np.zeros(num_rows, dtype=np.int32)
        positions[:count] = [one.start for one in sequences]
        if num_rows > count:
            token_ids = mx.concatenate([token_ids, mx.zeros(num_rows - count, mx.int32)])
        logits, chains = self._compiled(
            token_ids,
            mx.array(positions),
            self._backend.decode_arrays(sequences, positions, self._kinds),
            self._chains(),
        )
        self._set_chains(chains)
        return logits[:count]

    def _run(
        self,
        token_ids: mx.array,
        positions: mx.array,
        arrays: list[mx.array],
        chains: list[list[mx.array]],
    ) -> tuple[mx.array, list[list[mx.array]]]:
        """What is traced; the pools are back as they were when it ends."""
        before = self._chains()
        self._set_chains(chains)
        try:
            plan = self._backend.decode_plan(arrays, self._kinds)
            logits = self._forward(token_ids, PackedStep(self._backend, plan, positions))
            return logits[:, 0], self._chains()
        finally:
            self._set_chains(before)

    def _chains(self) -> list[list[mx.array]]:
        return [self._backend.chain(pool) for pool in self._pools]

    def _set_chains(self, chains: Sequence[Sequence[mx.array]]) -> None:
        for pool, arrays in zip(self._pools, chains, strict=True):
            self._backend.set_chain(pool, arrays)
