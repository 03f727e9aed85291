"""Wires the real parts of an engine from a configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mlx_parallm.demo_models.folders import DEMO_NAME
from mlx_parallm.engine.build import fetch_model, model_names
from mlx_parallm.engine.interface import (
    BuildContext,
    BuiltModel,
    ModelFolder,
    OpenModel,
    TellProgress,
)
from mlx_parallm.engine.live_weights import LiveWeights
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import Policies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.formats import reasoning_format_of, tool_format_of
from mlx_parallm.generation.kv_cache.budget import KVShare, share_budget
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics, GenerationFamilies
from mlx_parallm.generation.model import GENERATION_TRAITS, GenerationModel
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer, load_tokenizer
from mlx_parallm.types.errors import ConfigError, InvalidRequestError, ModelLoadError
from mlx_parallm.types.kv_plan import KVPlan
from mlx_parallm.types.step import RunnerInfo
from mlx_parallm.types.tracing import StepTracer
from mlx_parallm.units import readable_bytes
from mlx_parallm.worker.attention.backend_choice import BackendChoice, choose_backend
from mlx_parallm.worker.device.properties import backend_name, free_memory_bytes, give_back_memory
from mlx_parallm.worker.generation.cache_layout import CacheLayout, kv_shapes, probe_layout
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.memory import config_value, context_length, plan_kv, query_heads
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.row_selection import embedding_rows
from mlx_parallm.worker.generation.warm_up import WarmUp
from mlx_parallm.worker.weights.loader import LoadedModel, load_model
from mlx_parallm.worker.weights.revision import folder_revision

logger = logging.getLogger(__name__)

# A step of so many tokens keeps an NVIDIA GPU busy; elsewhere it would take too long.
CUDA_TOKEN_BUDGET = 2048
# KV of small models on the CPU; larger ones get as much as their weights take.
CPU_KV_BYTES = 1 << 30

# Free memory that KV must leave to the arrays of a step.
STEP_BYTES = 256 << 20

# Sequences that decode, up to which proposals pay: on a GPU a step of some hundred rows takes
# little longer than one of a few; on the CPU every row takes its time.
GPU_BATCH_SIZE = 32
CPU_BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class _DraftWeights:
    """A draft model in memory; ``block_bytes`` is what its KV adds to a block of the budget."""

    loaded: LoadedModel
    layouts: tuple[CacheLayout, ...]
    attention: BackendChoice
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _Weights:
    """A model in memory, before it has any KV."""

    config: ModelConfig
    loaded: LoadedModel
    layouts: tuple[CacheLayout, ...]
    tokenizer: ParallmTokenizer
    attention: BackendChoice
    plan: KVPlan
    draft: _DraftWeights | None = None

    @property
    def weight_bytes(self) -> int:
        """Of the model and its draft model."""
        return self.loaded.weight_bytes + (self.draft.loaded.weight_bytes if self.draft else 0)


class GenerationKind:
    """Models that continue tokens. Implements ``Kind``; it shares out the memory that is left."""

    traits = GENERATION_TRAITS

    def declare(self, families: MetricFamilies) -> None:
        """See ``Kind``."""
        families.of(GenerationFamilies)

    def serves(self, config: ModelConfig, path: Path) -> bool:
        """See ``Kind``: mlx_lm says at load what it cannot run."""
        del config, path
        return True

    def build(self, models: Collection[ModelFolder], context: BuildContext) -> list[BuiltModel]:
        """Load models and share one byte budget of KV among them; see ``Kind``."""
        settings = context.settings
        loaded = _load_all(models, settings, context.on_progress)
        shares = _kv_shares(loaded, settings.cache)
        for share in shares:
            logger.info("%s: %s", share.name, share)
        return [
            _assemble(one, share, settings, context.families, context.tracer)
            for one, share in zip(loaded, shares, strict=True)
        ]

    def read(self, config: ModelConfig, path: Path, settings: EngineConfig) -> OpenModel:
        """Refuse; see ``Kind``."""
        del path, settings
        raise InvalidRequestError(
            f"{config.path} is no encoder. Models that generate are loaded when the server starts: "
            "their KV memory is planned there.",
            param="model",
        )


def kv_shares(models: Collection[ModelFolder], settings: EngineConfig) -> list[KVShare]:
    """Load models and return what KV each would get, on the calling thread.

    Raises as ``Kind.build`` does.
    """
    return _kv_shares(_load_all(models, settings, lambda _text, _share: None), settings.cache)


def _load_all(
    models: Collection[ModelFolder], settings: EngineConfig, on_progress: TellProgress
) -> list[_Weights]:
    loaded: list[_Weights] = []
    for one in models:
        with load_failures(one.path):
            loaded.append(_load(one.config, one.path, settings, on_progress))
    return loaded


def with_token_budget(config: SchedulerConfig, backend: str) -> SchedulerConfig:
    """The limits with this backend's token budget where none is given."""
    if config.max_num_batched_tokens is not None or backend != "cuda":
        return config
    return replace(config, max_num_batched_tokens=CUDA_TOKEN_BUDGET)


