"""Loads one pooling model on the engine thread, in parts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from mlx_parallm.config import EngineConfig, ModelConfig
from mlx_parallm.engine.device import DeviceAdapters
from mlx_parallm.engine.kind import BuiltModel, ModelFolder, advance_load
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.engine.policies import Policies
from mlx_parallm.models.checkpoints.encoders import is_encoder, names_reward, scores_are_logits
from mlx_parallm.models.checkpoints.late_interaction import LateSpec, read_late_spec
from mlx_parallm.models.checkpoints.model_task import reads_on, task_of, tasks_for
from mlx_parallm.models.checkpoints.sentence_transformers import transformer_folder
from mlx_parallm.models.load_failures import load_failures
from mlx_parallm.pooling.adapters import EncoderAdapterSet
from mlx_parallm.pooling.decoder_build import chosen_tokens
from mlx_parallm.pooling.engine import PoolingEngine
from mlx_parallm.pooling.metrics import PoolingMetrics
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.tokenizer.encoder_tokenizer import EncoderTokenizer
from mlx_parallm.types.errors import ConfigError, ModelLoadError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, PoolingRunner
from mlx_parallm.worker.device.properties import backend_name, free_memory_bytes
from mlx_parallm.worker.ops import Load, Pending, PoolBatch, Unload
from mlx_parallm.worker.pooling.plan import PoolingPlan, PoolingSpec
from mlx_parallm.worker.worker import PendingLoad, Worker

if TYPE_CHECKING:
    import numpy as np

# Most tokens of a batch, padding included. A GPU is saturated by so many. A CPU slows down beyond
# its figure, because a layer's activations no longer fit its caches.
GPU_MAX_TOKENS = 8192
CPU_MAX_TOKENS = 512
# MAX_WAITING: distinct inputs that may wait; a request with more of them runs alone.
MAX_WAITING = 20_000


class DeviceEncoder(PoolingRunner):
    """Runs the batches of one model as worker ops."""

    def __init__(self, worker: Worker, model: str) -> None:
        self._worker = worker
        self._model = model

    @override
    def begin(
        self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]
    ) -> Pending[list[np.ndarray]]:
        return self._worker.begin(PoolBatch(model=self._model, inputs=inputs, slots=slots))

    @override
    def release(self) -> None:
        self._worker.execute(Unload(model=self._model))


class PendingPoolingModel:
    """A pooling model that is being loaded. Implements ``PendingModel``.

    Attributes:
        num_bytes: size of its weights.
    """

    def __init__(
        self,
        folder: ModelFolder,
        settings: EngineConfig,
        tokenizer: EncoderTokenizer,
        families: MetricFamilies,
        worker: Worker,
    ) -> None:
        """Begin to load a folder for which ``is_read`` is true.

        Raises:
            ConfigError: the dtype is unknown.
            ModelLoadError: the model cannot be loaded.
        """
        self._folder = folder
        self._settings = settings
        self._tokenizer = tokenizer
        self._families = families
        self._worker = worker
        with load_failures(folder.path):
            spec = pooling_spec(folder.config, folder.path, tokenizer)
            opened: Any = worker.begin(Load(model=self.name, spec=spec))
        self._pending: PendingLoad | None = opened
        self.num_bytes: int = opened.num_bytes
        self._num_stages = max(1, opened.num_stages - 1)

    def advance(self) -> float:
        """See ``PendingModel``."""
        advance_load(self._opened)
        return 1.0 - (self._opened.num_stages - 1) / self._num_stages

    def close(self) -> None:
        """Drop the load, unless it was finished."""
        self._pending = None

    @property
    def name(self) -> str:
        """Return the first of its names."""
        return self._folder.names[0]

    @property
    def _opened(self) -> PendingLoad:
        assert self._pending is not None, "closed"
        return self._pending

    def finish(self, kept: Policies | None = None) -> BuiltModel:
        """Return the model, ready to serve.

        ``kept``: the policies that it had before it was evicted; None if it is new.

        Raises:
            ConfigError: ``max_model_len`` is more than the model takes.
        """
        config, path = self._folder.config, self._folder.path
        with load_failures(path):
            plan: PoolingPlan = self._opened.wait()
            info = self._info(plan.info)
            _check_special_ids(self._tokenizer, info)
        max_tokens = self._settings.scheduler.max_num_batched_tokens or (
            CPU_MAX_TOKENS if backend_name() == "cpu" else GPU_MAX_TOKENS
        )
        model = PoolingModel(
            names=self._folder.names,
            root=config.path or str(path),
            created=int(time.time()),
            tokenizer=self._tokenizer,
            info=info,
            max_batch_tokens=max_tokens,
            max_waiting=MAX_WAITING,
        )
        engine = PoolingEngine(
            DeviceEncoder(self._worker, self.name),
            max_tokens=max_tokens,
            max_waiting=MAX_WAITING,
            metrics=PoolingMetrics(self._families, self.name),
            max_wait_s=self._settings.encoders.max_batch_wait_ms / 1e3,
            cache_bytes=self._settings.encoders.cache_bytes,
            # On a CPU, a launch costs no more than the padding that is always accepted.
            joins_lengths=backend_name() == "cuda",
            adapters=self._adapters(kept),
        )
        return BuiltModel(config, model, engine)

    def _adapters(self, kept: Policies | None) -> EncoderAdapterSet:
        if kept is not None and isinstance(kept.users, EncoderAdapterSet):
            return kept.users
        store = DeviceAdapters(self._worker, self.name)
        return EncoderAdapterSet(self.name, store, self._settings)

    def _info(self, info: PoolingInfo) -> PoolingInfo:
        config, path = self._folder.config, self._folder.path
        if config.task != "auto":
            info = replace(info, tasks=tasks_for(config.task, info.tasks, self.name))
        task = task_of(config, path)
        # A config does not say that a classifier is a reward model; the names of its labels may.
        is_reward_by_label = config.task == "auto" and names_reward(info.labels)
        info = replace(info, is_reward=task == "reward" or is_reward_by_label)
        if len(info.labels) == 1:
            info = replace(info, scores_are_logits=scores_are_logits(path))
        if info.tasks[0] == "token_embed":
            info = self._with_late_interaction(info)
        longest = self._settings.max_len_of(config, info.max_model_len)
        if longest is None:
            return info
        if longest > info.max_model_len:
            raise ConfigError(
                f"--max-model-len is {longest}; {self.name} takes {info.max_model_len} tokens."
            )
        return replace(info, max_model_len=longest)

    def _with_late_interaction(self, info: PoolingInfo) -> PoolingInfo:
        """Return the facts of a model that compares token vectors."""
        spec = read_late_spec(self._folder.path)
        length = self._settings.max_len_of(self._folder.config, info.max_model_len)
        if length is not None and length == self._folder.config.max_model_len:
            # The limit that the user sets may be above the length of the training documents.
            spec = replace(spec, settings=replace(spec.settings, document_length=None))
        return with_late_interaction(
            info, spec, self._tokenizer, reads_on=reads_on(self._folder.path)
        )


def _check_special_ids(tokenizer: EncoderTokenizer, info: PoolingInfo) -> None:
    """Refuse a tokenizer that puts tokens around every text that the model has no vectors for.

    Raises:
        ModelLoadError: it does, or late interaction would.
    """
    ids = list(tokenizer.encode([""])[0])
    if info.late is not None:
        ids += [*info.late.query_prefix, *info.late.document_prefix]
        ids += [] if info.late.expansion_id is None else [info.late.expansion_id]
    if unknown := sorted(token_id for token_id in ids if token_id >= info.vocab_size):
        raise ModelLoadError(
            f"Its tokenizer puts the token id {unknown[0]} "
            f"({tokenizer.token_string(unknown[0])!r}) into every text, and the embedding table "
            f"has {info.vocab_size} rows."
        )


def pooling_spec(config: ModelConfig, path: Path, tokenizer: EncoderTokenizer) -> PoolingSpec:
    """Return the worker's spec of a folder for which ``is_read`` is true.

    Raises:
    ModelLoadError: a reranker scores by tokens that are not in its vocabulary.
    """
    task, chosen = config.task, ()
    if not is_encoder(transformer_folder(path)):
        task = task_of(config, path)
        chosen = chosen_tokens(path, task, tokenizer)
    return PoolingSpec(
        config=config, path=path, task=task, chosen=chosen, free_bytes=free_memory_bytes()
    )


def with_late_interaction(
    info: PoolingInfo, spec: LateSpec, tokenizer: EncoderTokenizer, *, reads_on: bool
) -> PoolingInfo:
    """Return the facts of a model that was trained for late interaction.

    Args:
        info: the facts without it.
        spec: what its files say about it.
        tokenizer: the model's tokenizer.
        reads_on: True if tokens attend only to earlier tokens.

    Raises:
        ModelLoadError: a token that queries need is not in the vocabulary; or the model is causal,
            and its queries are padded with tokens that others must not attend to.
    """
    query, query_text = _marked(spec.query_prefix, tokenizer)
    document, document_text = _marked(spec.document_prefix, tokenizer)
    settings = spec.settings
    # Words that are no tokens never occur in a text.
    skipped = (tokenizer.token_id(word) for word in spec.skipped)
    if settings.expands_to and reads_on and not settings.attends_to_expansion:
        raise ModelLoadError(
            "A causal model cannot be served if its queries have tokens that others do not attend "
            "to."
        )
    late = replace(
        settings,
        query_prefix=query,
        document_prefix=document,
        expansion_id=_expansion_id(spec, tokenizer) if settings.expands_to else None,
        skipped_ids=frozenset(token_id for token_id in skipped if token_id is not None),
    )
    prefixes = {"query": query_text, "document": document_text}
    changed = {name: text + info.prompts.get(name, "") for name, text in prefixes.items() if text}
    return replace(info, late=late, prompts={**info.prompts, **changed})


def _marked(prefix: str, tokenizer: EncoderTokenizer) -> tuple[tuple[int, ...], str]:
    """Return a prefix as token ids, or as text if the vocabulary does not have it."""
    if not prefix.strip():
        return (), prefix
    for token in (prefix, prefix.split()[0]):
        token_id = tokenizer.token_id(token)
        if token_id is not None:
            return (token_id,), ""
    return (), prefix


def _expansion_id(spec: LateSpec, tokenizer: EncoderTokenizer) -> int:
    token = spec.expansion_token or tokenizer.mask_token
    token_id = None if token is None else tokenizer.token_id(token)
    if token_id is None:
        raise ModelLoadError(f"Queries are padded with {token}, which is not a token of the model.")
    return token_id
