"""The settings of the HTTP front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mlx_parallm.media_limits import MediaLimits

KEY_SCOPE = "key"
CACHE_SCOPES = (KEY_SCOPE, "server")
RESPONSE_PLACES = IN_MEMORY, ON_DISK = "memory", "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front end.

    Attributes:
        fd: descriptor of the bound socket to serve on, instead of ``host`` and ``port``.
        api_keys: keys that may use the model routes; empty admits everybody.
        admin_api_keys: keys that may change the server; empty means ``api_keys``.
        allowed_hosts: hosts that requests may name besides the loopback interface's, checked if no
            API key is set; "*" any.
        cache_scope: which requests share cached results, one of ``CACHE_SCOPES``: "key" is those of
            the same API key, "server" is all; None is "key" if several keys are set.
        allowed_origins: CORS origins; empty allows none; "*" any.
        max_logprobs: cap on ``top_logprobs``, ``logprobs`` and ``prompt_logprobs``; -1 is no cap.
        max_body_bytes: largest request body.
        max_media_body_bytes: the same where a model is served that takes images or audio, if it is
            more.
        max_audio_seconds: longest recording of a request.
        max_tokenize_bytes: largest body of a request that only tokenises, counts or detokenises.
        max_adapter_bytes: largest upload of an adapter.
        max_weights_bytes: largest upload of weights of a model.
        max_client_body_bytes: most bytes of one client's request bodies held at once.
        client_timeout_s: a client that sends or reads nothing for this long is disconnected; 0 is
            off.
        store_responses: where stored responses are, one of ``RESPONSE_PLACES``: on disk they
            outlive the server, within the same bounds.
        max_stored_responses: most responses kept in memory for /v1/responses; 0 keeps none.
        max_stored_bytes: most bytes of stored responses together, conversations included.
        data_dir: folder of files, batches, conversations and training sessions; created at start;
            None serves none of them.
        max_file_bytes: largest uploaded file.
        max_files_bytes: most bytes of all files together.
        max_conversations_bytes: most bytes of conversations and stored chats together.
        max_training_sessions: most training sessions.
        max_training_session_bytes: most bytes of the data and the log of a training session.
        max_training_bytes: most bytes of the data and the logs of all training sessions together.
        training_cache_bytes: most memory of the hidden states that the training sessions of a model
            keep; 0 keeps none.
        max_num_seqs_of_batches: most sequences of batches in the engine at once; None is half of
            ``max_num_seqs``, or of ``max_num_seqs_per_client`` if that is less.
        verifier_urls: URLs that /v1/rl/rollout may call for the reward of a sample.
        stream_interval: tokens of a sample that a stream sends together.
        sse_keep_alive_s: a comment line is sent on a stream silent for this long; 0 is off.
        engine_process: True if the models live in a process of their own.
        data_parallel_size: engine processes of this machine that serve the same models; 1: there is
            one engine; ``AUTO``: one for each NVIDIA GPU; ``NONE_HERE``: none beside ``engines``.
            Once they are counted (``cli.engines.with_engine_count``), those of ``engines`` too.
        data_parallel_devices: the NVIDIA GPU of each engine, by its index; those of one index share
            it. Empty: one GPU for each engine.
        engines: HOST:PORT of each engine of another machine, which serves the same models.
        peer_key_file: has the key that those machines know too.
        peers: addresses of the servers that change together with this one; see ``parse_peers``.
        peer_key: the admin key that they are sent; None: the first one of this server.
        peer_url: this server's own address among them; None finds it out.
        api_server_count: processes that speak HTTP; 1: the server's own.
        shutdown_timeout_s: time that running requests get to finish after SIGTERM.
        shutdown_delay_s: time after SIGTERM in which requests are still served, while /health and
            /ready answer 503; no connection is accepted after it. 0: none.
        log_format: "console" or "json".
    """

    host: str = "127.0.0.1"
    port: int = 8000
    fd: int | None = None
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cache_scope: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    max_logprobs: int = 20
    max_body_bytes: int = 8 * 1024 * 1024
    max_media_body_bytes: int = 64 * 1024 * 1024
    max_audio_seconds: float = 3600.0
    max_tokenize_bytes: int = 1024 * 1024
    max_adapter_bytes: int = 2**30
    max_weights_bytes: int = 8 * 2**30
    max_client_body_bytes: int = 256 * 1024 * 1024
    client_timeout_s: float = 30.0
    store_responses: str = IN_MEMORY
    max_stored_responses: int = 1024
    max_stored_bytes: int = 256 * 2**20
    data_dir: str | None = None
    max_file_bytes: int = 200 * 2**20
    max_files_bytes: int = 9 * 2**30
    max_conversations_bytes: int = 2**30
    max_training_sessions: int = 100
    max_training_session_bytes: int = 2**30
    max_training_bytes: int = 10 * 2**30
    training_cache_bytes: int = 256 * 2**20
    max_num_seqs_of_batches: int | None = None
    verifier_urls: tuple[str, ...] = ()
    stream_interval: int = 1
    sse_keep_alive_s: float = 5.0
    engine_process: bool = False
    data_parallel_size: int = 1
    data_parallel_devices: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    peer_key_file: Path | None = None
    peers: tuple[str, ...] = ()
    peer_key: str | None = field(default=None, repr=False)
    peer_url: str | None = None
    api_server_count: int = 1
    shutdown_timeout_s: float = 30.0
    shutdown_delay_s: float = 0.0
    root_path: str = ""
    log_level: str = "info"
    log_format: str = "console"
    access_log: bool = True
    media: MediaLimits = field(default_factory=MediaLimits)

    @property
    def separates_keys(self) -> bool:
        """True if requests of one API key never reuse results of another's."""
        if self.cache_scope is not None:
            return self.cache_scope == KEY_SCOPE
        # If only the admin key is set, model routes need no key, so clients have no identity.
        return bool(self.api_keys) and len({*self.api_keys, *self.admin_api_keys}) > 1
