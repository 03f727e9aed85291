"""Assembles the engine of a generator whose weights and KV are in memory."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial

from mlx_parallm.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from mlx_parallm.demo_models.folders import DEMO_NAME
from mlx_parallm.engine.device import DeviceAdapters, DeviceWeights
from mlx_parallm.engine.kind import BuildContext, BuiltModel, ModelFolder
from mlx_parallm.engine.live_weights import LiveWeights
from mlx_parallm.engine.policies import Policies
from mlx_parallm.generation.device_runner import DeviceRunner
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.budget import KVShare, share_budget
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.opening import make_snapshots, open_tiers
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.generation.tokenizers import GenerationTokenizers
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.images.form import ImageForm, image_form
from mlx_parallm.models.checkpoints.contents import FolderContents, SeenFolder
from mlx_parallm.parsing import registry
from mlx_parallm.parsing.forced import call_writer
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.tokenizer.template_form import log_losses
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.content import Identity, package_versions
from mlx_parallm.types.errors import ConfigError, OutOfMemoryError
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import BaseWeights
from mlx_parallm.types.step import KVPlan, RunnerInfo
from mlx_parallm.types.work import StateCache
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.device.ranks import Ranks
from mlx_parallm.worker.generation.load.plan import GenerationPlan
from mlx_parallm.worker.generation.load.remembered import LoadMemory
from mlx_parallm.worker.generation.warm_up import WarmUp
from mlx_parallm.worker.ops import Resize
from mlx_parallm.worker.weights.revision import folder_revision

logger = logging.getLogger(__name__)
# CUDA_TOKEN_BUDGET: tokens of a step that keep an NVIDIA GPU busy; other devices take too long.
CUDA_TOKEN_BUDGET = 2048
# CUDA_STALL_MS: bound of a step with decode rows on an NVIDIA GPU, in ms, if none is given.
CUDA_STALL_MS = 50.0
# DIVIDED: why a model over ranks stays in memory, after its name.
DIVIDED = "is divided among ranks, which load their models when the server starts."
# SMALL_BATCH_SIZE: most sequences that decode for which proposals pay on the CPU, where every row
# takes its time, and for models with a state, whose steps with proposals have several shapes; see
# ``speculating.DEFAULT_BATCH_SIZE``.
SMALL_BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model in memory.

    Attributes:
        plan: its weights.
        seen: its folder before its weights were read.
        memory: remembers what its load chose.
    """

    plan: GenerationPlan
    seen: SeenFolder
    memory: LoadMemory


@dataclass(frozen=True, slots=True)
class LoadedGenerator:
    """A model in memory, before it has any KV.

    Attributes:
        folder: its settings and its files.
        tokenizers: its own.
        kv: what a block of it and of its draft model takes.
        plan: its weights.
        contents: finds those of its folder, and of later ones.
        seen: its folder before its weights were read.
        draft: its draft model; None if it has none.
    """

    folder: ModelFolder
    tokenizers: GenerationTokenizers
    kv: KVPlan
    plan: GenerationPlan
    contents: FolderContents
    seen: SeenFolder
    draft: LoadedDraft | None = None

    @property
    def name(self) -> str:
        """The model's name in the worker."""
        return self.folder.names[0]

    @property
    def draft_name(self) -> str:
        """The name that a draft model of it has in the worker."""
        return draft_name(self.name)

    @property
    def tokenizer(self) -> ParallmTokenizer:
        """The tokenizer of its output."""
        return self.tokenizers.output

    @property
    def weight_bytes(self) -> int:
        """Return the size of the weights of the model and its draft model."""
        return self.plan.weight_bytes + (self.draft.plan.weight_bytes if self.draft else 0)


def draft_name(model: str) -> str:
    """Return the name that the draft model of a model has in the worker."""
    return f"{model} draft"


def grammars_of(loaded: LoadedGenerator) -> GrammarCompiler:
    """Return what compiles the grammars of a model's samples."""
    tokenizer = loaded.tokenizer
    return GrammarCompiler(
        GrammarVocabulary(
            tokenizer.backend_json, tokenizer.eos_ids, loaded.plan.vocab_size, tokenizer.vocab_size
        )
    )


