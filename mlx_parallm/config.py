"""Immutable, nested settings. Each part of the system receives only its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.units import readable_bytes

SPECULATIVE_METHODS = ("ngram", "draft_model")
MAX_SPECULATIVE_TOKENS = 15
#: ``ModelTask``: ``generate`` continues texts; ``embed`` gives a vector per text; ``token_embed``
#: gives a vector per token, for late interaction; ``classify`` gives logits of labels per text,
#: ``token_classify`` per token; ``score`` gives a pair of texts one logit; ``reward`` gives the
#: output of a reward model's class.
ModelTask = Literal[
    "generate", "embed", "token_embed", "classify", "token_classify", "score", "reward"
]
KV_CACHE_DTYPES = ("auto", "int8", "int4")
#: ``STATE_SNAPSHOT_TOKENS``: tokens between the states that are kept of a long prompt.
STATE_SNAPSHOT_TOKENS = 2048
#: ``KV_DISK_BYTES``: bytes of a folder of KV blocks if nothing else is configured.
KV_DISK_BYTES = 20 << 30
#: ``NO_KV_DISK``: why a limit alone is refused.
NO_KV_DISK = "--kv-disk-bytes needs --kv-disk, the folder that it limits."
#: ``LEAST_STORE_BYTES``: smallest limit of a place below the KV pool. A file of a disk has 8 MiB.
LEAST_STORE_BYTES = 16 << 20
#: ``DEFAULT_MAX_SOURCE_LEN``: most tokens of a source if the encoder's positions have no end.
DEFAULT_MAX_SOURCE_LEN = 4096
#: ``AUTO``: the ``data_parallel_size`` that stands for one engine on each NVIDIA GPU.
AUTO = 0
#: ``NONE_HERE``: the ``data_parallel_size`` if only engines of other machines were asked for.
NONE_HERE = -1
#: ``PREFILL_MIN_TOKENS``: a shorter part of a prompt is soon computed.
PREFILL_MIN_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model to serve.

    Attributes:
        path: hub id, folder or GGUF file; None is the embedded demonstration model.
        served_names: names that clients may use; answers carry the first. Empty: the path.
        revision: hub revision.
        dtype: "auto", "float32", "float16" or "bfloat16". Auto keeps the checkpoint's dtype on a
            GPU and, on the CPU, casts and dequantises to float32 when that fits in memory.
        max_model_len: cap on the context length; None takes the model's own.
        max_model_len_is_own: True if the cap was set for this model alone; a cap for all models
            does not raise a shorter context of one of them.
        max_source_len: most tokens that the encoder of an encoder-decoder reads; None: as many as
            it has learned positions, or ``DEFAULT_MAX_SOURCE_LEN``.
        kv_cache_dtype: one of ``KV_CACHE_DTYPES``; None takes that of ``CacheConfig``.
        chat_template: a Jinja template, or the path of a file with one; None takes the model's own.
        chat_template_kwargs: default values of template variables; requests can override them.
        tool_call_parser: how the model writes tool calls: "auto" infers it from its template and
            vocabulary, "none" leaves them in the text, other names are those of
            ``parsing.registry``.
        reasoning_parser: how the model writes reasoning: "auto", "none" or a name, as above.
        enable_auto_tool_choice: let the model decide whether it calls tools; if false, requests
            with ``tool_choice: auto`` are refused.
        trust_remote_code: run Python code that comes with the model or its tokenizer.
        hf_overrides: other values of fields of the model's config.json.
        task: the model's role; "auto": its files decide.
    """

    path: str | None = None
    served_names: tuple[str, ...] = ()
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_model_len_is_own: bool = False
    max_source_len: int | None = None
    kv_cache_dtype: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    trust_remote_code: bool = False
    hf_overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    task: Literal["auto"] | ModelTask = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """KV memory.

    Attributes:
        block_size: tokens per block.
        memory_fraction: share of the free memory that KV of all models together may take, within
            the device's own bound (``generation.kv_cache.budget.most_bytes``).
        kv_cache_dtype: one of ``KV_CACHE_DTYPES``. "auto" keeps KV in the model's dtype; the others
            quantise it to 8 or 4 bits, with a scale and a minimum per group of 64 elements.
        kv_cache_bytes: bytes of KV of all models together, allocated exactly or refused; overrides
            ``memory_fraction``.
        enable_prefix_caching: reuse blocks of equal prefixes.
        kv_disk: a folder that keeps evicted blocks and those of earlier processes; None for none.
        kv_disk_bytes: most bytes of that folder, of all processes that use it together.
        kv_host_bytes: most bytes of evicted blocks in host memory, of the models that an engine
            starts with, on a device that has memory of its own; 0 keeps none. See
            ``EngineConfig.num_host_shares``.
        state_cache_bytes: most bytes of states after cached prefixes, of each model that keeps a
            state and in each engine, as a part of its KV memory; 0 keeps none. None: what 64
            prefixes take, or an eighth of that memory if that is less.
        state_snapshot_tokens: tokens between such states in the middle of a long prompt.
        num_engines: how many engines divide the device's KV memory; the fraction and
            ``kv_cache_bytes`` are the share of one of them.

    Raises:
        ConfigError: settings of the places below the pool do not fit together.
    """

    block_size: int = 16
    memory_fraction: float = 0.5
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None
    enable_prefix_caching: bool = True
    kv_disk: Path | None = None
    kv_disk_bytes: int = KV_DISK_BYTES
    kv_host_bytes: int = 0
    state_cache_bytes: int | None = None
    state_snapshot_tokens: int = STATE_SNAPSHOT_TOKENS
    num_engines: int = 1

    @property
    def has_stores(self) -> bool:
        """True if blocks are kept outside of the pool too."""
        return self.kv_disk is not None or self.kv_host_bytes > 0

    def __post_init__(self) -> None:
        if self.kv_disk is None and self.kv_disk_bytes != KV_DISK_BYTES:
            raise ConfigError(NO_KV_DISK)
        for flag, is_set in (
            ("--kv-disk", self.kv_disk is not None),
            ("--kv-host-bytes", self.kv_host_bytes != 0),
        ):
            if is_set and not self.enable_prefix_caching:
                raise ConfigError(
                    f"{flag} keeps cached prefixes: it cannot be used without prefix caching "
                    "(--no-enable-prefix-caching)."
                )
        least = readable_bytes(LEAST_STORE_BYTES)
        if self.kv_disk_bytes < LEAST_STORE_BYTES:
            raise ConfigError(f"--kv-disk-bytes must be at least {least}.")
        if self.kv_host_bytes != 0 and self.kv_host_bytes < LEAST_STORE_BYTES:
            raise ConfigError(f"--kv-host-bytes must be 0, or at least {least}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPeersConfig:
    """KV of other servers.

    Attributes:
        urls: of the servers whose KV is used; empty for none.
        key: what these servers are sent as a key; None for none.
        is_served: True if other servers get KV.
        across_devices: True if KV of other kinds of devices counts as equal.
        prefill_url: of the server that computes long prompts; None for none.
        prefill_min_tokens: fewer tokens are computed here.
        server_id: names this run of the server to peers, one of which may be itself.
    """

    urls: tuple[str, ...] = ()
    key: str | None = field(default=None, repr=False)
    is_served: bool = False
    across_devices: bool = False
    prefill_url: str | None = None
    prefill_min_tokens: int = PREFILL_MIN_TOKENS
    server_id: bytes = field(default=b"", repr=False, compare=False)

    @property
    def is_used(self) -> bool:
        """True if KV is taken from other servers, or given to them."""
        return bool(self.urls) or self.is_served or self.prefill_url is not None


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """Most memory that models may take on a device: a size in bytes, or a share of what is there.

    Attributes:
        size: in bytes; None for a share.
        share: above 0, up to 1; None for a size.
    """

    size: int | None = None
    share: float | None = None

    def num_bytes(self, available: int | None) -> int | None:
        """Return the bytes of it; ``available`` is what is there, None if that is not known."""
        if self.share is None:
            return self.size
        return None if available is None else int(available * self.share)

    def part(self, count: int) -> MemoryBound:
        """Return the part of one of ``count`` engines that divide a device."""
        if self.share is not None:
            return MemoryBound(share=self.share / count)
        return MemoryBound(size=None if self.size is None else self.size // count)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """Limits of the memory of a device.

    Those of MLX's allocator are for all engines of a device together.

    Attributes:
        limit: most memory that the models of an engine may take: their weights, KV and adapters.
            None: what those take that are loaded at the start, and all KV that they could have.
        mlx_cache_bytes: most bytes of freed memory that MLX keeps for new arrays; None: on a Mac's
            GPU a small part of its memory, elsewhere MLX's own limit.
        wired_bytes: bytes of arrays that macOS keeps in memory whatever other programs need; 0: it
            may compress and swap all of them.
        num_engines: how many engines divide the device's memory.
    """

    limit: MemoryBound | None = None
    mlx_cache_bytes: int | None = None
    wired_bytes: int = 0
    num_engines: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue, per model.

    Attributes:
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: the token budget of a step; None is 2048 on an NVIDIA GPU and 1024
            elsewhere.
        max_decode_stall_ms: milliseconds that a step with decode rows may take; its prefill is cut
            to fit, by the measured time of earlier steps. 0: only the token budget limits it. None
            is 50 on an NVIDIA GPU, where steps of up to three quarters of the token budget may
            take longer, and 0 elsewhere.
        max_num_seqs_per_client: most running sequences per client; None is no limit.
        max_loras: most distinct adapters among the running sequences.
        max_waiting: most waiting sequences; beyond it requests are refused with OverloadedError.
            0 is no limit.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    max_decode_stall_ms: float | None = None
    max_num_seqs_per_client: int | None = None
    max_loras: int = 8
    max_waiting: int = 2048

    def without_default_bound(self) -> SchedulerConfig:
        """Return the limits without a default bound of steps, for callers that read no streams."""
        if self.max_decode_stall_ms is not None:
            return self
        return replace(self, max_decode_stall_ms=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding, for all models of the process. Names are vLLM's.

    Attributes:
        method: "ngram" proposes the tokens that followed an earlier occurrence of the latest
            tokens; "draft_model" proposes the tokens of a smaller model.
        model: the draft model's hub id or folder; it must have the served model's vocabulary.
        num_speculative_tokens: most tokens proposed at a time.
        prompt_lookup_max: longest n-gram looked for.
        prompt_lookup_min: shortest n-gram that counts as a match.
        disable_by_batch_size: speculation pauses while more sequences than this decode; None: the
            device's kind decides.

    Raises:
        ConfigError: a value is out of range.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in SPECULATIVE_METHODS:
            methods = ", ".join(SPECULATIVE_METHODS)
            raise ConfigError(f"method must be one of {methods}, not {self.method!r}")
        self._check_model()
        self._check("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        self._check("prompt_lookup_max", 1, 64)
        self._check("prompt_lookup_min", 1, 64)
        if self.disable_by_batch_size is not None:
            self._check("disable_by_batch_size", 1, None)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min, {self.prompt_lookup_min}, must not exceed prompt_lookup_max, "
                f"{self.prompt_lookup_max}"
            )

    @staticmethod
    def from_mapping(values: Any) -> SpeculativeConfig:
        """Return the settings in a mapping of names to plain values.

        Raises:
            ConfigError: ``values`` is no mapping, a name is unknown, or a value is out of range.
        """
        if not is_mapping(values):
            raise ConfigError(f"speculative settings must be names with values, not {values!r}")
        known = {field.name for field in fields(SpeculativeConfig)}
        unknown = sorted(str(name) for name in values if name not in known)
        if unknown:
            names = ", ".join(field.name for field in fields(SpeculativeConfig))
            raise ConfigError(
                f"unknown speculative settings: {', '.join(unknown)}; known are {names}"
            )
        return SpeculativeConfig(**values)

    def _check_model(self) -> None:
        if self.method != "draft_model" and self.model is not None:
            raise ConfigError(f"model must not be given with method {self.method}")
        if self.method == "draft_model" and not (isinstance(self.model, str) and self.model):
            raise ConfigError(f"model must be a hub id or folder, not {self.model!r}")

    def _check(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(f"{name} must be a whole number {bounds}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """Adapters, for all models of the process.

    Attributes:
        max_loaded: most adapters of a model in memory; at the limit an idle adapter from a folder
            is evicted, and loaded again when a request names it.
        max_rank: largest rank.
        directory: a folder of adapters, which requests may name as models; None for none.
        allowed_roots: further folders below which requests may name paths.
        allowed_repos: hub ids, with ``*`` for any text, that requests may name as paths.
    """

    max_loaded: int = 64
    max_rank: int = 256
    directory: str | None = None
    allowed_roots: tuple[str, ...] = ()
    allowed_repos: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Result cache and batching of pooling models, per model.

    Attributes:
        cache_bytes: size of the cache of results; 0 turns it off.
        max_batch_wait_ms: milliseconds that an input may wait for others to fill its batch.
    """

    cache_bytes: int = 64 * 2**20
    max_batch_wait_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingConfig:
    """Models that are loaded and unloaded while the server runs.

    Attributes:
        allowed_roots: folders below which requests may name models to load.
        allowed_repos: hub ids, with ``*`` for any text, that requests may load.
        max_encoder_bytes: most bytes of weights of all pooling models together; at the limit the
            least recently used are evicted, and loaded again by their next request. None is no
            limit.
        directories: folders of models that requests may name, see ``engine.catalogue``.
        scans_hub_cache: requests may also name the models in the hub's cache.
        ttl_s: seconds after its last request until a model is evicted; None: never.
        wait_s: most seconds that a load waits for the requests of models that it replaces.
        min_use_s: seconds that a model stays after its load, so that those that came for it get in.
        default_model: answers requests for unknown names that begin with ``gpt-`` or ``claude-``;
            None: none does.
        model: settings of models that are loaded later, besides their own.
    """

    allowed_roots: tuple[str, ...] = ()
    allowed_repos: tuple[str, ...] = ()
    max_encoder_bytes: int | None = None
    directories: tuple[str, ...] = ()
    scans_hub_cache: bool = False
    ttl_s: float | None = None
    wait_s: float = 120.0
    min_use_s: float = 1.0
    default_model: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)

    @property
    def may_add(self) -> bool:
        """True if requests may load models besides those of the start."""
        return bool(
            self.allowed_roots or self.allowed_repos or self.directories or self.scans_hub_cache
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksConfig:
    """The processes that compute one model together, started by ``mlx.launch`` or MPI.

    Attributes:
        rank: this process.
        size: how many there are; 1 for a process that is alone.
        backend: the name of MLX's backend by which they reach each other.
        host: the address of rank 0 that the others connect to; None for those that the launcher
            passed, or else those of the machine.
        timeout_s: seconds without progress after which a rank is taken for lost.
        join_timeout_s: seconds that ranks wait for each other at the start.
    """

    rank: int = 0
    size: int = 1
    backend: str = "ring"
    host: str | None = None
    timeout_s: float = 60.0
    join_timeout_s: float = 25.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of the engine thread.

    ``restart_on_failure``: if the engine thread dies, end every open stream with an error and
    restart the thread instead of ending the process. ``speculative``: None for no speculative
    decoding. ``logprobs_mode``: one of ``request.LOGPROBS_MODES``, for requests that name none.
    ``warm_up``: run steps of the usual shapes while the server is idle, on devices that compile per
    shape. ``kernel_cache_dir``: the folder of compiled CUDA kernels and of what loads chose, as
    ``kernels.store.kernel_folder`` takes it.
    ``enable_prompt_embeds``: prompts may be rows of numbers in place of tokens. ``ranks``: the
    processes that compute the generation models together.
    """

    models: tuple[ModelConfig, ...] = (ModelConfig(),)
    cache: CacheConfig = field(default_factory=CacheConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    encoders: EncoderConfig = field(default_factory=EncoderConfig)
    loading: LoadingConfig = field(default_factory=LoadingConfig)
    speculative: SpeculativeConfig | None = None
    seed: int = 0
    restart_on_failure: bool = False
    logprobs_mode: str = "raw_logprobs"
    warm_up: bool = True
    kernel_cache_dir: str | None = None
    enable_prompt_embeds: bool = False
    ranks: RanksConfig = field(default_factory=RanksConfig)
    kv_peers: KVPeersConfig = field(default_factory=KVPeersConfig)

    def max_len_of(self, model: ModelConfig, own: int | None) -> int | None:
        """Return the context cap, in tokens, of a model whose own context length is ``own``."""
        cap = model.max_model_len
        is_shared = len(self.models) > 1 and not model.max_model_len_is_own
        return own if is_shared and cap is not None and own is not None and own < cap else cap

    @property
    def num_host_shares(self) -> int:
        """Return into how many parts ``CacheConfig.kv_host_bytes`` is divided; each model has one.

        There are two at least where models may be added, and no more for those that are.
        """
        return max(2 if self.loading.may_add else 1, len(self.models))

    def max_source_len_of(self, model: ModelConfig, learned: int | None) -> int:
        """Return the most tokens of a source of an encoder-decoder.

        Args:
            model: its settings.
            learned: the positions that its encoder has learned; None if they have no end.

        Raises:
            ConfigError: a source could be longer than the positions of the only model.
        """
        cap = model.max_source_len
        if learned is None:
            return cap or DEFAULT_MAX_SOURCE_LEN
        if cap is not None and cap > learned and len(self.models) == 1:
            raise ConfigError(
                f"--max-source-len is {cap}; the encoder has positions for {learned} tokens."
            )
        return min(cap or learned, learned)
