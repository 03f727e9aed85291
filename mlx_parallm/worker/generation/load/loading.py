"""Loads generation models, and runs ops on them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from mlx_parallm.models.checkpoints.decoder_sizes import context_length, query_heads
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.models.seq2seq.interface import is_encoder_decoder
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.step import KVPlan
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.device.kernel_trial import KernelTrials
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.generation.cache_layout import (
    CacheLayout,
    has_bias,
    kv_shapes,
    probe_layout,
    state_form,
)
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.load.memory import plan_kv
from mlx_parallm.worker.generation.load.plan import (
    DecoderChoices,
    EarlierChoices,
    GenerationPlan,
    GenerationSpec,
)
from mlx_parallm.worker.generation.load.runner import make_draft, make_runner
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.row_selection import vocab_size_of
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.ops import (
    AddAdapter,
    Allocate,
    Checksums,
    CommitWeights,
    ComputeInputs,
    Done,
    DropAdapter,
    DropInputs,
    DropPrepared,
    Load,
    Pending,
    PrepareWeights,
    ReadAdapter,
    ReadBlocks,
    ReadStates,
    Resize,
    Sleep,
    StageAdapter,
    Stages,
    Step,
    Wake,
    WriteBlocks,
    WriteStates,
)
from mlx_parallm.worker.training_ops import CloseTraining, ForgetTraining
from mlx_parallm.worker.weights.loader import CastRule, LoadedModel, open_model
from mlx_parallm.worker.weights.preparing import prepare
from mlx_parallm.worker.worker import Device, Loader, Tensors, TrainingSessions, WorkerModel


class GenerationLoader(Loader):
    """Loads the models of ``GenerationSpec``."""

    def __init__(
        self,
        choose_attention: Callable[..., BackendChoice] = choose_backend,
        make_sessions: Callable[[StockModel], TrainingSessions] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Prepare.

        Args:
            choose_attention: has the parameters of ``choose_backend``.
            make_sessions: returns a place for the training sessions of a model; it raises
                InvalidRequestError for one that cannot be trained. None: there are none.
            ranks: the processes that compute the models together, each with its part; all must
                execute the same ops. None if there is this one alone.
        """
        self.ranks = ranks
        self.choose_attention = choose_attention
        self.make_sessions = make_sessions

    @override
    def begin(self, op: Load, device: Device) -> PendingGenerator:
        return PendingGenerator(self, op, device)


class PendingGenerator(Pending[GenerationPlan]):
    """A model whose weights are read in stages. Implements ``PendingLoad``.

    Attributes:
        num_bytes: size of its weights.
        model: the model, once ``wait`` has returned.
    """

    def __init__(self, loader: GenerationLoader, op: Load, device: Device) -> None:
        """Open the folder; no parameter is read.

        Raises:
            ConfigError: a setting does not suit the model.
            ModelLoadError: the model cannot be loaded.
        """
        self.model: GeneratorModel | None = None
        self._loader = loader
        self._op = op
        self._device = device
        spec: GenerationSpec = op.spec
        _refuse_draft(spec, loader.ranks)
        chosen = None if op.plan is None else op.plan.choices
        self._trials = KernelTrials(None if chosen is None else chosen.kernels, loader.ranks)
        rule = CastRule(None if chosen is None else chosen.is_cast, spec.free_bytes, loader.ranks)
        self._opened = open_model(
            spec.config, spec.path, cast=rule, trials=self._trials, ranks=loader.ranks
        )
        if is_encoder_decoder(self._opened.loaded.model):
            _refuse_for_sources(spec)
        self._parts = list(self._opened.parts())
        self.num_bytes = self._opened.loaded.weight_bytes

    @property
    @override
    def num_stages(self) -> int:
        return len(self._parts) + 1

    @override
    def advance(self) -> None:
        """Read the next part of the weights; raise ModelLoadError if it cannot be."""
        self._parts.pop(0)()

    @override
    def wait(self) -> GenerationPlan:
        """Read what is left of the weights and choose the attention backend; raise as above."""
        while self._parts:
            self.advance()
        op, loader = self._op, self._loader
        with load_failures(op.spec.path):
            loaded = self._opened.finish()
            weights = _planned(op.spec, op.plan, loader, loaded, self._trials)
        self.model = GeneratorModel(weights, self._device, loader.make_sessions)
        return weights.plan


@dataclass(frozen=True, slots=True)
class _Weights:
    """A model in memory that has no KV pool yet.

    Attributes:
        spec: what was to be loaded.
        loaded: the model and its weights.
        layouts: the layouts of its caches.
        attention: the attention backend.
        plan: the choices so far, and what the model needs.
        earlier: has the choices of an earlier load of the same spec, which are taken over; None
            for a first load.
    """

    spec: GenerationSpec
    loaded: LoadedModel
    layouts: tuple[CacheLayout, ...]
    attention: BackendChoice
    plan: GenerationPlan
    earlier: GenerationPlan | EarlierChoices | None