def assembled(
    loaded: LoadedGenerator,
    share: KVShare,
    plan: GenerationPlan,
    grammars: GrammarCompiler,
    context: BuildContext,
    kept: Policies | None = None,
) -> BuiltModel:
    """Return a model that is ready to serve.

    Args:
        loaded: its weights.
        share: its KV memory.
        plan: all choices, and facts about it.
        grammars: compiles those of its samples.
        context: the parts that every model is built with.
        kept: the policies that it had before it was evicted; None if it is new.
    """
    config = loaded.folder.config
    adapters = _adapters(kept) or DeviceAdapters(context.worker, loaded.name)
    beside = context.worker.dispatcher.runs_beside
    runner = DeviceRunner(context.worker, loaded.name, plan, adapters, submits_beside=beside)
    tool_format = tool_format_of(config, loaded.tokenizer)
    tokenizer = loaded.tokenizer.writing_calls(call_writer(tool_format))
    log_losses(loaded.name, tokenizer.probe_template())
    model = GenerationModel(
        names=loaded.folder.names,
        root=config.path or DEMO_NAME,
        created=int(time.time()),
        tokenizer=tokenizer.limited(runner.info.max_model_len),
        info=runner.info,
        chat_template_kwargs=config.chat_template_kwargs,
        tool_format=tool_format,
        reasoning_format=reasoning_format_of(config, tokenizer),
        allows_auto_tools=config.enable_auto_tool_choice,
        parses_tools=config.tool_call_parser != "none",
        grammars=grammars,
        revision=folder_revision(loaded.folder.path),
        images=_images(loaded, runner.info),
        seq2seq=loaded.tokenizers.sides,
        speech=loaded.tokenizers.speech,
        state_cache=_state_cache(loaded, share, runner.info, context.settings),
        refuses_unload=None if context.worker.ranks is None else DIVIDED,
    )
    identity = _identity(loaded, plan, context.worker.ranks)
    if context.settings.kv_peers.across_devices:
        identity = identity.across_devices()
    policies = kept or Policies(
        model=loaded.name,
        store=adapters,
        max_loaded=context.settings.adapters.max_loaded,
        max_rank=context.settings.adapters.max_rank,
        base=BaseWeights(identity=identity.digest),
    )
    engine = _engine(loaded, share, runner, grammars, identity, context, policies)
    engine.reassemble = partial(_resized, loaded, share, plan, grammars, context)
    return BuiltModel(config, model, engine)


def share_of(loaded: LoadedGenerator, num_bytes: int, cache: CacheConfig) -> KVShare:
    """Return the share of a model that has so many bytes of KV memory for itself.

    Raises:
        ConfigError: they do not hold one block.
    """
    (num_blocks,) = share_budget([loaded.kv], num_bytes, cache.num_engines)
    return with_snapshots(loaded, num_blocks, cache)


def with_snapshots(loaded: LoadedGenerator, num_blocks: int, cache: CacheConfig) -> KVShare:
    """Return a model's share of KV memory, a part of which is for states after prefixes."""
    limit = cache.state_cache_bytes if cache.enable_prefix_caching else 0
    return KVShare(loaded.name, loaded.kv, num_blocks).with_snapshots(limit)


def _resized(
    loaded: LoadedGenerator,
    before: KVShare,
    plan: GenerationPlan,
    grammars: GrammarCompiler,
    context: BuildContext,
    num_bytes: int,
    kept: Policies,
) -> BuiltModel:
    """Return a model whose KV memory was allocated anew with so many bytes; see ``Resize``.

    If there is no memory for that, it is as large as ``before``, and empty.
    """
    share = share_of(loaded, num_bytes, context.settings.cache)
    try:
        info = context.worker.execute(Resize(model=loaded.name, num_blocks=share.num_blocks))
    except OutOfMemoryError as problem:
        logger.warning("%s keeps its KV memory: %s", loaded.name, problem)
        return assembled(loaded, before, plan, grammars, context, kept)
    logger.info("%s: %s", share.name, share)
    return assembled(loaded, share, replace(plan, info=info), grammars, context, kept)