def _kv_shares(models: Sequence[_Weights], cache: CacheConfig) -> list[KVShare]:
    """Share the KV memory among the models; log a warning for each whose context is cut.

    Raises:
        ConfigError: there is not even a block for each.
    """
    plans = [one.plan for one in models]
    blocks = share_budget(plans, _kv_budget(models, cache))
    names = [model_names(one.config)[0] for one in models]
    shares = [KVShare(*one) for one in zip(names, plans, blocks, strict=True)]
    for share in shares:
        if share.is_cut:
            logger.warning(
                "%s: the context is cut from %d to %d tokens, which is what fits in its share of "
                "the KV memory; raise --kv-cache-memory-bytes or --kv-memory-fraction.",
                share.name,
                share.plan.max_model_len,
                share.context,
            )
    return shares


def _kv_budget(models: Sequence[_Weights], cache: CacheConfig) -> int:
    """Return the bytes of KV for all models: as configured, or what is free and sensible.

    Raises:
        ConfigError: so much is not free.
    """
    if cache.kv_cache_bytes is not None:
        return _free_for_kv(cache.kv_cache_bytes) if models else 0
    wanted = sum(one.plan.wanted_bytes for one in models)
    free = free_memory_bytes()
    budget = wanted if free is None else min(wanted, int(free * cache.memory_fraction))
    if backend_name() == "cpu":
        # There a pool takes its memory, and the time to fill it, at start.
        budget = min(budget, max(CPU_KV_BYTES, sum(one.weight_bytes for one in models)))
    return budget


def _free_for_kv(num_bytes: int) -> int:
    """Return the number of bytes, which a person asked for.

    Raises:
        ConfigError: so much is not free.
    """
    # What loading took and needs no more would count as taken.
    give_back_memory()
    free = free_memory_bytes()
    if free is not None and num_bytes + STEP_BYTES > free:
        raise ConfigError(
            f"--kv-cache-memory-bytes is {readable_bytes(num_bytes)}; "
            f"{readable_bytes(max(0, free - STEP_BYTES))} are free beside the models."
        )
    return num_bytes


def _load(
    model: ModelConfig, path: Path, config: EngineConfig, on_progress: TellProgress
) -> _Weights:
    name = model_names(model)[0]
    on_progress(f"Loading {name}", 0.0)
    loaded = load_model(model, path)
    layouts = probe_layout(loaded.model)
    tokenizer = load_tokenizer(
        path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code
    )
    attention = _attention(model, config, loaded, layouts)
    plan = plan_kv(
        layouts,
        loaded.config,
        config.cache,
        config.scheduler,
        config.max_len_of(model, context_length(loaded.config)),
        attention.backend,
    )
    on_progress(f"Loading {name}", 1.0)
    draft = _draft_weights(model, config, tokenizer, on_progress)
    if draft is not None:
        plan = replace(plan, block_bytes=plan.block_bytes + draft.block_bytes)
    return _Weights(model, loaded, layouts, tokenizer, attention, plan, draft)


def _attention(
    model: ModelConfig,
    config: EngineConfig,
    loaded: LoadedModel,
    layouts: tuple[CacheLayout, ...],
) -> BackendChoice:
    dtype = model.kv_cache_dtype or config.cache.kv_cache_dtype
    return choose_backend(
        replace(config.cache, kv_cache_dtype=dtype),
        kv_shapes(layouts),
        query_heads(loaded.config),
        is_bounded=config.scheduler.max_decode_stall_ms is not None,
    )


def _draft_weights(
    model: ModelConfig, config: EngineConfig, tokenizer: ParallmTokenizer, on_progress: TellProgress
) -> _DraftWeights | None:
    """The draft model for ``model``, if the configuration has one.

    Raises:
        ConfigError, ModelLoadError: as ``_load_draft``, with the setting's name.
    """
    source = config.speculative and config.speculative.model
    if source is None:
        return None
    try:
        return _load_draft(source, model, config, tokenizer, on_progress)
    except (ConfigError, ModelLoadError) as problem:
        # Without the name it might be the served model that is at fault.
        raise type(problem)(f"--speculative-config: draft model: {problem}") from problem


