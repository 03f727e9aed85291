"""Makes the runner of a loaded model, and a draft model: chooses how they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import replace

import mlx.core as mx

from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.grammar.masks import GrammarMasks
from mlx_parallm.models.checkpoints.encoder_decoders import source_vocab_size
from mlx_parallm.models.vision.checkpoint import TOWER
from mlx_parallm.models.vision.features import Tower
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import RAW_LOGPROBS
from mlx_parallm.types.step import KVPlan, NoTracer, RunnerInfo, StepTracer
from mlx_parallm.worker.attention.base import AttentionBackend
from mlx_parallm.worker.attention.quantisation import kv_cache_dtype_of
from mlx_parallm.worker.device.dispatcher import Dispatcher
from mlx_parallm.worker.device.faults import DeviceFaults
from mlx_parallm.worker.device.step_arrays import step_arrays
from mlx_parallm.worker.generation.cache_layout import CacheLayout
from mlx_parallm.worker.generation.draft_model import DraftModel
from mlx_parallm.worker.generation.inputs.forward import InputForward, input_forward
from mlx_parallm.worker.generation.inputs.rows import EmbeddingSeam, ImageTokens, find_embedding
from mlx_parallm.worker.generation.inputs.runs import InputComputer
from mlx_parallm.worker.generation.live_model import LiveModel
from mlx_parallm.worker.generation.load.image_check import ImageCheck
from mlx_parallm.worker.generation.load.memory import max_scores
from mlx_parallm.worker.generation.load.path_choice import PathChoice, checked_length, choose_path
from mlx_parallm.worker.generation.load.plan import DecoderChoices
from mlx_parallm.worker.generation.load.proposal_check import choose_proposals
from mlx_parallm.worker.generation.model_runner import ModelRunner
from mlx_parallm.worker.generation.paths.alone import AlonePath
from mlx_parallm.worker.generation.paths.base import ForwardPath
from mlx_parallm.worker.generation.row_selection import vocab_size_of
from mlx_parallm.worker.generation.stock_forward import StockModel
from mlx_parallm.worker.generation.value_heads import ValuedLayers, ValueHeads
from mlx_parallm.worker.lora.adapted_layers import AdaptedLayers, product_dtype
from mlx_parallm.worker.lora.adapter_check import choose_change_kernels
from mlx_parallm.worker.lora.adapter_store import AdapterStore
from mlx_parallm.worker.sampling.check import choose_sampling
from mlx_parallm.worker.sampling.sampler import Sampler
from mlx_parallm.worker.weights.loader import DTYPES, LoadedModel
from mlx_parallm.worker.weights.model_weights import ModelWeights

logger = logging.getLogger(__name__)


def make_runner(  # noqa: PLR0913 - settings, by name
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
    speculates: bool = False,
    max_source_len: int = 0,
    faults: DeviceFaults | None = None,
    dispatcher: Dispatcher | None = None,
) -> Generator[None, None, tuple[ModelRunner, DecoderChoices]]:
    """Return the runner of a model and all choices for it, made here or taken over, in stages.

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
        takes_embeds: True if prompts may bring rows that replace embeddings, if the model allows
            it.
        speculates: True if rows may have proposals.
        max_source_len: see ``RunnerInfo``.
        faults: the failures of the device; None if no other model uses it.
        dispatcher: submits steps to the device; None if no other model uses it.
    """
    chosen = choices or DecoderChoices(is_cast=loaded.is_cast, attention=backend.name)
    ranks = None if loaded.sharding is None else loaded.sharding.ranks
    vocab_size, dtype = vocab_size_of(loaded), _dtype_of(loaded)
    kernels, _ = choose_sampling(vocab_size, dtype, chosen.samples_by_kernel, ranks)
    yield
    tower: Tower | None = getattr(loaded.model, TOWER, None)
    embedding = (
        find_embedding(loaded.model, vocab_size, dtype, _image_tokens(loaded), ranks)
        if takes_embeds or tower is not None
        else None
    )
    forward = input_forward(loaded, embedding)
    yield
    choice = yield from choose_path(
        loaded.model,
        layouts,
        backend,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=plan.block_size,
        dtype=loaded.dtype,
        chosen=chosen.path,
        head=chosen.head,
        ranks=ranks,
        make_check=_image_check(loaded, forward, tower),
        max_scores=max_scores(layouts, loaded.config, dtype, ranks.size if ranks else 1),
    )
    path = choice.path
    proposals = None
    if speculates:
        yield
        proposals = choose_proposals(
            path,
            vocab_size=vocab_size,
            window=checked_length(loaded.model, layouts),
            block_size=plan.block_size,
            dtype=loaded.dtype,
            chosen=chosen.proposals,
            ranks=ranks,
        )
    warn_of_slow(loaded, choice)
    yield
    products = product_dtype(loaded.dtype)
    path.adapters.kernels, _ = choose_change_kernels(products, chosen.adapts_by_kernel, ranks)
    layers = AdaptedLayers(
        loaded.model, products, path.adapters, loaded.sharding, config=loaded.config
    )
    values = ValueHeads(loaded.model, choice.selector, ranks)
    adapters = AdapterStore(ValuedLayers(layers, values))
    choices = replace(
        chosen,
        path=choice.name,
        head=choice.selector.head,
        why_no_images=chosen.why_no_images or choice.why_no_images,
        samples_by_kernel=kernels is not None,
        adapts_by_kernel=path.adapters.kernels is not None,
        proposals=proposals,
    )
    info = replace(
        _facts(loaded, plan, num_blocks, backend, path, draft),
        has_value_head=_has_value_head(loaded, values),
    )
    forward = forward.on(path)
    inputs = _computer(loaded, tower, forward, choices, waits=not info.runs_ahead)
    runner = ModelRunner(
        path,
        forward,
        Sampler(kernels, logprobs_mode=logprobs_mode),
        _with_sources(info, loaded, max_source_len)
        if max_source_len
        else _with_inputs(info, embedding, inputs, takes_embeds=takes_embeds),
        inputs=inputs,
        adapters=adapters,
        live=LiveModel(ModelWeights(loaded), path, adapters, draft),
        stock=StockModel(loaded.model, choice.selector, path.adapters, layers, plan.max_model_len),
        draft=draft,
        grammars=None if grammars is None else GrammarMasks(grammars),
        values=values,
        ranks=ranks,
        tracer=tracer or NoTracer(),
        faults=faults or DeviceFaults(),
        dispatcher=dispatcher or Dispatcher(),
        arrays=step_arrays(),
    )
    return runner, choices


def make_draft(
    loaded: LoadedModel,
    layouts: tuple[CacheLayout, ...],
    backend: AttentionBackend,
    *,
    num_blocks: int,
    block_size: int,
    choices: DecoderChoices | None = None,
) -> Generator[None, None, tuple[DraftModel, DecoderChoices]]:
    """Return a draft model and all choices for it, in stages; see ``make_runner``.

    Raises:
        ConfigError: the model keeps a state, which cannot be rolled back.
        ModelLoadError: the model has no embedding.
    """
    vocab_size, dtype = vocab_size_of(loaded), _dtype_of(loaded)
    chosen = choices or DecoderChoices(is_cast=loaded.is_cast, attention=backend.name)
    choice = yield from choose_path(
        loaded.model,
        layouts,
        backend,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=loaded.dtype,
        chosen=chosen.path,
        head=chosen.head,
        max_scores=max_scores(layouts, loaded.config, dtype),
    )
    if choice.path.has_state:
        raise ConfigError(f"{loaded.path} keeps a state and cannot be a draft model.")
    warn_of_slow(loaded, choice)
    kernels, _ = choose_sampling(vocab_size, dtype, chosen.samples_by_kernel)
    draft = DraftModel(
        choice.path,
        Sampler(kernels),
        vocab_size=vocab_size,
        runs_ahead=backend.runs_ahead,
        weight_bytes=loaded.weight_bytes,
    )
    choices = replace(
        chosen,
        path=choice.name,
        head=choice.selector.head,
        samples_by_kernel=kernels is not None,
    )
    return draft, choices


def _dtype_of(loaded: LoadedModel) -> mx.Dtype:
    return DTYPES.get(loaded.dtype, mx.float32)


def _image_tokens(loaded: LoadedModel) -> ImageTokens | None:
    """Return what the text model reads in place of an image's ids; None without a tower."""
    if getattr(loaded.model, TOWER, None) is None:
        return None
    text = loaded.config.get("text_config") or loaded.config
    return ImageTokens(int(text.get("hidden_size", 0)), int(text.get("pad_token_id") or 0))