def _adapters(kept: Policies | None) -> DeviceAdapters | None:
    """Return the adapters of a model that comes back; None for a new one."""
    return kept.store if kept is not None and isinstance(kept.store, DeviceAdapters) else None


def speculative_for(
    config: SpeculativeConfig | None, info: RunnerInfo, name: str
) -> SpeculativeConfig | None:
    """Return the settings of speculation for a model; None if it does not speculate.

    Raises:
        ConfigError: the model keeps a state that cannot be copied.
    """
    if config is None:
        return None
    if info.has_state and not info.state_bytes:
        raise ConfigError(
            f"{name} keeps a state in caches of an unknown kind (path {info.path}), which cannot "
            "follow refused proposals; serve it without --speculative-config."
        )
    is_small = backend_name() == "cpu" or info.has_state
    if config.disable_by_batch_size is not None or not is_small:
        return config
    return replace(config, disable_by_batch_size=SMALL_BATCH_SIZE)


def with_token_budget(config: SchedulerConfig, backend: str) -> SchedulerConfig:
    """Return the limits, with the backend's token budget if they name none."""
    if config.max_num_batched_tokens is not None or backend != "cuda":
        return config
    return replace(config, max_num_batched_tokens=CUDA_TOKEN_BUDGET)


def default_stall_ms(name: str, config: SchedulerConfig, backend: str) -> float | None:
    """Return the backend's bound of steps; log it if it holds because the limits name none."""
    if backend != "cuda":
        return None
    if config.max_decode_stall_ms is None:
        logger.info(
            "%s: a step takes at most %g ms while sequences decode, or as long as three quarters"
            " of the token budget; --max-decode-stall-ms sets another bound",
            name,
            CUDA_STALL_MS,
        )
    return CUDA_STALL_MS


def _identity(loaded: LoadedGenerator, plan: GenerationPlan, ranks: Ranks | None) -> Identity:
    """Return what decides the KV of a model besides its weights."""
    info, draft = plan.info, loaded.draft
    assert info is not None
    return Identity(
        config=plan.model_config,
        versions=package_versions(),
        code=loaded.seen.code,
        device=backend_name(),
        choices={
            "path": info.path,
            "is_cast": plan.choices.is_cast,
            "kernels": plan.choices.kernels,
            "adapts_by_kernel": plan.choices.adapts_by_kernel,
            "draft": None if draft is None else (draft.plan.model_config, draft.seen.code),
        },
        dtype=info.dtype,
        kv_dtype=info.kv_cache_dtype,
        block_size=info.block_size,
        attention=info.attention_backend,
        block_layout=plan.block_layout,
        state_layout=plan.state_layout,
        rank=0 if ranks is None else ranks.rank,
        world_size=1 if ranks is None else ranks.size,
    )


def _images(loaded: LoadedGenerator, info: RunnerInfo) -> ImageForm | None:
    """Return how a model takes images; None if it takes none, with a warning if it might."""
    if InputKind.IMAGE not in info.input_kinds:
        return None
    row_bytes = info.input_width * (4 if info.dtype == "float32" else 2)
    try:
        return image_form(loaded.folder.path, loaded.plan.model_config, loaded.tokenizer, row_bytes)
    except (KeyError, ValueError) as problem:
        logger.warning("%s takes no images: %s", loaded.name, problem)
        return None


def _state_cache(
    loaded: LoadedGenerator, share: KVShare, info: RunnerInfo, settings: EngineConfig
) -> StateCache | None:
    """Return how many states after prefixes are kept, and where; None without a state."""
    if not info.has_state:
        return None
    return StateCache(
        num_states=share.num_snapshots if info.state_bytes else 0,
        interval=settings.cache.state_snapshot_tokens,
        needs_blocks=loaded.kv.has_kv,
    )