def _planned(
    spec: GenerationSpec,
    earlier: GenerationPlan | EarlierChoices | None,
    loader: GenerationLoader,
    loaded: LoadedModel,
    trials: KernelTrials,
) -> _Weights:
    """Return a model with its plan, for which choices of an ``earlier`` load are taken over."""
    chosen = None if earlier is None else earlier.choices
    vocab_size = vocab_size_of(loaded)
    layouts = probe_layout(loaded.model)
    attention = _attention(spec, loaded, layouts, chosen, loader)
    kv = _kv_plan(spec, loaded, layouts, attention.backend)
    choices = chosen or DecoderChoices(
        is_cast=loaded.is_cast, attention=attention.backend.name, kernels=dict(trials.found)
    )
    plan = GenerationPlan(
        kv=kv,
        model_config=loaded.config,
        vocab_size=vocab_size,
        weight_bytes=loaded.weight_bytes,
        choices=choices,
        block_layout=attention.backend.block_layout,
        state_layout=state_form(layouts),
    )
    return _Weights(spec, loaded, layouts, attention, plan, earlier)


def _kv_plan(
    spec: GenerationSpec,
    loaded: LoadedModel,
    layouts: tuple[CacheLayout, ...],
    backend: AttentionBackend,
) -> KVPlan:
    """Return the KV memory that a model could use.

    Raises:
        ConfigError: ``max_model_len`` or ``max_source_len`` exceeds the model's own; the message
            names the model.
    """
    settings = spec.settings
    max_len = settings.max_len_of(spec.config, context_length(loaded.config))
    try:
        return plan_kv(
            layouts,
            loaded.config,
            settings.cache,
            settings.scheduler,
            max_len,
            backend,
            _max_source_len(spec, loaded.model),
        )
    except ConfigError as problem:
        raise ConfigError(f"{spec.path}: {problem}") from None


def _attention(
    spec: GenerationSpec,
    loaded: LoadedModel,
    layouts: tuple[CacheLayout, ...],
    chosen: DecoderChoices | None,
    loader: GenerationLoader,
) -> BackendChoice:
    """Return the attention backend of a model; ``chosen`` are the choices of an earlier load."""
    cache, settings = spec.settings.cache, spec.settings.scheduler
    num_parts = 1 if loader.ranks is None else loader.ranks.size
    return loader.choose_attention(
        replace(cache, kv_cache_dtype=spec.config.kv_cache_dtype or cache.kv_cache_dtype),
        kv_shapes(layouts),
        query_heads(loaded.config) // num_parts,
        is_bounded=bool(settings.max_decode_stall_ms),
        chosen=None if chosen is None else chosen.attention,
        ranks=loader.ranks,
        has_bias=has_bias(layouts),
    )