def _image_check(
    loaded: LoadedModel, forward: InputForward, tower: Tower | None
) -> Callable[[], ImageCheck] | None:
    """Return what makes the check of rows of images; None for a model without a tower."""
    if tower is None:
        return None
    return lambda: ImageCheck(loaded.model, forward, _dtype_of(loaded), tower.num_added_layers)


def _facts(
    loaded: LoadedModel,
    plan: KVPlan,
    num_blocks: int,
    backend: AttentionBackend,
    path: ForwardPath,
    draft: DraftModel | None,
) -> RunnerInfo:
    return RunnerInfo(
        path=path.name,
        vocab_size=vocab_size_of(loaded),
        max_model_len=min(plan.max_model_len, num_blocks * plan.block_size),
        num_blocks=num_blocks,
        block_size=plan.block_size,
        kv_bytes=0 if isinstance(path, AlonePath) else num_blocks * plan.block_bytes,
        weight_bytes=loaded.weight_bytes + (draft.weight_bytes if draft else 0),
        has_state=path.has_state,
        state_bytes=0 if isinstance(path, AlonePath) else plan.state_bytes,
        attention_backend=backend.name,
        dtype=loaded.dtype,
        kv_cache_dtype=kv_cache_dtype_of(backend.quantisation),
        runs_ahead=backend.runs_ahead and path.name in {"packed", "split"},
        is_compiled=path.is_compiled,
        keeps_states=path.keeps_states,
    )