def _engine(
    loaded: LoadedGenerator,
    share: KVShare,
    runner: DeviceRunner,
    grammars: GrammarCompiler,
    identity: Identity,
    context: BuildContext,
    policies: Policies,
) -> GenerationEngine:
    settings, info, name = context.settings, runner.info, loaded.name
    snapshots = make_snapshots(share, info, settings.cache, settings.scheduler.max_num_seqs)
    has_prefix_cache = settings.cache.enable_prefix_caching and (
        not info.has_state or snapshots is not None
    )
    tiers = None
    if has_prefix_cache:
        tiers = _open_tiers(loaded, identity, context, info)
    scheduler = Scheduler(
        with_token_budget(settings.scheduler, backend_name()),
        KVCacheManager(
            info.num_blocks,
            info.block_size,
            enable_prefix_caching=has_prefix_cache,
            tiers=tiers,
            snapshots=snapshots,
            has_kv=loaded.kv.has_kv,
        ),
        max_model_len=info.max_model_len,
        has_state=info.has_state,
        keeps_states=info.keeps_states,
        snapshot_tokens=settings.cache.state_snapshot_tokens,
        speculative=speculative_for(settings.speculative, info, name),
        num_tower_stages=info.num_tower_stages,
        has_sources=InputKind.SOURCE in info.input_kinds,
        pads=runner.prepares_shapes,
        default_stall_ms=default_stall_ms(name, settings.scheduler, backend_name()),
    )
    policies.users = scheduler
    live = LiveWeights(
        policies,
        DeviceWeights(context.worker, name),
        scheduler,
        contents=loaded.contents,
        read=loaded.seen,
    )
    warm_up = None
    if settings.warm_up:
        warm_up = WarmUp(
            runner,
            num_seqs=settings.scheduler.max_num_seqs,
            tokens=scheduler.token_budget,
            clock=time.monotonic,
        )
    return GenerationEngine(
        scheduler,
        runner,
        loaded.tokenizer,
        EngineMetrics(
            context.families,
            name,
            info,
            read_tiers=None if tiers is None else tiers.stats,
        ),
        live=live,
        tiers=tiers,
        grammars=grammars,
        warm_up=warm_up,
        seed=settings.seed,
        tracer=context.tracer,
    )


def _open_tiers(
    loaded: LoadedGenerator, identity: Identity, context: BuildContext, info: RunnerInfo
) -> Tiers | None:
    peers = context.settings.kv_peers
    if peers.prefill_url is not None and InputKind.SOURCE in info.input_kinds:
        logger.warning(
            "--prefill-peer does nothing for %s: sources of an encoder-decoder are encoded here",
            loaded.name,
        )
        peers = replace(peers, prefill_url=None)
    return open_tiers(
        context.settings.cache,
        peers,
        owner=identity.digest,
        block_bytes=loaded.kv.block_bytes,
        state_bytes=info.state_bytes,
        num_models=context.settings.num_host_shares,
        runs_ahead=info.runs_ahead,
        draft=None if loaded.draft is None else loaded.draft.seen,
    )


def tool_format_of(config: ModelConfig, tokenizer: ParallmTokenizer) -> ToolFormat | None:
    """Return the format of tool calls; None where there is none, or none is known.

    Raises:
        ConfigError: the setting names an unknown one.
    """
    name = config.tool_call_parser
    if name == "auto":
        return registry.detect_tool_format(tokenizer.chat_template, tokenizer.vocabulary())
    return None if name == "none" else registry.tool_format(name)


def reasoning_format_of(config: ModelConfig, tokenizer: ParallmTokenizer) -> ReasoningFormat | None:
    """Return the format of reasoning; None where there is none, or none is known.

    Raises:
        ConfigError: the setting names an unknown one.
    """
    name = config.reasoning_parser
    if name == "auto":
        return registry.detect_reasoning_format(tokenizer.chat_template, tokenizer.vocabulary())
    return None if name == "none" else registry.reasoning_format(name)