class GeneratorModel(WorkerModel):
    """A generation model."""

    def __init__(
        self,
        weights: _Weights,
        device: Device,
        make_sessions: Callable[[StockModel], TrainingSessions] | None = None,
    ) -> None:
        self._weights: _Weights | None = weights
        self._device = device
        self._make_sessions = make_sessions
        self._sessions: TrainingSessions | None = None
        self._allocated: ModelRunner | None = None

    @property
    def _runner(self) -> ModelRunner:
        """The runner, which exists after ``Allocate``."""
        assert self._allocated is not None, "the model has no KV pool yet"
        return self._allocated

    @override
    def begin(self, op: Any, tensors: Mapping[str, Tensors]) -> Pending[Any]:
        match op:
            case Step():
                return self._runner.submit(op.batch)
            case ComputeInputs():
                arrays = [tensors[handle] for handle in op.handles]
                return self._runner.begin_inputs(op, arrays)
            case ReadBlocks() | WriteBlocks() | ReadStates() | WriteStates():
                return self._move(op)
            case DropInputs():
                return Done(self._runner.drop_inputs(op.slots))
            case Allocate():
                return Stages(self._allocate(op))
            case AddAdapter() | StageAdapter() | ReadAdapter() | DropAdapter():
                return self._runner.adapters.begin(op, tensors)
            case PrepareWeights():
                return Done(prepare(self._runner.live, op, tensors))
            case CommitWeights() | DropPrepared() | Sleep() | Wake() | Checksums():
                return Done(self._change(op))
            case Resize():
                return Done(self._runner.resize(op.num_blocks))
            case _:
                return self._train(op)

    def _move(self, op: ReadBlocks | WriteBlocks | ReadStates | WriteStates) -> Pending[Any]:
        match op:
            case ReadBlocks():
                return self._runner.read_blocks(op.blocks)
            case WriteBlocks():
                return self._runner.write_blocks(op.blocks, op.data)
            case ReadStates():
                return self._runner.read_states(op.slots)
            case WriteStates():
                return self._runner.write_states(op.slots, op.data)

    def _train(self, op: Any) -> Pending[Any]:
        """Begin an op of a training session."""
        assert self._make_sessions is not None, f"a generation model does not know {op}"
        if self._sessions is None and isinstance(op, CloseTraining | ForgetTraining):
            # A model that cannot be trained would raise, and its update or sleep fail.
            return Done(None)
        self._sessions = self._sessions or self._make_sessions(self._runner.stock)
        return self._sessions.begin(op)

    def _forget_sessions(self) -> None:
        """Forget what was trained on weights that change."""
        if self._sessions is not None:
            self._sessions.release()

    @override
    def recover(self) -> None:
        if self._allocated is not None:
            self._allocated.recover()
        if self._sessions is not None:
            self._sessions.recover()

    @override
    def release(self) -> None:
        """Free the arrays now: this object is in cycles, which are collected later or never."""
        self._forget_sessions()
        if self._allocated is not None:
            self._allocated.clear_inputs()
            self._allocated.live.sleep(2)
        self._weights = None

    def take_weights(self) -> _Weights:
        """Return the weights, for the target model of which this model becomes the draft model."""
        assert self._weights is not None
        return self._weights

    def _change(
        self, op: CommitWeights | DropPrepared | Sleep | Wake | Checksums
    ) -> bool | dict[str, str] | None:
        live = self._runner.live
        if isinstance(op, Sleep):
            self._forget_sessions()
        match op:
            case CommitWeights():
                live.commit()
                self._forget_sessions()
                return None
            case DropPrepared():
                return live.drop_prepared()
            case Sleep():
                self._runner.clear_inputs()
                return live.sleep(op.level)
            case Wake():
                return live.wake(op.tag)
            case Checksums():
                return live.checksums()

    def _allocate(self, op: Allocate) -> Generator[None, None, GenerationPlan]:
        """Allocate the KV pool, choose how the model runs, and return the complete plan."""
        weights, self._weights = self._weights, None
        assert weights is not None, "the model has a KV pool already"
        earlier, kv, draft, draft_choices = weights.earlier, weights.plan.kv, None, None
        if op.draft is not None:
            model: Any = self._device.take(op.draft)
            chosen = None if earlier is None else earlier.draft
            draft_weights: _Weights = model.take_weights()
            drafting = _draft_of(draft_weights, chosen, kv.block_size, op.num_blocks)
            draft, draft_choices = yield from drafting
            # A block has KV of both models, for the same number of tokens.
            kv = replace(kv, block_bytes=kv.block_bytes + draft_weights.plan.kv.block_bytes)
        runner, choices = yield from make_runner(
            weights.loaded,
            weights.layouts,
            kv,
            op.num_blocks,
            weights.attention.backend,
            draft,
            grammars=op.grammars,
            logprobs_mode=weights.spec.settings.logprobs_mode,
            tracer=self._device.tracer,
            choices=weights.plan.choices,
            takes_embeds=weights.spec.settings.enable_prompt_embeds,
            speculates=weights.spec.settings.speculative is not None,
            max_source_len=_max_source_len(weights.spec, weights.loaded.model),
            faults=self._device.faults,
            dispatcher=self._device.dispatcher,
        )
        settings = weights.spec.settings
        if host_bytes := settings.cache.kv_host_bytes:
            runner.reserve_host_memory(host_bytes // settings.num_host_shares)
        self._allocated = runner
        return replace(
            weights.plan,
            kv=kv,
            choices=choices,
            draft=draft_choices,
            info=runner.info,
            prepares_shapes=runner.prepares_shapes,
        )


def _max_source_len(spec: GenerationSpec, model: Any) -> int:
    """Return the longest source, in positions; 0 if the model has no encoder.

    Raises:
        ConfigError: ``max_source_len`` exceeds what the encoder reads.
    """
    if not is_encoder_decoder(model):
        return 0
    return spec.settings.max_source_len_of(spec.config, model.max_source_len)


def _refuse_for_sources(spec: GenerationSpec) -> None:
    """Raise ConfigError if a setting does not suit an encoder-decoder."""
    speculative = spec.settings.speculative
    if speculative is not None and speculative.model is not None:
        raise ConfigError(
            f"--speculative-config: {spec.path} is an encoder-decoder, which neither has a draft "
            "model nor is one; n-grams can propose tokens to it."
        )
    if spec.settings.enable_prompt_embeds:
        raise ConfigError(
            f"--enable-prompt-embeds: {spec.path} is an encoder-decoder, whose prompts are tokens."
        )


def _refuse_draft(spec: GenerationSpec, ranks: Ranks | None) -> None:
    """Raise ConfigError if a model over ranks is to have a draft model."""
    speculative = spec.settings.speculative
    if ranks is not None and speculative is not None and speculative.model is not None:
        raise ConfigError(
            f"--speculative-config: the draft model {speculative.model} cannot propose tokens to "
            f"{spec.path}, which {ranks.size} ranks compute; n-grams can."
        )


def _draft_of(
    weights: _Weights, chosen: DecoderChoices | None, block_size: int, num_blocks: int
) -> Generator[None, None, tuple[DraftModel, DecoderChoices]]:
    """Return a draft model whose pools have the target model's blocks, and its choices."""
    return make_draft(
        weights.loaded,
        weights.layouts,
        weights.attention.backend,
        num_blocks=num_blocks,
        block_size=block_size,
        choices=chosen or weights.plan.choices,
    )
