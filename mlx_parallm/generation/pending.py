"""Loads one generator on the engine thread, in parts: its weights, then its KV pool."""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlx_parallm.config import ModelConfig
from mlx_parallm.engine.kind import (
    BuildContext,
    BuiltModel,
    MemoryWish,
    ModelFolder,
    advance_load,
)
from mlx_parallm.engine.model_files import fetch_model
from mlx_parallm.engine.policies import Policies
from mlx_parallm.generation.assembly import (
    LoadedDraft,
    LoadedGenerator,
    assembled,
    draft_name,
    grammars_of,
    share_of,
)
from mlx_parallm.generation.kv_cache.budget import KVShare, report_cut
from mlx_parallm.generation.kv_memory import free_bytes, kv_wish
from mlx_parallm.generation.tokenizers import GenerationTokenizers
from mlx_parallm.grammar.compiler import GrammarCompiler
from mlx_parallm.kernels.store import kernel_folder
from mlx_parallm.models.checkpoints.contents import FolderContents, SeenFolder, user_memory
from mlx_parallm.models.checkpoints.decoder_sizes import learned_positions
from mlx_parallm.models.checkpoints.weight_files import weight_files
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.worker.device.room import give_back
from mlx_parallm.worker.generation.load.plan import GenerationPlan, GenerationSpec
from mlx_parallm.worker.generation.load.remembered import LoadMemory, RememberedPlans
from mlx_parallm.worker.ops import Allocate, Load, Pending, Stages, Unload
from mlx_parallm.worker.worker import PendingLoad

logger = logging.getLogger(__name__)

# READ_SHARE: the share of a load that is reading the weights.
READ_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class _Allocation:
    """The allocation of a model's KV pool, which was begun."""

    share: KVShare
    grammars: GrammarCompiler
    pending: Pending[GenerationPlan]


@dataclass(frozen=True, slots=True)
class _Begun:
    """The weights that were opened, and the stages in which they are read."""

    opened: PendingLoad
    reading: Stages[LoadedGenerator]


class PendingGenerationModel:
    """A generator that is being loaded. Implements ``PendingModel`` and ``TakesMemory``.

    Its weights are read first. Then it is known what KV it wants, and it waits for a share of that
    memory.

    Attributes:
        loaded: the model, once its weights are read.
    """

    def __init__(
        self, folder: ModelFolder, tokenizers: GenerationTokenizers, context: BuildContext
    ) -> None:
        """Begin to load a folder.

        Raises:
            ConfigError: a setting does not suit the model.
            ModelLoadError: the model cannot be loaded.
        """
        self.loaded: LoadedGenerator | None = None
        self._folder = folder
        self._tokenizers = tokenizers
        self._context = context
        self._contents = FolderContents(user_memory())
        self._seen = self._contents.see(folder.path)
        opened, self._memory = _begin_load(
            folder.config, folder.path, self.name, self._seen, context
        )
        self._num_parts = max(1, opened.num_stages - 1)
        self._begun: _Begun | None = _Begun(opened, Stages(self._read(opened)))
        self._allocation: _Allocation | None = None

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self._folder.names[0]

    @property
    def num_bytes(self) -> int:
        """Return the size of its weights and of its draft model's files."""
        speculative, draft = self._context.settings.speculative, 0
        if speculative is not None and speculative.model is not None:
            path = fetch_model(self._folder.config, speculative.model, self._context.on_progress)
            draft = sum(file.stat().st_size for file in weight_files(path))
        return self._reads.opened.num_bytes + draft

    @property
    def _reads(self) -> _Begun:
        assert self._begun is not None, "closed"
        return self._begun

    def read(self) -> LoadedGenerator:
        """Read what is left of the weights; return the model, which has no KV yet."""
        with load_failures(self._folder.path):
            self.loaded = self._reads.reading.wait()
        return self.loaded

    @property
    def wish(self) -> MemoryWish | None:
        """Return the KV memory that it needs; None while it reads, and once that was granted."""
        loaded = self.loaded
        if loaded is None or self._allocation is not None:
            return None
        may_cut = not loaded.folder.config.max_model_len_is_own
        cache = self._context.settings.cache
        return kv_wish(loaded.kv, loaded.weight_bytes, cache, may_cut=may_cut)

    def grant(self, num_bytes: int) -> None:
        """Begin to allocate so many bytes of KV; see ``TakesMemory``."""
        loaded, cache = self.read(), self._context.settings.cache
        share = share_of(loaded, num_bytes, cache)
        logger.info("%s: %s", share.name, share)
        if share.is_cut:
            report_cut(share, loaded.folder.config.max_model_len, cache.num_engines)
        self.allocate(share)

    def allocate(self, share: KVShare) -> None:
        """Begin to allocate the KV of the model, whose weights are read."""
        assert self.loaded is not None, "its weights are not read yet"
        grammars = grammars_of(self.loaded)
        draft = None if self.loaded.draft is None else self.loaded.draft_name
        op = Allocate(model=self.name, num_blocks=share.num_blocks, grammars=grammars, draft=draft)
        self._allocation = _Allocation(share, grammars, self._context.worker.begin(op))

    def advance(self) -> float:
        """See ``PendingModel``."""
        with load_failures(self._folder.path):
            advance_load(self._stages)
        if self._reads.reading.num_stages > 1:
            return READ_SHARE * (1.0 - (self._reads.opened.num_stages - 1) / self._num_parts)
        if self.loaded is None:
            self.read()
        return READ_SHARE if self._allocation is None or self._stages.num_stages > 1 else 1.0

    @property
    def _stages(self) -> Pending[Any]:
        return self._reads.reading if self._allocation is None else self._allocation.pending

    def close(self) -> None:
        """Free what there is of the model, unless the load was finished."""
        is_finished, self._begun = self._begun is None, None
        if is_finished:
            return
        self.loaded = self._allocation = None
        for name in (self.name, draft_name(self.name)):
            self._context.worker.execute(Unload(model=name))
        give_back()

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        """Return the model, ready to serve, once its KV was allocated."""
        allocation, loaded = self._allocation, self.loaded
        assert allocation is not None, "it has no KV yet"
        assert loaded is not None, "its weights are not read yet"
        with load_failures(self._folder.path):
            plan = allocation.pending.wait()
        _remember(self._memory, loaded, plan)
        built = assembled(loaded, allocation.share, plan, allocation.grammars, self._context, kept)
        self._begun = None
        return built

    def _read(self, opened: PendingLoad) -> Generator[None, None, LoadedGenerator]:
        plan = yield from _advanced(opened)
        loaded = LoadedGenerator(
            self._folder,
            self._tokenizers,
            plan.kv,
            plan,
            self._contents,
            self._contents.confirm(self._seen),
        )
        speculative = self._context.settings.speculative
        if speculative is None or speculative.model is None:
            return loaded
        try:
            draft = yield from _load_draft(speculative.model, loaded, self._context)
        except (ConfigError, ModelLoadError) as problem:
            # The setting's name says that the problem is not one of the served model.
            raise type(problem)(f"--speculative-config: draft model: {problem}") from problem
        # A block of the budget has KV of both models, of equally many tokens.
        kv = replace(loaded.kv, block_bytes=loaded.kv.block_bytes + draft.plan.kv.block_bytes)
        return replace(loaded, draft=draft, kv=kv)