def warn_of_slow(loaded: LoadedModel, choice: PathChoice) -> None:
    """Log what makes a model slow."""
    name = loaded.path.name
    if choice.path.name in {"sequential", "alone"}:
        logger.warning("%s computes one sequence at a time", name)
    elif not choice.selector.active:
        logger.warning("%s computes the logits of all tokens: no module is its LM head", name)


def _has_value_head(loaded: LoadedModel, values: ValueHeads) -> bool:
    """True if the model's own value head can be computed; log why if it has one that cannot."""
    own = values.own
    if own is None:
        return False
    if (why := values.why_unfit(own)) is not None:
        logger.warning("the value head of %s is not served: %s", loaded.path.name, why)
    return why is None


def _computer(
    loaded: LoadedModel,
    tower: Tower | None,
    forward: InputForward,
    choices: DecoderChoices,
    *,
    waits: bool,
) -> InputComputer:
    """Return what computes inputs; a model that cannot run images takes none."""
    why_not = choices.why_no_images or forward.why_no_images
    if tower is not None and why_not is not None:
        logger.warning("%s takes no images: %s", loaded.path.name, why_not)
        tower = None
    return InputComputer(tower, _dtype_of(loaded), two_way=forward.two_way, waits=waits)


def _with_inputs(
    info: RunnerInfo, embedding: EmbeddingSeam | None, inputs: InputComputer, *, takes_embeds: bool
) -> RunnerInfo:
    """Return the facts about a model with those about inputs besides tokens."""
    if embedding is None:
        return info
    kinds = {
        InputKind.PROMPT_EMBEDS: takes_embeds and not embedding.needs_tokens,
        InputKind.IMAGE: inputs.tower is not None,
    }
    return replace(
        info,
        input_width=embedding.width,
        input_kinds=tuple(kind for kind, is_taken in kinds.items() if is_taken),
        num_tower_stages=inputs.num_stages,
    )


def _with_sources(info: RunnerInfo, loaded: LoadedModel, max_source_len: int) -> RunnerInfo:
    """Return the facts about an encoder-decoder with those about its sources."""
    return replace(
        info,
        input_kinds=(InputKind.SOURCE,),
        num_tower_stages=loaded.model.num_encoder_stages,
        max_source_len=max_source_len,
        source_vocab_size=source_vocab_size(loaded.config) or 0,
    )
