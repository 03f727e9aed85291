"""A scheduler whose requests have inputs, and a simulated runner that computes their rows."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.stores import BlockStore
from mlx_parallm.types.model_input import HostArray, InputKind, ModelInput, Span
from mlx_parallm.types.request import INPUT_TOKEN, GenerateRequest, SamplingParams
from mlx_parallm.types.step import Moves, ScheduledBatch, ScheduledSequence, StepOutput
from tests.block_simulator import END_ID, SimulatedRunner
from tests.scheduler_harness import SchedulerHarness, Tracked

#: ``ROWS``: what the rows of a few inputs mean, as tokens.
ROWS = ((11, 12, 13, 14, 15, 16), (21, 22), (11, 12, 13), (31, 32, 33, 34, 35, 36, 37, 38, 39))


#: ``NUM_STAGES``: of a tower.
NUM_STAGES = 4


def rows_input(tokens: Sequence[int], start: int, *, cost: int, may_cut: bool) -> ModelInput:
    """Return an input whose rows mean these tokens; one that has a cost is an image."""
    return ModelInput(
        kind=InputKind.IMAGE if cost else InputKind.PROMPT_EMBEDS,
        content=repr(tokens),
        arrays={"rows": HostArray("uint8", (len(tokens),), json.dumps(list(tokens)).encode())},
        nbytes=len(tokens),
        cost=cost,
        span=Span(start, start + len(tokens)),
        may_cut=may_cut,
        shape_key=str(len(tokens)),
    )


class InputRunner(SimulatedRunner):
    """A simulated runner that keeps the products of inputs by slot.

    Attributes:
        products: by slot.
        num_computed: inputs whose computation was begun.
        runs: the number of inputs of each run.
        runs_ahead: whether a step that raises was submitted.
        open: the runs that go on: their inputs by slot, and the stages that are left.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, *, has_state: bool):
        super().__init__(num_blocks, block_size, num_slots, has_state=has_state)
        self.products: dict[int, list[int]] = {}
        self.runs: list[int] = []
        self.runs_ahead = False
        self.open: dict[int, tuple[dict[int, ModelInput], int]] = {}

    @property
    def num_computed(self) -> int:
        return sum(self.runs)

    def change(self, changes: Moves) -> None:
        """Apply what comes before a step."""
        for slot in changes.dropped:
            self.products.pop(slot, None)
            for sources, _ in self.open.values():
                sources.pop(slot, None)
        for number in changes.abandoned:
            # One that failed is not open any more.
            self.open.pop(number, None)
        for stages in changes.stages:
            if stages.begun:
                assert len({source.shape_key for source in stages.begun}) == 1
                self.runs.append(len(stages.begun))
                is_image = stages.begun[0].kind is InputKind.IMAGE
                sources = dict(zip(stages.slots, stages.begun, strict=True))
                self.open[stages.run] = sources, NUM_STAGES if is_image else 1
            sources, num_left = self.open.pop(stages.run)
            assert 0 < stages.num_stages <= num_left
            assert stages.is_last == (stages.num_stages == num_left)
            if stages.is_last:
                for slot, source in sources.items():
                    self.products[slot] = json.loads(source.arrays["rows"].data)
            else:
                self.open[stages.run] = sources, num_left - stages.num_stages

    def corrupt(self, batch: ScheduledBatch) -> None:
        """Fail while a step is submitted or, if steps run ahead, while it is waited for."""
        if self.runs_ahead:
            self.change(batch.moves)
        else:
            self.change(replace(batch.moves, stages=batch.moves.stages[:-1]))
            for stages in batch.moves.stages[-1:]:
                self.open.pop(stages.run, None)
        super().corrupt(batch)

    def run(
        self,
        batch: ScheduledBatch,
        failed: frozenset[int] = frozenset(),
        bad_slots: frozenset[int] = frozenset(),
    ) -> StepOutput:
        self.change(batch.moves)
        rows = tuple(self._with_inputs(row) for row in batch.sequences)
        return super().run(replace(batch, sequences=rows), failed, bad_slots)

    def _with_inputs(self, row: ScheduledSequence) -> ScheduledSequence:
        tokens = list(row.token_ids)
        for part in row.inputs:
            product = self.products[part.slot]
            wanted = product[part.first_row : part.first_row + part.num_rows]
            assert len(wanted) == part.num_rows
            place = slice(part.offset, part.offset + part.num_rows)
            assert tokens[place] == [INPUT_TOKEN] * len(wanted)
            tokens[place] = wanted
        return replace(row, token_ids=tuple(tokens), inputs=())


class InputHarness(SchedulerHarness):
    """A harness whose requests have inputs."""

    def __init__(
        self,
        *,
        num_blocks: int = 40,
        budget: int = 16,
        has_state: bool = False,
        runs_ahead: bool = False,
        stall_ms: float | None = None,
        stores: Sequence[BlockStore] = (),
        block_size: int = 4,
        lasting: str | None = "digest",
    ) -> None:
        super().__init__(
            stores=stores,
            block_size=block_size,
            lasting=lasting,
            num_blocks=num_blocks,
            has_state=has_state,
            runs_ahead=runs_ahead,
            num_tower_stages=NUM_STAGES,
            seconds_of=lambda batch: 1e-3 * (batch.num_tokens + 2 * batch.moves.tokens),
            config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=budget, max_decode_stall_ms=stall_ms
            ),
        )
        self.inputs = self.make_runner(num_blocks, has_state=has_state)
        self.inputs.runs_ahead = runs_ahead
        self._runner = self.inputs
        # Arrays of all inputs.
        self.pixels: list[weakref.ref[HostArray]] = []

    def make_runner(self, num_blocks: int, *, has_state: bool) -> InputRunner:
        return InputRunner(num_blocks, self.block_size, 4 + 3, has_state=has_state)

    def add_parts(
        self,
        name: str,
        parts: Sequence[int | tuple[int, ...]],
        *,
        cost: int = 0,
        may_cut: bool = True,
        **params: int,
    ) -> None:
        """Queue a prompt of tokens and of inputs, which are tuples of what their rows mean."""
        meant, ids, inputs = list[int](), list[int](), list[ModelInput]()
        for part in parts:
            if isinstance(part, int):
                meant.append(part)
                ids.append(part)
                continue
            inputs.append(rows_input(part, len(ids), cost=cost, may_cut=may_cut))
            meant += part
            ids += [INPUT_TOKEN] * len(part)
        self.pixels += [weakref.ref(each.arrays["rows"]) for each in inputs]
        options: dict[str, Any] = {"max_tokens": 5, **params}
        plain = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=tuple(meant),
            params=SamplingParams(**options),
        )
        request = replace(plain, prompt_ids=tuple(ids), inputs=tuple(inputs))
        ends = frozenset[int]() if plain.params.ignore_eos else frozenset({END_ID})
        self.scheduler.add(request, seed=3, end_ids=ends, weights=self.weights)
        outputs = {index: list[int]() for index in range(plain.params.n)}
        self.tracked[name] = Tracked(plain, 3, outputs)