def _load_draft(
    source: str,
    model: ModelConfig,
    engine: EngineConfig,
    tokenizer: ParallmTokenizer,
    on_progress: TellProgress,
) -> _DraftWeights:
    """A draft model for ``model``.

    Raises:
        ConfigError: its tokens are not those of the model.
        ModelLoadError: it could not be fetched or loaded.
    """
    config = ModelConfig(path=source, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
    path = fetch_model(config, source, on_progress)
    own = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    if not tokenizer.has_vocabulary_of(own):
        raise ConfigError(
            f"{source} has other tokens than {model_names(model)[0]}; both need the same "
            "vocabulary."
        )
    loaded = load_model(config, path)
    with load_failures(path):
        layouts = probe_layout(loaded.model)
    choice = _attention(model, engine, loaded, layouts)
    per_token = sum(choice.backend.bytes_per_token(shape) for shape in kv_shapes(layouts))
    return _DraftWeights(loaded, layouts, choice, per_token * engine.cache.block_size)


def _draft_model(one: _Weights, num_blocks: int) -> DraftModel | None:
    draft = one.draft
    if draft is None:
        return None
    return DraftModel(
        draft.loaded,
        draft.layouts,
        draft.attention.backend,
        num_blocks=num_blocks,
        block_size=one.plan.block_size,
    )


def speculative_for(
    config: SpeculativeConfig | None, info: RunnerInfo, name: str
) -> SpeculativeConfig | None:
    """What a model speculates with.

    Raises:
        ConfigError: the model keeps a state, which cannot be taken back.
    """
    if config is None:
        return None
    if info.has_state:
        raise ConfigError(
            f"{name} keeps a state per sequence (path {info.path}), which cannot follow refused "
            "proposals; serve it without --speculative-config."
        )
    if config.disable_by_batch_size is not None:
        return config
    is_cpu = backend_name() == "cpu"
    return replace(config, disable_by_batch_size=CPU_BATCH_SIZE if is_cpu else GPU_BATCH_SIZE)


def _grammar_vocabulary(one: _Weights) -> GrammarVocabulary:
    num_rows = embedding_rows(one.loaded.model, config_value(one.loaded.config, "vocab_size"))
    tokenizer = one.tokenizer
    return GrammarVocabulary(
        tokenizer.backend_json, tokenizer.eos_ids, num_rows or 0, tokenizer.vocab_size
    )


def _warm_up(runner: ModelRunner, scheduler: Scheduler, config: EngineConfig) -> WarmUp:
    return WarmUp(
        runner,
        num_seqs=config.scheduler.max_num_seqs,
        tokens=scheduler.token_budget,
        clock=time.monotonic,
    )


def _assemble(
    one: _Weights,
    share: KVShare,
    config: EngineConfig,
    families: MetricFamilies,
    tracer: StepTracer | None,
) -> BuiltModel:
    num_blocks = share.num_blocks
    grammars = GrammarCompiler(_grammar_vocabulary(one))
    runner = ModelRunner(
        one.loaded,
        one.layouts,
        one.plan,
        num_blocks,
        one.attention.backend,
        _draft_model(one, num_blocks),
        grammars=grammars,
        logprobs_mode=config.logprobs_mode,
        tracer=tracer,
    )
    info = runner.info
    kv = KVCacheManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching and not info.has_state,
    )
    names = model_names(one.config)
    scheduler = Scheduler(
        with_token_budget(config.scheduler, backend_name()),
        kv,
        max_model_len=info.max_model_len,
        has_state=info.has_state,
        speculative=speculative_for(config.speculative, info, names[0]),
    )
    metrics = EngineMetrics(families, names[0], info)
    policies = Policies(
        model=names[0],
        users=scheduler,
        store=runner.adapters,
        max_loaded=config.adapters.max_loaded,
        max_rank=config.adapters.max_rank,
    )
    engine = GenerationEngine(
        scheduler,
        runner,
        one.tokenizer,
        metrics,
        live=LiveWeights(policies, runner.live, scheduler),
        grammars=grammars,
        warm_up=_warm_up(runner, scheduler, config) if config.warm_up else None,
        seed=config.seed,
        tracer=tracer,
    )
    model = GenerationModel(
        names=names,
        root=one.config.path or DEMO_NAME,
        created=int(time.time()),
        tokenizer=one.tokenizer.limited(info.max_model_len),
        info=info,
        chat_template_kwargs=one.config.chat_template_kwargs,
        tool_format=tool_format_of(one.config, one.tokenizer),
        reasoning_format=reasoning_format_of(one.config, one.tokenizer),
        allows_auto_tools=one.config.enable_auto_tool_choice,
        parses_tools=one.config.tool_call_parser != "none",
        grammars=grammars,
        revision=folder_revision(one.loaded.path),
    )
    return BuiltModel(one.config, model, engine)
