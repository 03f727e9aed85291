"""A scheduler of an encoder-decoder, whose simulated rows check that their source is theirs."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.scheduler.sources import SourceCache
from mlx_parallm.types.model_input import ModelInput, SourcePlace, source_of, tokens_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import Moves, ScheduledBatch, ScheduledSequence, StepOutput
from tests.block_simulator import SimulatedRunner
from tests.scheduler_harness import SchedulerHarness

NUM_STAGES = 3
GARBAGE = "garbage"


class SourceRunner(SimulatedRunner):
    """A simulated runner whose rows check that their source is what its blocks hold.

    Attributes:
        num_runs: runs that were begun.
        num_encoded: sources among them.
        num_filled: blocks that stores had.
        source_of: the source of a sequence, by its number.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, copies: bool) -> None:
        super().__init__(num_blocks, block_size, num_slots, has_state=False, copies=copies)
        self.kv: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.num_runs = self.num_encoded = self.num_filled = 0
        # Steps that may run behind one that failed.
        self._num_in_vain = 0
        self.open: dict[int, tuple[dict[int, tuple[ModelInput, SourcePlace, str]], int]] = {}
        self.source_of: list[tuple[int, ...]] = []

    def change(self, moves: Moves, *, garbage: bool = False) -> None:
        """Apply what comes before a step."""
        for slot in moves.dropped:
            for sources, *_ in self.open.values():
                sources.pop(slot, None)
        for number in moves.abandoned:
            self.open.pop(number, None)
        for stages in moves.stages:
            if stages.begun:
                self.num_runs += 1
                self.num_encoded += len(stages.begun)
                contents = [f"{self.base}/{place.adapter or ''}" for place in stages.places]
                assert all(
                    bool(place.adapter) == bool(place.adapter_slot) for place in stages.places
                )
                parts = zip(stages.begun, stages.places, contents, strict=True)
                sources = dict(zip(stages.slots, parts, strict=True))
                self.open[stages.run] = sources, NUM_STAGES
            if stages.run not in self.open:
                continue
            sources, num_left = self.open.pop(stages.run)
            assert 0 < stages.num_stages <= num_left
            assert stages.is_last == (stages.num_stages == num_left)
            if not stages.is_last:
                self.open[stages.run] = sources, num_left - stages.num_stages
                continue
            for source, place, content in sources.values():
                tokens = list(tokens_of(source))
                assert len(place.block_table) == -(-len(tokens) // self._block_size)
                for position, token in enumerate(tokens):
                    block, offset = divmod(position, self._block_size)
                    what = GARBAGE if garbage else (content, len(tokens), token)
                    self.kv[place.block_table[block]][offset] = what

    def corrupt(self, batch: ScheduledBatch) -> None:
        for block, _ in batch.moves.filled:
            self.kv[block] = [GARBAGE] * self._block_size
        self.change(batch.moves, garbage=True)
        for stages in batch.moves.stages:
            sources, _ = self.open.pop(stages.run, ({}, 0))
            for _, place, _ in sources.values():
                for block in place.block_table:
                    self.kv[block] = [GARBAGE] * self._block_size
        self._num_in_vain = 2
        super().corrupt(batch)

    def run(
        self,
        batch: ScheduledBatch,
        failed: frozenset[int] = frozenset(),
        bad_slots: frozenset[int] = frozenset(),
    ) -> StepOutput:
        self._num_in_vain = max(self._num_in_vain - 1, 0)
        return super().run(batch, failed, bad_slots)

    def _move(self, batch: ScheduledBatch) -> tuple[tuple[bytes, bytes], ...]:
        moves = batch.moves
        places = self._blocks, self._drafted, self._block_contents, self.kv
        saved = [
            (content, pickle.dumps([place[block] for place in places]))
            for block, content in moves.saved
        ]
        assert len({block for block, _ in moves.filled}) == len(moves.filled)
        for block, data in moves.filled:
            for place, part in zip(places, pickle.loads(data), strict=True):
                place[block] = part
        self.num_filled += len(moves.filled)
        self.change(moves)
        for row in batch.sequences:
            self._check_source(row)
        return tuple(saved)

    def _check_source(self, row: ScheduledSequence) -> None:
        wanted = self.source_of[row.seq_id]
        assert row.source is not None
        assert row.source.num_tokens == len(wanted)
        blocks = row.source.block_table
        held = [entry for block in blocks for entry in self.kv[block]][: len(wanted)]
        if GARBAGE in held:
            assert self._num_in_vain, "a row runs over what failed"
        else:
            content = self.content_of(row)
            assert held == [(content, len(wanted), token) for token in wanted]
        assert not set(row.source.block_table) & set(row.block_table), "a block has two uses"

    def _write(self, row: ScheduledSequence, *, garbage: bool) -> None:
        super()._write(row, garbage=garbage)
        for position in range(row.start, row.start + len(row.token_ids)):
            block = row.block_table[position // self._block_size]
            self.kv[block][position % self._block_size] = None


class SourceHarness(SchedulerHarness):
    """A harness whose requests have sources."""

    def __init__(
        self,
        *,
        num_blocks: int = 60,
        budget: int = 16,
        stall_ms: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks,
            num_tower_stages=NUM_STAGES,
            has_sources=True,
            seconds_of=lambda batch: 1e-3 * (batch.num_tokens + 2 * batch.moves.tokens),
            config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=budget, max_decode_stall_ms=stall_ms
            ),
            **options,
        )
        copies = self.speculative is not None
        self.sources = SourceRunner(num_blocks, self.block_size, 4 + 3, copies=copies)
        self._runner = self.sources

    def add_source(
        self,
        name: str,
        source: Sequence[int],
        prompt: Sequence[int] = (1,),
        *,
        cache_salt: str = "",
        **params: Any,
    ) -> None:
        """Queue a request."""
        options: dict[str, Any] = {"max_tokens": 5, **params}
        request = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=tuple(prompt),
            params=SamplingParams(**options),
            cache_salt=cache_salt,
            inputs=(source_of(source),),
        )
        self.add(request, seed=3)
        # What the source leaves of the pool bounds the output.
        self.tracked[name].request = self.scheduler._live.groups[name].request
        self.sources.source_of += [tuple(source)] * request.params.n

    @property
    def cache(self) -> SourceCache:
        cache = self.scheduler._running.sources
        assert cache is not None
        return cache
