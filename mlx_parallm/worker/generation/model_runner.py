"""Runs the scheduled batches of one model: forward, LM head, sampling, one evaluation a step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.grammar.masks import GrammarMasks
from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import EarlierStepError
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import ALL_TOKENS
from mlx_parallm.types.step import (
    Phase,
    Runner,
    RunnerInfo,
    ScheduledBatch,
    StepOutput,
    StepTracer,
)
from mlx_parallm.worker.device.dispatcher import Dispatcher
from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.device.step_arrays import StepArrays
from mlx_parallm.worker.generation.block_moves import BlockMoves
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.host_moves import HostMoves
from mlx_parallm.worker.generation.inputs.forward import InputForward
from mlx_parallm.worker.generation.inputs.runs import InputComputer, Tensors
from mlx_parallm.worker.generation.inputs.sources import SourceEncoder, StepOrder
from mlx_parallm.worker.generation.live_model import LiveModel
from mlx_parallm.worker.generation.model_step import ModelStep
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.generation.rank_steps import RankTokens
from mlx_parallm.worker.generation.state_moves import StateMoves
from mlx_parallm.worker.generation.step_rows import (
    Constraints,
    GrammarRows,
    PendingTokens,
    StepRows,
    place_proposals,
)
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.generation.value_heads import ValueHeads
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.ops import ComputeInputs, Pending
from mlx_parallm.worker.sampling.logprobs import TargetLogprobs, target_logprobs
from mlx_parallm.worker.sampling.sampler import Sampler, SampleResult


class ModelRunner(Runner):
    """Runs the steps of one model.

    Every call must come from the thread that loaded the model.
    """

    def __init__(  # noqa: PLR0913 - parts, by name
        self,
        path: ForwardPath,
        forward: InputForward,
        sampler: Sampler,
        info: RunnerInfo,
        *,
        inputs: InputComputer,
        adapters: AdapterStore,
        live: LiveModel,
        stock: StockModel,
        draft: DraftModel | None,
        grammars: GrammarMasks | None,
        values: ValueHeads,
        ranks: Ranks | None,
        tracer: StepTracer,
        faults: DeviceFaults,
        dispatcher: Dispatcher,
        arrays: StepArrays,
    ) -> None:
        """Prepare; see ``load.runner.make_runner``.

        Args:
            path: runs the forward of packed rows.
            forward: runs forwards by the path, with inputs besides tokens.
            sampler: draws tokens.
            info: facts about the model.
            inputs: computes the features of inputs besides tokens.
            adapters: those that batches may name.
            live: replaces and frees the model's weights and KV.
            stock: the model as training sessions run it.
            draft: the draft model; None if there is none.
            grammars: the masks of constrained samples; None if there can be none.
            values: the value heads; none if the model has none and no adapter brings one.
            ranks: the processes that compute the model together; None for one process.
            tracer: records the phases of every step.
            faults: the failures of the device.
            dispatcher: submits steps that run ahead.
            arrays: brings their tokens to the host.
        """
        self._path = path
        self._values = values
        self._forward = forward
        self._sampler = sampler
        self.info = info
        self.inputs = inputs
        self.adapters = adapters
        self.live = live
        self.stock = stock
        self._draft = draft
        self._grammars = GrammarRows(grammars)
        self._ranks = ranks and RankTokens(ranks, runs_ahead=info.runs_ahead)
        self._tracer = tracer
        self._faults = faults
        self._dispatcher = dispatcher
        self._arrays = arrays
        self._tokens = PendingTokens()
        self._latest: ModelStep | None = None
        # What stopped the submission of the step in flight.
        self._refusal: Exception | None = None
        path.before_traces(dispatcher.join)
        pools = [path.pools, None if draft is None else draft.pools]
        self._moves = HostMoves(ranks, faults, self._joined, runs_ahead=info.runs_ahead)
        self._blocks = BlockMoves([each for each in pools if each is not None], self._moves)
        self._states = StateMoves(path.states, self._moves)
        self._sources: SourceEncoder | None = None
        if is_encoder_decoder(stock.model):
            assert isinstance(path, PackedPath), "an encoder-decoder runs packed or not at all"
            order = StepOrder(
                recovering=self._joined,
                before_writes=self._end_readers,
                compute=inputs.compute,
            )
            self._sources = SourceEncoder(stock.model, path, adapters, order)

    @property
    def prepares_shapes(self) -> bool:
        """True if the first step of each shape takes longer than others: see ``warm_up``."""
        return isinstance(self._path, PackedPath) and self._path.pads_rows

    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step and wait for its results."""
        return self.submit(batch).wait()

    @override
    def submit(self, batch: ScheduledBatch) -> ModelStep:
        """See ``Runner.submit``.

        Backends that write pools by MLX's assignment cannot run ahead: while a step in flight holds
        a pool, MLX would copy it instead of writing in place.
        """
        with self._recovering():
            rows = StepRows(batch.sequences)
            if not self._builds_beside(batch, rows):
                self._join(batch)
            features = self.inputs.take_begun()
            self._begin_step()
            with self._tracer.span(Phase.BUILD, batch):
                step = self._build(batch, rows)
            self._join(batch)
            if not self.info.runs_ahead:
                with self._tracer.span(Phase.EVALUATE, batch):
                    step.run(self._written())
                return step
            with self._tracer.span(Phase.DISPATCH, batch):
                step.start(self._written(), features, self._dispatcher)
            self._latest = step
            if self._dispatcher.runs_beside:
                self._path.settle_writes()
        return step

    def _join(self, batch: ScheduledBatch) -> None:
        """Wait until nothing is being submitted.

        Raises:
            EarlierStepError: the step in flight could not be submitted.
        """
        with self._tracer.span(Phase.JOIN, batch):
            self._dispatcher.join()
        self._check_latest()

    def _check_latest(self) -> None:
        """Raise EarlierStepError if the step in flight was refused, until its ``wait`` has raised.

        MLX would evaluate what is left of its graph with what is computed from it.
        """
        if self._latest is not None:
            self._refusal = self._latest.why_refused()
        if self._refusal is not None:
            raise EarlierStepError("The step before could not be submitted.") from self._refusal

    def _begin_step(self) -> None:
        self._path.begin_step()
        if self._draft is not None:
            self._draft.begin_step()

    def _builds_beside(self, batch: ScheduledBatch, rows: StepRows) -> bool:
        """True if the step can be built while the one before is being submitted.

        It computes nothing on the device until it is submitted, and all it takes from the step
        before are tokens.
        """
        return (
            self._dispatcher.runs_beside
            and self._path.builds_beside
            and self._draft is None
            and self._ranks is None
            and rows.has_pending
            and rows.are_plain
            and not self.inputs.has_begun
            and not (batch.block_copies or batch.state_copies or batch.adapters)
        )

    def begin_inputs(self, op: ComputeInputs, inputs: Sequence[Tensors]) -> Pending[None]:
        """Begin to compute inputs, whose arrays ``inputs`` are."""
        if op.kind is not InputKind.SOURCE:
            return self.inputs.begin(op.slots, op.kind, inputs)
        assert self._sources is not None, "a source was admitted that the model does not take"
        return self._sources.begin(op.slots, op.places, inputs)

    def drop_inputs(self, slots: Sequence[int]) -> None:
        """Forget the products in some slots, computed or not."""
        self.inputs.features.drop(slots)
        if self._sources is not None:
            self._sources.drop(slots)

    def clear_inputs(self) -> None:
        """Forget all products, computed or not, except those in blocks; no step is in flight."""
        self.inputs.take_begun()
        self.inputs.features.clear()
        if self._sources is not None:
            self._sources.clear()

    def resize(self, num_blocks: int) -> RunnerInfo:
        """Allocate the KV pool anew; return the facts with its size. See ``Resize``."""
        info = self.info
        self.clear_inputs()
        self.live.resize(num_blocks, info.num_blocks)
        self.info = replace(
            info,
            num_blocks=num_blocks,
            kv_bytes=info.kv_bytes // info.num_blocks * num_blocks,
            max_model_len=min(info.max_model_len, num_blocks * info.block_size),
        )
        return self.info

    def reserve_host_memory(self, num_bytes: int) -> None:
        """Have host memory ready for so many bytes of blocks.

        A model with a state has rows of two sizes, so memory is taken as they come.

        Raises:
            StepError: there is not so much.
        """
        if not self.info.has_state:
            self._moves.reserve(self._blocks.block_bytes, num_bytes)

    def read_blocks(self, blocks: Sequence[int]) -> Pending[tuple[Buffer, ...]]:
        """Begin to read KV blocks, as the steps before leave them; see ``ReadBlocks``."""
        with self._joined():
            return self._blocks.read(blocks)

    def write_blocks(self, blocks: Sequence[int], data: Sequence[Buffer]) -> Pending[None]:
        """Begin to write KV blocks, before the steps that follow; see ``WriteBlocks``."""
        with self._joined():
            self._end_readers(blocks)
            if self._sources is not None:
                self._sources.doubts.forget(blocks)
            return self._blocks.write(blocks, data)

    def read_states(self, slots: Sequence[int]) -> Pending[tuple[Buffer, ...]]:
        """Begin to read states, as the steps before leave them; see ``ReadStates``."""
        with self._joined():
            return self._states.read(slots)

    def write_states(self, slots: Sequence[int], data: Sequence[Buffer]) -> Pending[None]:
        """Begin to write states, before the steps that follow; see ``WriteStates``."""
        with self._joined():
            return self._states.write(slots, data)

    @contextmanager
    def _joined(self) -> Generator[None]:
        """Do as ``_recovering``, while nothing is being submitted to the device.

        A step that was refused fails by its own ``wait``, and not what is done here.
        """
        self._dispatcher.join()
        with suppress(EarlierStepError), self._recovering():
            self._check_latest()
        with self._recovering():
            yield

    @contextmanager
    def _recovering(self) -> Generator[None]:
        """Drop what a failed step left, so that the next one does not depend on it.

        Most such steps fail because memory runs out.
        """
        try:
            yield
        except Exception as error:
            self._dispatcher.join()
            count = self._faults.count
            self._faults.note(error)
            self._recover(is_late=self._faults.count > count)
            if error is self._refusal:
                # The refused step itself has raised it.
                self._refusal = None
            raise

    def recover(self) -> None:
        """See ``WorkerModel``: the device failed late, and any model's step may be what failed."""
        self._recover(is_late=True)

    def _recover(self, *, is_late: bool) -> None:
        if self._latest is not None:
            self._refusal = self._refusal or self._latest.why_refused()
        self._latest = None
        # Where nothing may wait for the device, all ranks end after a step that failed.
        if self._faults.may_wait:
            self._path.forget_writes()
            if self._draft is not None:
                self._draft.forget_writes()
        if is_late:
            # Slots may have been filled in vain. Batches put their adapters anew.
            self.adapters.release()

    def _build(self, batch: ScheduledBatch, rows: StepRows) -> ModelStep:
        # Ended matchers are dropped before anything can fail, because no later step names them.
        self._grammars.forget(batch)
        self.adapters.place(batch.adapters)
        if not rows.has_pending or self._is_reading(target for _, target in batch.block_copies):
            self._end_latest()
        self._path.copy_blocks(batch.block_copies)
        snapshots = self._path.capture_state(batch.state_copies[: batch.num_captures])
        self._path.copy_state(batch.state_copies[batch.num_captures :])
        token_ids = self._tokens.fill(batch.sequences)
        drafts = self._propose(batch)
        if drafts is not None:
            token_ids = place_proposals(batch.sequences, token_ids, drafts)
        features = self.inputs.features
        with self.stock.selector.noting() as noted:
            logits = self._forward.logits(batch.sequences, token_ids, rows.logit_rows, features)
        if self._ranks is not None and not self._ranks.samples:
            return self._followed(self._ranks, logits, rows)
        constraints = self._constrain(logits, rows)
        sampled = self._sample(logits, rows, token_ids, constraints)
        step = ModelStep(
            rows,
            sampled,
            self._score(logits, rows),
            drafts,
            constraints.failed,
            values=self._values.of_rows(rows, noted, is_selected=self._path.selects_rows),
            snapshots=snapshots,
            doubts=None if self._sources is None else self._sources.doubts,
            faults=self._faults,
            recovering=self._recovering,
        )
        if self._dispatcher.runs_beside or (
            self.info.runs_ahead and any(spec.params.grammar for spec in rows.specs)
        ):
            # They are read while the next step is submitted, or for the masks of the next step.
            step.copy_tokens(self._arrays)
        self._tokens.remember(rows.sampled_ids, step.next_tokens, step.token_copy)
        return step

    def _is_reading(self, blocks: Iterable[int]) -> bool:
        """Return True if the step in flight may read any of these blocks."""
        latest = self._latest
        return latest is not None and any(block in latest.blocks for block in blocks)

    def _end_readers(self, blocks: Iterable[int]) -> None:
        """Wait for the step in flight if it may read these blocks, which are written next."""
        if self._is_reading(blocks):
            self._end_latest()

    def _end_latest(self) -> None:
        """Wait for the step in flight, if there is one, because nothing else orders this one.

        It may read blocks that this step writes: those of a sequence that was preempted, or has
        ended, in between. Writes follow a pending token, because all rows of a step are computed
        together; copies do not.
        """
        # It is forgotten first, because if it cannot end, it must fail no step but this one.
        latest, self._latest = self._latest, None
        if latest is not None:
            with self._tracer.span(Phase.WAIT):
                latest.end()

    def _followed(self, ranks: RankTokens, logits: mx.array, rows: StepRows) -> ModelStep:
        """Return the step of a rank that does not sample; its tokens mean nothing to the caller."""
        received = ranks.received(logits, len(rows.sampled)) if rows.logit_rows else None
        step = ModelStep(rows, received, {}, faults=self._faults, recovering=self._recovering)
        self._tokens.remember(rows.sampled_ids, step.next_tokens)
        return step

    def _propose(self, batch: ScheduledBatch) -> mx.array | None:
        if self._draft is None:
            return None
        return self._draft.propose(batch, self.info.vocab_size)

    def _written(self) -> list[mx.array]:
        return self._path.arrays() + (self._draft.arrays() if self._draft is not None else [])

    def _constrain(self, logits: mx.array, rows: StepRows) -> Constraints:
        return self._grammars.constrain(
            rows, lambda: mx.async_eval(logits, self._written()), self._tokens.read
        )

    def _sample(
        self, logits: mx.array, rows: StepRows, token_ids: mx.array, constraints: Constraints
    ) -> SampleResult | None:
        if not rows.sampled:
            return None
        if len(rows.sampled) < len(rows.logit_rows):
            logits = logits[mx.array(rows.sampled)]
        sampled = self._sampler(logits, rows.specs, rows.pending(token_ids), constraints.masks)
        return sampled if self._ranks is None else self._ranks.shared(sampled)

    def _score(self, logits: mx.array, rows: StepRows) -> dict[int, TargetLogprobs]:
        return {
            sequence.seq_id: target_logprobs(
                logits[first : first + len(sequence.target_ids)],
                sequence.target_ids,
                self.info.vocab_size if top == ALL_TOKENS else top,
                entropy=sequence.prompt_entropy,
            )
            for sequence, first in rows.scored
            if (top := sequence.prompt_logprobs) is not None
        }
