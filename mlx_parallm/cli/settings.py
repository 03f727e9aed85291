"""The table of settings, the source of all flags, environment variables, file keys and docs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_parallm.cli import setting_values as values
from mlx_parallm.cli.setting import (
    ADAPTERS,
    ADDRESS,
    BATCHING,
    DEFAULTS,
    MEMORY,
    MODELS,
    PROCESS,
    REQUESTS,
    STORAGE,
    Setting,
)
from mlx_parallm.cli.setting_values import Parse
from mlx_parallm.config import (
    KV_CACHE_DTYPES,
)
from mlx_parallm.media_limits import MOST_PIXELS
from mlx_parallm.parsing.registry import reasoning_format_names, tool_format_names
from mlx_parallm.server_config import CACHE_SCOPES, RESPONSE_PLACES
from mlx_parallm.types.request import LOGPROBS_MODES


def _part(divisor: int, least: int = 0, *, times: int = 1) -> Callable[[int], int]:
    """Return a function that takes so many ``times`` a part of a size.

    ``least`` bounds the result, unless the size is 0.
    """
    return lambda size: max(times * size // divisor, least) if size else 0


def _same(value: Any) -> Any:
    return value


def _setting(name: str, target: str, parse: Parse, group: str, text: str, **more: Any) -> Setting:
    return Setting(name=name, target=target, parse=parse, group=group, help=text, **more)


TOKENIZE_BYTES = DEFAULTS["server"].max_tokenize_bytes
IMAGE_BYTES = DEFAULTS["media"].max_bytes
STORED_RESPONSES = DEFAULTS["server"].max_stored_responses

SETTINGS: tuple[Setting, ...] = (
    _setting(
        "model", "model.paths", values.listed, MODELS,
        "hub id, folder or GGUF file of a model; several may be given. Without one, the server "
        "uses the small demonstration model of the package.",
        metavar="ID_OR_FOLDER",
    ),
    _setting(
        "served-model-name", "model.names", values.listed, MODELS,
        "names that clients may use instead of the id or folder; answers have the first. With "
        "several models write MODEL=NAME. Without a name, the last part of a folder's path is one "
        "too, if no other model has it.",
        metavar="NAME",
    ),
    _setting("revision", "model.revision", values.text, MODELS,
             "branch, tag or commit on the hub. With several models write MODEL=REV.",
             metavar="REV", per_model=True),
    _setting(
        "dtype", "model.dtype", values.choice("auto", "float32", "float16", "bfloat16"), MODELS,
        "one of auto, float32, float16, bfloat16. With several models MODEL=DTYPE is possible. On "
        "a GPU, auto keeps the checkpoint's dtype. On the CPU, auto casts and dequantises to "
        "float32 if that fits in memory.",
        per_model=True,
    ),
    _setting("max-model-len", "model.max_model_len", values.integer(1), MODELS,
             "longest context in tokens; the model's own if not given. With several models "
             "MODEL=TOKENS is possible. A number without a model does not raise a model's own "
             "shorter context.", metavar="TOKENS", per_model=True),
    _setting("max-source-len", "model.max_source_len", values.integer(1), MODELS,
             "longest source of an encoder-decoder in tokens; if not given, the positions that its "
             "encoder has learned (BART: 1024), or 4096 if they have no end (T5). With several "
             "models MODEL=TOKENS is possible.", metavar="TOKENS", per_model=True),
    _setting(
        "hf-overrides", "model.hf_overrides", values.table, MODELS,
        "other values of fields of the model's config.json, as JSON, such as "
        '{"rope_theta": 1000000}. With several models MODEL=JSON is possible.',
        aliases=("json-model-override-args",), metavar="JSON", per_model=True,
    ),
    _setting("chat-template", "model.chat_template", values.text, MODELS,
             "a Jinja template, or a file with one, instead of the model's own. With several "
             "models MODEL=FILE_OR_TEXT is possible.",
             metavar="FILE_OR_TEXT", per_model=True),
    _setting(
        "default-chat-template-kwargs", "model.chat_template_kwargs", values.table, MODELS,
        'default values of chat template variables, as JSON, such as '
        '{"enable_thinking": false}; requests can override them.', metavar="JSON",
    ),
    _setting(
        "tool-call-parser", "model.tool_call_parsers", values.parsers(*tool_format_names()), MODELS,
        "how the models write tool calls: auto detects it, none leaves calls in the text. With "
        "several models MODEL=NAME is possible. Names: "
        + ", ".join(tool_format_names()) + ". Default: auto.",
        metavar="NAME",
    ),
    _setting(
        "reasoning-parser", "model.reasoning_parsers", values.parsers(*reasoning_format_names()),
        MODELS, "how the models write reasoning: auto detects it, none leaves reasoning in the "
        "text. With several models MODEL=NAME is possible. Names: "
        + ", ".join(reasoning_format_names()) + ". Default: auto.", metavar="NAME",
    ),
    _setting(
        "task", "model.tasks", values.tasks, MODELS,
        "the task of a model; auto (default) reads it from its files. With several models "
        "MODEL=TASK is possible. Tasks: auto, generate, embed, token_embed, classify, "
        "token_classify, score (also rerank), reward.", aliases=("convert",), metavar="TASK",
    ),
    _setting("enable-auto-tool-choice", "model.enable_auto_tool_choice", values.boolean, MODELS,
             "let models decide whether they call tools."),
    _setting("trust-remote-code", "model.trust_remote_code", values.boolean, MODELS,
             "run Python code that comes with a model or tokenizer."),
    _setting("seed", "engine.seed", values.integer(0, 2**63 - 1), MODELS,
             "seed of requests without one.", metavar="N"),
    _setting("allowed-model-roots", "loading.allowed_roots", values.listed, MODELS,
             "folders below which requests may name models to load while the server runs.",
             metavar="FOLDER"),
    _setting("allowed-model-repos", "loading.allowed_repos", values.listed, MODELS,
             "hub ids of models that requests may load, and so download, such as "
             "org/name, org/* or *; none if not given.", metavar="ID"),
    _setting("model-dir", "loading.directories", values.listed, MODELS,
             "folders of models: a request may name any model in them, and loads it. A model is a "
             "folder with config.json and weights or a GGUF file, named by its path below the "
             "folder (name, or org/name).", metavar="FOLDER"),
    _setting("scan-hub-cache", "loading.scans_hub_cache", values.boolean, MODELS,
             "requests may also name the models that the hub's cache has."),
    _setting("model-ttl", "loading.ttl_s", values.number(0), MODELS,
             "seconds after its last request until a model is evicted; never if not given. Its "
             "next request loads it again.", metavar="S"),
    _setting("model-wait-s", "loading.wait_s", values.number(0), MODELS,
             "most seconds that a load waits for the requests of models that it replaces; then "
             "it is refused with 503.", metavar="S"),
    _setting("default-model", "loading.default_model", values.text, MODELS,
             "the name of a model that answers requests for unknown names that begin with gpt- or "
             "claude-; without it they are refused with 404.", metavar="NAME"),
    _setting("adapter-dir", "adapters.directory", values.text, ADAPTERS,
             "a folder of adapters (LoRA, DoRA): clients may name each folder in it as a model, "
             "which is loaded with its first request.", metavar="FOLDER"),
    _setting("allowed-adapter-roots", "adapters.allowed_roots", values.listed, ADAPTERS,
             "further folders below which requests may name adapters and weights by path.",
             metavar="FOLDER"),
    _setting("allowed-adapter-repos", "adapters.allowed_repos", values.listed, ADAPTERS,
             "hub ids of adapters that requests may load, and so download, such as "
             "org/name, org/* or *; none if not given.", metavar="ID"),
    _setting("max-loras", "scheduler.max_loras", values.integer(1), ADAPTERS,
             "most adapters of a model in one batch; requests with others wait.", metavar="N"),
    _setting("max-cpu-loras", "adapters.max_loaded", values.integer(1), ADAPTERS,
             "most adapters of a model in memory; at the limit an idle one from a folder is "
             "unloaded.",
             metavar="N"),
    _setting("max-adapter-bytes", "server.max_adapter_bytes", values.size, ADAPTERS,
             "largest upload of an adapter, such as 1GiB.", metavar="SIZE"),
    _setting("max-weights-bytes", "server.max_weights_bytes", values.size, ADAPTERS,
             "largest upload of weights of a model, such as 8GiB.", metavar="SIZE"),
    _setting("max-lora-rank", "adapters.max_rank", values.integer(1), ADAPTERS,
             "largest rank of an adapter.", metavar="N"),
    _setting(
        "kv-memory-fraction", "cache.memory_fraction", values.number(0, 1, above=True), MEMORY,
        "share of the free memory that the KV of all models together may take. On the CPU it is no "
        "more than the weights take, or 1 GiB. On a Mac it is no more than a quarter of the "
        "memory that no program uses and 16 times the weights, or 1 GiB.",
        aliases=("gpu-memory-utilization",), metavar="SHARE",
    ),
    _setting("memory", "memory.limit", values.memory_bound, MEMORY,
             "most memory of all models together, such as 24GiB, or a share such as 0.7 of what is "
             "free before they are loaded: weights, KV and adapters. Models that are loaded later "
             "share it, and the least recently used ones leave it. If not given: the weights that "
             "are loaded at the start, and the share of --kv-memory-fraction.",
             metavar="SIZE_OR_SHARE"),
    _setting("kv-cache-memory-bytes", "cache.kv_cache_bytes", values.size, MEMORY,
             "size of the KV of all models together, such as 8GiB; it overrides the share. "
             "Exactly this much is allocated, and the start fails if it is not free. Blocks that "
             "sequences cannot use hold cached prefixes. See docs/memory.md.", metavar="SIZE"),
    _setting("mlx-cache-bytes", "memory.mlx_cache_bytes", values.size_or_none, MEMORY,
             "most freed memory that MLX keeps for new arrays, such as 1GiB; 0 keeps none. If not "
             "given: on a Mac 5% of the memory that Metal recommends, from 256 MiB to 2 GiB; "
             "elsewhere MLX's own limit. Engines of one device divide it.", metavar="SIZE"),
    _setting("wired-memory-bytes", "memory.wired_bytes", values.size_or_none, MEMORY,
             "on a Mac, size of the arrays that macOS must not compress or swap, such as 8GiB; at "
             "most the memory less 35% of it, or less 8 GiB if that is more. Kernel panics were "
             "reported with such memory, and none without: see docs/memory.md. 0 wires none.",
             metavar="SIZE"),
    _setting(
        "kv-cache-dtype", "cache.kv_cache_dtype", values.choice(*KV_CACHE_DTYPES), MEMORY,
        "auto keeps KV in the model's dtype; int8 and int4 keep it in 8 or 4 bits. With several "
        "models MODEL=DTYPE is possible. In 8 or 4 bits, about two or four times as many tokens "
        "of a 16-bit model fit, at some cost of accuracy.",
        per_model=True,
    ),
    _setting("block-size", "cache.block_size", values.integer(1, 1024), MEMORY,
             "tokens in a block of KV.", metavar="TOKENS"),
    _setting("enable-prefix-caching", "cache.enable_prefix_caching", values.boolean, MEMORY,
             "reuse the KV of equal prefixes."),
    _setting("kv-disk", "cache.kv_disk", values.folder, MEMORY,
             "folder that keeps the KV of prompts and answers, so that equal prefixes are read "
             "instead of computed after they were evicted from memory, and after a restart. "
             "Several servers, and engines of --data-parallel-size, can share it. Whoever can "
             "read it can learn the prompts: it is made for this user only. See docs/memory.md.",
             metavar="FOLDER"),
    _setting("kv-disk-bytes", "cache.kv_disk_bytes", values.size, MEMORY,
             "most bytes of --kv-disk, of all models and processes together, such as 100GiB; the "
             "least recently used KV is deleted beyond that.", metavar="SIZE"),
    _setting("kv-host-bytes", "cache.kv_host_bytes", values.size_or_none, MEMORY,
             "on an NVIDIA GPU, most bytes of evicted KV that each engine keeps in host memory, "
             "such as 32GiB; 0 keeps none. Elsewhere the device and the host share their memory, "
             "so that --kv-cache-memory-bytes is the setting for more.", metavar="SIZE"),
    _setting("kv-peers", "kv_peers.urls", values.listed, MEMORY,
             "addresses of servers with --kv-serve, such as http://10.0.0.2:8000, or a name's as "
             "dns://NAME:PORT: prefixes that they have of the same model are read from them "
             "instead of computed, if that is faster. Trusted servers only: what they send cannot "
             "be checked. See docs/memory.md.", metavar="URL"),
    _setting("kv-serve", "kv_peers.is_served", values.boolean, MEMORY,
             "let servers that hold the admin key read the KV of prefixes from this one, by "
             "/v1/kv/blocks. Who can read it can learn the prompts, so it needs --admin-api-key, "
             "or a loopback address without keys."),
    _setting("kv-across-devices", "kv_peers.across_devices", values.boolean, MEMORY,
             "with --kv-peers or --kv-serve: take KV of another kind of device, such as that of an "
             "NVIDIA GPU on a Mac, for equal. Its bits differ, so tokens may. All servers need "
             "the flag."),
    _setting("prefill-peer", "kv_peers.prefill_url", values.text, MEMORY,
             "address of a server with --kv-serve that computes long prompts for this one, if that "
             "and sending their KV is faster: a faster device over a fast link. See "
             "docs/memory.md.", metavar="URL"),
    _setting("prefill-min-tokens", "kv_peers.prefill_min_tokens", values.integer(1), MEMORY,
             "tokens of a prompt that must be missing here before --prefill-peer is asked.",
             metavar="TOKENS"),
    _setting("state-cache-memory", "cache.state_cache_bytes", values.size_or_none, MEMORY,
             "models with a recurrent or convolution state (Qwen3.5, Granite 4, Mamba and others): "
             "part of a model's KV memory, in each engine, that keeps the states after cached "
             "prefixes, such as 4GiB; 0 keeps none, and no prefix is reused then. If not given, "
             "what 64 prefixes take, at most an eighth of the KV memory.", metavar="SIZE"),
    _setting("state-snapshot-tokens", "cache.state_snapshot_tokens", values.integer(1), MEMORY,
             "tokens between such states in the middle of a long prompt.", metavar="N"),
    _setting("result-cache-bytes", "", values.size_or_none, MEMORY,
             "memory of each cache of a model's results: those of a pooling model for equal "
             "inputs (64MiB if not given), and the hidden states that the training sessions of a "
             "model keep (256MiB if not given). 0 keeps none.",
             metavar="SIZE",
             shares=(("encoders.cache_bytes", _same), ("server.training_cache_bytes", _same))),
    _setting("pooling-memory-bytes", "loading.max_encoder_bytes", values.size, MEMORY,
             "most bytes of the weights of all pooling models together, such as 4GiB; no limit if "
             "not given. At the limit the least recently used ones are evicted, and loaded again "
             "by their next request.",
             metavar="SIZE"),
    _setting("max-num-seqs", "scheduler.max_num_seqs", values.integer(1), BATCHING,
             "most sequences of a model running at once.", metavar="N"),
    _setting("max-num-batched-tokens", "scheduler.max_num_batched_tokens", values.integer(1),
             BATCHING, "most tokens in a step; longer prompts are prefilled in chunks. If not "
             "given: 2048 on an NVIDIA GPU, 1024 elsewhere.", metavar="TOKENS"),
    _setting("max-decode-stall-ms", "scheduler.max_decode_stall_ms", values.number(0),
             BATCHING, "upper bound of a step, in ms, while sequences decode; prefill is shortened "
                       "to fit, from measured step times. 0: only the token budget bounds prefill. "
                       "If not given: 50 on an NVIDIA GPU, where steps of up to three quarters of "
                       "the token budget may take longer; 0 elsewhere.",
             metavar="MS"),
    _setting("max-num-seqs-per-key", "scheduler.max_num_seqs_per_client", values.integer(1),
             BATCHING, "most running sequences of one API key; no limit if not given.",
             metavar="N"),
    _setting("max-waiting", "scheduler.max_waiting", values.integer(0), BATCHING,
             "most waiting sequences; beyond it requests are refused with 429, and those too large "
             "for an empty queue with 400. 0 is no limit.",
             aliases=("max-queue-size",), metavar="N"),
    _setting("speculative-config", "engine.speculative", values.speculative, BATCHING,
             "speculative decoding, as JSON with vLLM's names, such as "
             '{"method": "ngram", "num_speculative_tokens": 4}. None if not given. '
             "See docs/speculation.md.",
             metavar="JSON"),
    _setting("host", "server.host", values.text, ADDRESS,
             "address to listen on, or a name for all of its addresses; localhost is 127.0.0.1 and "
             "::1, 0.0.0.0 is every IPv4 interface."),
    _setting("port", "server.port", values.integer(0, 65535), ADDRESS,
             "port to listen on; 0 takes a free one."),
    _setting("fd", "server.fd", values.integer(0), ADDRESS,
             "descriptor of a bound TCP socket inherited from the parent process; the server "
             "listens on it instead of host and port.", metavar="N"),
    _setting("api-key", "server.api_keys", values.listed, ADDRESS,
             "key a client must send; several may be given.", metavar="KEY"),
    _setting("admin-api-key", "server.admin_api_keys", values.listed, ADDRESS,
             "key for routes that change the server; the API keys if not given.",
             metavar="KEY"),
    _setting("api-key-file", "server.api_keys", values.keys_in_file, ADDRESS,
             "file with a key on each line, such as a secret of a container; added to --api-key.",
             metavar="FILE"),
    _setting("admin-api-key-file", "server.admin_api_keys", values.keys_in_file, ADDRESS,
             "file with a key on each line; added to --admin-api-key.", metavar="FILE"),
    _setting("peers", "server.peers", values.listed, ADDRESS,
             "servers that change together with this one, itself included: http://HOST:PORT, or "
             "dns://NAME:PORT for all addresses of a name. Adapters, weights, pauses and models "
             "that change at one change at all or at none. See docs/replicas.md.", metavar="URL"),
    _setting("peer-key", "server.peer_key", values.text, ADDRESS,
             "admin key that peers are sent; the first admin key if not given.", metavar="KEY"),
    _setting("peer-url", "server.peer_url", values.text, ADDRESS,
             "address of this server among its peers; it finds itself in their list if not given.",
             metavar="URL"),
    _setting("allowed-hosts", "server.allowed_hosts", values.hosts, ADDRESS,
             "hosts that requests without an API key may name (Host header), besides localhost "
             "and loopback addresses; * for any. If not given, a server that listens beyond the "
             "loopback interface accepts any.", metavar="HOST"),
    _setting("cache-scope", "server.cache_scope", values.choice(*CACHE_SCOPES), ADDRESS,
             "which requests share cached prefixes and cached results of pooling models: key or "
             "server. With key, these are requests of one API key; with server, all requests. The "
             "default is key if several keys are set, admin keys included, else server."),
    _setting("allowed-origins", "server.allowed_origins", values.listed, ADDRESS,
             "web origins that may call from a browser; * for any.", metavar="ORIGIN"),
    _setting("allowed-methods", "server.allowed_methods", values.listed, ADDRESS,
             "methods that such pages may use.", metavar="METHOD"),
    _setting("allowed-headers", "server.allowed_headers", values.listed, ADDRESS,
             "headers that such pages may send.", metavar="HEADER"),
    _setting("allow-credentials", "server.allow_credentials", values.boolean, ADDRESS,
             "let such pages send cookies."),
    _setting("root-path", "server.root_path", values.any_text, ADDRESS,
             "path prefix that a proxy in front strips.", metavar="PATH"),
    _setting("enable-prompt-embeds", "engine.enable_prompt_embeds", values.boolean, REQUESTS,
             "let /v1/completions take prompts as embeddings (prompt_embeds)."),
    _setting("max-images-per-request", "media.max_images", values.image_count, REQUESTS,
             "most images of a request; also as vLLM's JSON, such as {\"image\": 16}.",
             aliases=("limit-mm-per-prompt",), metavar="N"),
    _setting("max-image-pixels", "media.max_pixels", values.integer(1, MOST_PIXELS), REQUESTS,
             "most pixels of an image, as sent and as the model's image processor resizes it.",
             metavar="N"),
    _setting("max-audio-seconds", "server.max_audio_seconds", values.number(0, above=True),
             REQUESTS, "longest recording of a request to /v1/audio; longer ones are refused.",
             metavar="SECONDS"),
    _setting("media-timeout", "media.timeout_s", values.number(0, above=True), REQUESTS,
             "seconds that fetching an image may take, redirects included.", metavar="SECONDS"),
    _setting("allowed-media-domains", "media.allowed_domains", values.listed, REQUESTS,
             "hosts from which requests may let the server fetch images; * for any public host. "
             "If not given, images must be in the request (data: URLs).", metavar="HOST"),
    _setting("allowed-local-media-path", "media.allowed_local_path", values.text, REQUESTS,
             "folder below which file: URLs of images may lead; none if not given.",
             metavar="FOLDER"),
    _setting("max-logprobs", "server.max_logprobs", values.integer(-1), REQUESTS,
             "most log-probabilities per token that a request may ask for; -1 is no limit.",
             metavar="N"),
    _setting("logprobs-mode", "engine.logprobs_mode", values.choice(*LOGPROBS_MODES), REQUESTS,
             "log-probabilities of sampled tokens, for requests that name no mode: raw_logprobs "
             "or processed_logprobs. Raw ones are the model's own; processed ones are those of "
             "the distribution that tokens were drawn from. See docs/logprobs.md."),
    _setting("max-body-bytes", "server.max_body_bytes", values.size, REQUESTS,
             "largest body of a request for generation, such as 8MiB; more is answered with 413. "
             "If not given, it is 64MiB where a served model takes images or audio, 35 minutes of "
             "WAV at 16 kHz. A body that is only tokenised, counted or turned into text may have "
             "an eighth, or 1MiB if that is more, images not counted. An image's file may have a "
             "third, or 20MiB if that is more.",
             metavar="SIZE",
             shares=(("server.max_media_body_bytes", _same),
                     ("server.max_tokenize_bytes", _part(8, TOKENIZE_BYTES)),
                     ("media.max_bytes", _part(3, IMAGE_BYTES)))),
    _setting("max-body-bytes-per-key", "server.max_client_body_bytes", values.size, REQUESTS,
             "most bytes of one API key's request bodies held at once, such as 256MiB; beyond it "
             "requests are answered with 429.", metavar="SIZE"),
    _setting("client-timeout", "server.client_timeout_s", values.number(0), REQUESTS,
             "a client is disconnected if it stops sending its request, or stops reading its "
             "answer, for this long; 0 is off.", metavar="SECONDS"),
    _setting("stream-interval", "server.stream_interval", values.integer(1), REQUESTS,
             "tokens of a sample that a stream sends together. More than 1 saves processor time "
             "with many streams. The first and the last token are sent at once. Tokens that "
             "arrive while the server or the client is behind are sent together in any case.",
             metavar="N"),
    _setting("sse-keep-alive-interval", "server.sse_keep_alive_s", values.number(0), REQUESTS,
             "a comment is sent on a stream silent for this long; 0 is off.",
             metavar="SECONDS"),
    _setting("max-stored-responses-bytes", "server.max_stored_bytes", values.size_or_none, REQUESTS,
             "most bytes of the responses kept in memory for /v1/responses, so that later requests "
             "can continue them: conversations included, such as 256MiB; 0 keeps none. There may "
             "be a response for each 256KiB, and 1024 at least.",
             metavar="SIZE",
             shares=(("server.max_stored_responses", _part(256 << 10, STORED_RESPONSES)),)),
    _setting("store-responses", "server.store_responses", values.choice(*RESPONSE_PLACES), REQUESTS,
             "where stored responses are kept: in memory, or on disk too, below --data-dir, where "
             "a later server finds them."),
    _setting("verifier-urls", "server.verifier_urls", values.listed, REQUESTS,
             "URLs that rollouts may call for the reward of a sample; requests must name them "
             "exactly. None if not given. See docs/rl-api.md.", metavar="URL"),
    _setting("data-dir", "server.data_dir", values.text, STORAGE,
             "folder of files, batches, conversations, stored chats and training sessions, created "
             "at start; only one server at a time can use it. If not given: mlx_parallm in "
             "$XDG_DATA_HOME or ~/.local/share, on a Mac in ~/Library/Application Support.",
             metavar="FOLDER"),
    _setting("max-file-bytes", "server.max_file_bytes", values.size, STORAGE,
             "largest file that can be uploaded, such as 200MiB.", metavar="SIZE"),
    _setting("max-data-bytes", "", values.size, STORAGE,
             "most bytes of what clients keep in --data-dir; 20GiB if not given. Files may have "
             "nine twentieths of it together; beyond that, uploads are refused. Conversations and "
             "stored chats may have a twentieth, and those of one key half of that if there are "
             "several; beyond that, a key's oldest chats are evicted, and items of conversations "
             "refused. The data and logs of all training sessions may have the other half, and "
             "one session a twentieth of the whole; beyond that, sessions are paused, and new ones "
             "are refused with 409. There may be a session for each 200MiB.",
             metavar="SIZE",
             shares=(("server.max_files_bytes", _part(20, times=9)),
                     ("server.max_conversations_bytes", _part(20)),
                     ("server.max_training_bytes", _part(2)),
                     ("server.max_training_session_bytes", _part(20)),
                     ("server.max_training_sessions", _part(200 << 20, 1)))),
    _setting("max-num-seqs-of-batches", "server.max_num_seqs_of_batches", values.integer(1),
             STORAGE, "most sequences of batches in the engine at once; the rest is for other "
                      "requests. If not given: half of --max-num-seqs, or of "
                      "--max-num-seqs-per-key if that is less.", metavar="N"),
    _setting("engine-process", "server.engine_process", values.boolean, PROCESS,
             "run the models in a separate process, so that HTTP, JSON and tokenizing take none "
             "of their time. It helps many streams on a GPU if cores are free."),
    _setting("data-parallel-size", "server.data_parallel_size", values.engine_count, PROCESS,
             "engine processes that serve the same models behind one port. Each has its own copy "
             "of the weights, and its own NVIDIA GPU or an equal share of the CPU cores and of the "
             "KV memory. auto: one for each NVIDIA GPU, else one.", aliases=("dp",), short="dp",
             metavar="N"),
    _setting("data-parallel-devices", "server.data_parallel_devices", values.listed, PROCESS,
             "index of the NVIDIA GPU of each engine of --data-parallel-size. Engines with the "
             "same index share a GPU. If not given: one GPU for each engine.", metavar="INDEX"),
    _setting("engine", "server.engines", values.listed, PROCESS,
             "HOST:PORT at which `mlx_parallm engine` listens on another machine, which runs an "
             "engine of the same models for this server. Several may be given. Engines of this "
             "machine serve beside them only if --data-parallel-size is given. See "
             "docs/scaling.md.", metavar="HOST:PORT"),
    _setting("peer-key-file", "server.peer_key_file", values.folder, PROCESS,
             "file with the key of --engine, which those machines must have too. Without one, only "
             "loopback addresses can be dialled.", metavar="FILE"),
    _setting("distributed-timeout", "ranks.timeout_s", values.number(0.1), PROCESS,
             "under mlx.launch, time without progress after which a rank counts as lost, and all "
             "ranks end.", metavar="SECONDS"),
    _setting("distributed-join-timeout", "ranks.join_timeout_s", values.number(0.1), PROCESS,
             "under mlx.launch, time that ranks wait for each other at the start.",
             metavar="SECONDS"),
    _setting("distributed-host", "ranks.host", values.text, PROCESS,
             "under mlx.launch, address of rank 0 to which the other ranks connect. If not given: "
             "those in the hostfile, then those of the machine.", metavar="ADDRESS"),
    _setting("api-server-count", "server.api_server_count", values.integer(1), ADDRESS,
             "processes that speak HTTP: they read JSON, tokenize and write answers. With more "
             "than one, the models run in a process of their own, as with --engine-process. It "
             "helps many short requests if cores are free.", metavar="N"),
    _setting("warm-up", "engine.warm_up", values.boolean, PROCESS,
             "on an NVIDIA GPU, run steps of the usual shapes while the server is idle after its "
             "start. This takes some seconds in all. Otherwise the first step of each shape would "
             "delay streams by up to 40 ms."),
    _setting("kernel-cache-dir", "engine.kernel_cache_dir", values.text, PROCESS,
             "folder of what loads find out, which later loads read: compiled kernels of an "
             "NVIDIA GPU, and how a generator runs that was loaded before. With none, nothing is "
             "kept. If not given: mlx_parallm/kernels in $XDG_CACHE_HOME or ~/.cache.",
             metavar="FOLDER"),
    _setting("shutdown-timeout", "server.shutdown_timeout_s", values.number(0), PROCESS,
             "time that running requests get to finish after SIGTERM.", metavar="SECONDS"),
    _setting("shutdown-delay", "server.shutdown_delay_s", values.number(0), PROCESS,
             "time after SIGTERM in which requests are still served, while /health and /ready "
             "answer 503, so that balancers stop sending some; connections are refused after it.",
             metavar="SECONDS"),
    _setting("restart-engine", "engine.restart_on_failure", values.boolean, PROCESS,
             "restart the engine if it dies, instead of ending the process."),
    _setting("log-level", "server.log_level",
             values.choice("debug", "info", "warning", "error", "critical"), PROCESS,
             "least severe messages shown: debug, info, warning, error or critical.",
             aliases=("uvicorn-log-level",), metavar="LEVEL"),
    _setting("log-format", "server.log_format", values.choice("console", "json"), PROCESS,
             "format of log lines: console, or json (one object per line)."),
    _setting("disable-access-log", "server.access_log", values.boolean, PROCESS,
             "do not log a line per request.", inverted=True,
             aliases=("disable-uvicorn-access-log",)),
)  # fmt: skip
