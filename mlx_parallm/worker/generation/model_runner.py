"""Runs the scheduled batches of one model: forward, LM head, sampling, one evaluation a step."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx

from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.masks import GrammarMasks
from mlx_parallm.models.vision.features import Tower
from mlx_parallm.models.vision.with_tower import TOWER
from mlx_parallm.types.kv_plan import KVPlan
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import ALL_TOKENS, RAW_LOGPROBS
from mlx_parallm.types.step import RunnerInfo, ScheduledBatch, StepOutput
from mlx_parallm.types.tracing import NoTracer, Phase, StepTracer
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.attention.quantisation import kv_cache_dtype_of
from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.generation.cache_layout import CacheLayout
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.grammar_rows import Constraints, GrammarRows
from mlx_parallm.worker.generation.inputs.forward import input_forward
from mlx_parallm.worker.generation.inputs.image_check import ImageCheck
from mlx_parallm.worker.generation.inputs.rows import ImageTokens, find_embedding
from mlx_parallm.worker.generation.inputs.runs import InputComputer
from mlx_parallm.worker.generation.live_model import LiveModel
from mlx_parallm.worker.generation.memory import max_scores
from mlx_parallm.worker.generation.path_choice import choose_path
from mlx_parallm.worker.generation.paths.alone import AlonePath
from mlx_parallm.worker.generation.paths.packed import PackedPath
from mlx_parallm.worker.generation.plan import DecoderChoices
from mlx_parallm.worker.generation.rank_steps import RankTokens
from mlx_parallm.worker.generation.row_selection import vocab_size_of
from mlx_parallm.worker.generation.step_rows import PendingTokens, StepRows, place_proposals
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.generation.submitted_step import ModelStep
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.adapter_check import choose_change_kernels
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.sampling.check import choose_sampling
from mlx_parallm.worker.sampling.logprobs import TargetLogprobs, target_logprobs
from mlx_parallm.worker.sampling.sampler import Sampler, SampleResult
from mlx_parallm.worker.weights.loader import DTYPES, LoadedModel
from mlx_parallm.worker.weights.model_weights import ModelWeights

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs the steps of one model. Implements ``Runner``.

    Every call must come from the thread that loaded the model.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        loaded: LoadedModel,
        layouts: tuple[CacheLayout, ...],
        plan: KVPlan,
        num_blocks: int,
        backend: AttentionBackend,
        draft: DraftModel | None = None,
        *,
        grammars: GrammarCompiler | None = None,
        logprobs_mode: str = RAW_LOGPROBS,
        tracer: StepTracer | None = None,
        choices: DecoderChoices | None = None,
        takes_embeds: bool = False,
        faults: DeviceFaults | None = None,
    ) -> None:
        """Choose how the model runs.

        Args:
            loaded: the model.
            layouts: the layouts of its caches.
            plan: its KV: the block size and the longest sequence.
            num_blocks: the number of KV blocks in the pool.
            backend: the attention backend.
            draft: the draft model, with as many blocks of the same size; None if there is none.
            grammars: compiles the grammars of constrained samples; None if there can be none.
            logprobs_mode: the mode of requests that name none.
            tracer: records the phases of every step; None records nothing.
            choices: the choices of an earlier load, which are taken over; None to make them.
            takes_embeds: True if prompts may bring rows that replace embeddings, if the model
                allows it.
            faults: the failures of the device; None if no other model uses it.
        """
        chosen = choices or DecoderChoices(is_cast=loaded.is_cast, attention=backend.name)
        ranks = None if loaded.sharding is None else loaded.sharding.ranks
        self._tracer, self._faults = tracer or NoTracer(), faults or DeviceFaults()
        self._draft = draft
        self._grammars = GrammarRows(None if grammars is None else GrammarMasks(grammars))
        self._tokens = PendingTokens()
        self._latest: ModelStep | None = None
        vocab_size = vocab_size_of(loaded)
        dtype = DTYPES.get(loaded.dtype, mx.float32)
        kernels, _ = choose_sampling(vocab_size, dtype, chosen.samples_by_kernel, ranks)
        tower: Tower | None = getattr(loaded.model, TOWER, None)
        embedding = (
            find_embedding(loaded.model, vocab_size, dtype, _image_tokens(loaded), ranks)
            if takes_embeds or tower is not None
            else None
        )
        self._sampler = Sampler(kernels, logprobs_mode=logprobs_mode)
        forward = input_forward(loaded, embedding)

        def make_check() -> ImageCheck:
            assert tower is not None, "a model without a tower takes no images"
            return ImageCheck(loaded.model, forward, dtype, tower.num_added_layers)

        choice = choose_path(
            loaded.model,
            layouts,
            backend,
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=plan.block_size,
            dtype=loaded.dtype,
            chosen=chosen.path,
            ranks=ranks,
            make_check=None if tower is None else make_check,
            max_scores=max_scores(layouts, loaded.config, dtype, ranks.size if ranks else 1),
        )
        self._path = choice.path
        #: True if the first step of each shape takes longer than others: see ``warm_up``.
        self.prepares_shapes = isinstance(self._path, PackedPath) and self._path.pads_rows
        products = product_dtype(loaded.dtype)
        change_kernels, _ = choose_change_kernels(products, chosen.adapts_by_kernel, ranks)
        self._path.adapters.kernels = change_kernels
        #: All choices for this model, made here or taken over.
        self.choices = replace(
            chosen,
            path=choice.name,
            why_no_images=chosen.why_no_images or choice.why_no_images,
            samples_by_kernel=kernels is not None,
            adapts_by_kernel=change_kernels is not None,
        )
        layers = AdaptedLayers(
            loaded.model, products, self._path.adapters, loaded.sharding, config=loaded.config
        )
        #: The adapters that batches may name.
        self.adapters = AdapterStore(layers)
        #: The model as training sessions run it.
        self.stock = StockModel(
            loaded.model, choice.selector, self._path.adapters, layers, plan.max_model_len
        )
        #: Replaces and frees the model's weights and KV.
        self.live = LiveModel(ModelWeights(loaded), self._path, self.adapters, draft)
        if self._path.name in {"sequential", "alone"}:
            logger.warning("%s computes one sequence at a time", loaded.path.name)
        self.info = self._facts(loaded, plan, num_blocks, backend, vocab_size)
        self._ranks = ranks and RankTokens(ranks, runs_ahead=self.info.runs_ahead)
        self._forward = forward.on(self._path)
        #: Computes the features of inputs besides tokens.
        self.inputs = self._computer(loaded, tower, dtype)
        self.info = self._with_inputs(takes_embeds=takes_embeds)

    def _with_inputs(self, *, takes_embeds: bool) -> RunnerInfo:
        """Return the facts about the model with those about inputs besides tokens."""
        embedding, takes_images = self._forward.embedding, self.inputs.tower is not None
        if embedding is None:
            return self.info
        kinds = {
            InputKind.PROMPT_EMBEDS: takes_embeds and not embedding.needs_tokens,
            InputKind.IMAGE: takes_images,
        }
        return replace(
            self.info,
            input_width=embedding.width,
            input_kinds=tuple(kind for kind, is_taken in kinds.items() if is_taken),
            num_tower_stages=self.inputs.num_stages,
        )

    def _computer(self, loaded: LoadedModel, tower: Tower | None, dtype: mx.Dtype) -> InputComputer:
        """Return what computes inputs; a model that cannot run images takes none."""
        forward = self._forward
        why_not = self.choices.why_no_images or forward.why_no_images
        if tower is not None and why_not is not None:
            logger.warning("%s takes no images: %s", loaded.path.name, why_not)
            tower = None
        return InputComputer(
            tower,
            dtype,
            two_way=forward.two_way,
            waits=not self.info.runs_ahead,
        )

    def _facts(
        self,
        loaded: LoadedModel,
        plan: KVPlan,
        num_blocks: int,
        backend: AttentionBackend,
        vocab_size: int,
    ) -> RunnerInfo:
        path, draft = self._path, self._draft
        return RunnerInfo(
            path=path.name,
            vocab_size=vocab_size,
            max_model_len=min(plan.max_model_len, num_blocks * plan.block_size),
            num_blocks=num_blocks,
            block_size=plan.block_size,
            kv_bytes=0 if isinstance(path, AlonePath) else num_blocks * plan.block_bytes,
            weight_bytes=loaded.weight_bytes + (draft.weight_bytes if draft else 0),
            has_state=path.has_state,
            attention_backend=backend.name,
            dtype=loaded.dtype,
            kv_cache_dtype=kv_cache_dtype_of(backend.quantisation),
            runs_ahead=backend.runs_ahead and path.name in {"packed", "split"},
            is_compiled=path.is_compiled,
        )

    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Run one step and wait for its results."""
        return self.submit(batch).wait()

    def submit(self, batch: ScheduledBatch) -> ModelStep:
        """See ``Runner.submit``.

        Backends that write pools by MLX's assignment cannot run ahead: while a step in flight holds
        a pool, MLX would copy it instead of writing in place.
        """
        runs_ahead = self.info.runs_ahead
        features = self.inputs.take_begun()
        with self._recovering():
            with self._tracer.span(Phase.BUILD, batch):
                step = self._build(batch)
            with self._tracer.span(Phase.DISPATCH if runs_ahead else Phase.EVALUATE, batch):
                step.start(self._written(), features, wait=not runs_ahead)
        self._latest = step if runs_ahead else None
        return step

    @contextmanager
    def _recovering(self) -> Generator[None]:
        """Drop what a failed step left, so that the next one does not depend on it.

        Most such steps fail because memory runs out.
        """
        try:
            yield
        except Exception as error:
            count = self._faults.count
            self._faults.note(error)
            self._recover(is_late=self._faults.count > count)
            raise

    def recover(self) -> None:
        """See ``WorkerModel``: the device failed late, and any model's step may be what failed."""
        self._recover(is_late=True)

    def _recover(self, *, is_late: bool) -> None:
        self._latest = None
        # Where nothing may wait for the device, all ranks end after a step that failed.
        if self._faults.may_wait:
            self._path.forget_writes()
            if self._draft is not None:
                self._draft.forget_writes()
        if is_late:
            # Slots may have been filled in vain. Batches put their adapters anew.
            self.adapters.release()

    def _build(self, batch: ScheduledBatch) -> ModelStep:
        # Ended matchers are dropped before anything can fail, because no later step names them.
        self._grammars.forget(batch)
        self.adapters.place(batch.adapters)
        rows = StepRows(batch.sequences)
        if not rows.has_pending or self._is_reading(target for _, target in batch.block_copies):
            self._end_latest()
        self._path.copy_blocks(batch.block_copies)
        self._path.copy_state(batch.state_copies)
        token_ids = self._tokens.fill(batch.sequences)
        drafts = self._propose(batch)
        if drafts is not None:
            token_ids = place_proposals(batch.sequences, token_ids, drafts)
        features = self.inputs.features
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
            faults=self._faults,
            recovering=self._recovering,
        )
        if self.info.runs_ahead and any(spec.params.grammar for spec in rows.specs):
            # The masks of the next step may depend on these tokens.
            step.copy_tokens()
        self._tokens.remember(rows.sampled_ids, step.tokens, step.token_copy)
        return step

    def _is_reading(self, blocks: Iterable[int]) -> bool:
        """Return True if the step in flight may read any of these blocks."""
        latest = self._latest
        return latest is not None and any(block in latest.blocks for block in blocks)

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
        self._tokens.remember(rows.sampled_ids, step.tokens)
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


def _image_tokens(loaded: LoadedModel) -> ImageTokens | None:
    """Return what the text model reads in place of an image's ids; None without a tower."""
    if getattr(loaded.model, TOWER, None) is None:
        return None
    text = loaded.config.get("text_config") or loaded.config
    return ImageTokens(int(text.get("hidden_size", 0)), int(text.get("pad_token_id") or 0))