def _begin_load(
    model: ModelConfig, path: Path, name: str, seen: SeenFolder, context: BuildContext
) -> tuple[PendingLoad, LoadMemory]:
    """Begin to load a folder that was seen, with what an earlier load of an equal one chose."""
    spec = GenerationSpec(
        config=model, path=path, settings=context.settings, free_bytes=free_bytes(context.worker)
    )
    memory = LoadMemory(_plans_of(context), spec, seen)
    with load_failures(path):
        opened: Any = context.worker.begin(Load(model=name, spec=spec, plan=memory.earlier))
    return opened, memory


def _plans_of(context: BuildContext) -> RememberedPlans:
    """Return what earlier loads chose; ranks agree on their choices, and remember none."""
    is_alone = context.worker.ranks is None
    return RememberedPlans(kernel_folder(context.settings.kernel_cache_dir) if is_alone else None)


def _remember(memory: LoadMemory, loaded: LoadedGenerator, plan: GenerationPlan) -> None:
    """Remember what the loads of a model and its draft model chose."""
    memory.note(loaded.seen, plan.choices, plan.weight_bytes)
    draft = loaded.draft
    if draft is not None and plan.draft is not None:
        draft.memory.note(draft.seen, plan.draft, draft.plan.weight_bytes)


def _advanced(pending: Pending[Any]) -> Generator[None, None, Any]:
    """Compute the stages of an op as stages; return its result."""
    while pending.num_stages > 1:
        pending.advance()
        yield
    return pending.wait()


def _load_draft(
    source: str, target: LoadedGenerator, context: BuildContext
) -> Generator[None, None, LoadedDraft]:
    """Load a draft model for ``target``.

    Raises:
        ConfigError: its tokens are not those of the model, or it knows fewer positions.
        ModelLoadError: it could not be fetched or loaded.
    """
    model = target.folder.config
    config = ModelConfig(path=source, dtype=model.dtype, trust_remote_code=model.trust_remote_code)
    path = fetch_model(config, source, context.on_progress)
    own = load_tokenizer(path, trust_remote_code=model.trust_remote_code)
    if not target.tokenizer.has_vocabulary_of(own):
        raise ConfigError(
            f"{source} has other tokens than {target.name}; both need the same vocabulary."
        )
    config = replace(config, kv_cache_dtype=model.kv_cache_dtype)
    contents = FolderContents(user_memory())
    seen = contents.see(path)
    opened, memory = _begin_load(config, path, target.draft_name, seen, context)
    plan = yield from _advanced(opened)
    seen = contents.confirm(seen)
    if plan.kv.max_model_len < target.kv.max_model_len and learned_positions(plan.model_config):
        raise ConfigError(
            f"{source} has vectors for {plan.kv.max_model_len} positions; {target.name} reads "
            f"{target.kv.max_model_len} tokens (--max-model-len)."
        )
    contents.hash(seen)
    return LoadedDraft(plan, seen, memory)
