"""What the HTTP layer sees of the models that read texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol

from mlx_parallm.config import ModelConfig, ModelTask
from mlx_parallm.types.pooling import (
    EncodeInput,
    EncodeRequest,
    EncodeResults,
    EncoderInfo,
    OwnHead,
    Task,
    TokenSpan,
)
from mlx_parallm.types.request import ANY_LENGTH, TokenLimit


class TextEncoder(Protocol):
    """An encoder's tokenizer. Its methods may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        ...

    @property
    def mask_token(self) -> str | None:
        """The token that stands for a word to be found; None if there is none."""
        ...

    @property
    def pad_id(self) -> int | None:
        """The id that fills short texts; None if there is none."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text, such as those around one."""
        ...

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The special tokens before a text."""
        ...

    def encode(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[tuple[int, ...]]:
        """The ids of each text, the model's special tokens around them where they are wanted.

        Raises:
            ContextLengthError: a text has more tokens than ``limit`` allows. Nothing was encoded
                where its length shows that.
        """
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: TokenLimit = ANY_LENGTH,
        **options: Any,
    ) -> tuple[int, ...]:
        """The ids of a conversation; ``options`` are those of ``Tokenizer.render_chat``.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses (param "messages").
            ContextLengthError: as ``encode`` does.
        """
        ...

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: TokenLimit = ANY_LENGTH
    ) -> list[tuple[tuple[int, ...], int | None]]:
        """The ids of two texts in one input, special tokens included, and where the second begins.

        The latter is None where the tokenizer gives all tokens one type.

        Raises:
            ContextLengthError: as ``encode`` does.
        """
        ...

    def spans(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        limit: TokenLimit = ANY_LENGTH,
    ) -> list[list[TokenSpan]]:
        """The tokens of each text, and where they are; special ones where they are wanted.

        Raises:
            ContextLengthError: as ``encode`` does.
        """
        ...

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens, which are given as they are in the vocabulary."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if it is not one token."""
        ...

    def token_string(self, token_id: int) -> str:
        """A token's text in the vocabulary, with the marks that it has there."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        ...

    def cut(
        self, token_ids: tuple[int, ...], length: int, *, from_left: bool = False
    ) -> tuple[int, ...]:
        """An input of at most so many tokens; the special ones at its ends stay.

        ``from_left``: its last tokens are kept, not its first.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderModel:
    """A loaded encoder as its clients see it; see ``ServedModel`` for the fields of that name.

    An adapter of one is one too.

    Attributes:
        names: the first is the one reported.
        root: the hub id or folder it comes from.
        created: when, in seconds of Unix time.
        tokenizer: makes its inputs.
        info: what was found out about it.
        max_batch_tokens: of a batch, padding included.
        max_waiting: distinct inputs that may wait.
        parent: of an adapter: the first name of its model.
        head: that an adapter brings.
    """

    names: tuple[str, ...]
    root: str
    created: int
    tokenizer: TextEncoder
    info: EncoderInfo
    max_batch_tokens: int
    max_waiting: int
    parent: str | None = None
    head: OwnHead | None = None

    def request(self, request_id: str, inputs: Iterable[EncodeInput]) -> EncodeRequest:
        """A request of inputs that were made for this model."""
        return EncodeRequest(
            request_id=request_id, model=self.names[0], inputs=tuple(inputs), head=self.head
        )


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder that was loaded; ``is_loaded`` is false where it has made way for others again."""

    config: ModelConfig
    model: EncoderModel
    is_loaded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """What a model takes, in bytes.

    Attributes:
        weights: its parameters, and those of its draft model; 0 while they are away.
        kv: its pool, whether blocks are in use or not.
        cache: results that an encoder keeps.
        adapters: tensors of its loaded adapters.
    """

    weights: int = 0
    kv: int = 0
    cache: int = 0
    adapters: int = 0


class EncoderState(StrEnum):
    """Where the weights of an encoder are.

    evicted: it made way for others; its next request loads it again.
    """

    LOADED = "loaded"
    LOADING = "loading"
    EVICTED = "evicted"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStatus:
    """An encoder that requests may name, loaded or not.

    Attributes:
        names: the first is the one reported.
        root: the hub id or folder it comes from.
        state: where its weights are.
        progress: of its load, from 0 to 1; 1 once it is loaded.
        is_pinned: whether it stays in memory until it is unloaded.
        model: what is known about it; None until it was loaded once.
        parent: of an adapter: its model, whose weights state, progress and pin are about.
    """

    names: tuple[str, ...]
    root: str
    state: EncoderState
    progress: float
    is_pinned: bool
    model: EncoderModel | None
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderLoad:
    """An encoder to be loaded while the server runs.

    Attributes:
        model: a folder or a hub id; or the name of one that is served, to have it in memory.
        names: that requests are to use; ``model`` if there is none.
        task: as in ``ModelConfig``.
        dtype: as in ``ModelConfig``; None for the server's.
        revision: hub revision.
        max_model_len: cap on the length of an input; None takes the model's own.
        is_pinned: whether it stays in memory until it is unloaded.
    """

    model: str
    names: tuple[str, ...] = ()
    task: Literal["auto"] | ModelTask = "auto"
    dtype: str | None = None
    revision: str | None = None
    max_model_len: int | None = None
    is_pinned: bool = False


class EncoderClient(Protocol):
    """The encoders, seen from the event loop."""

    def models(self) -> Sequence[EncoderModel]:
        """Those that requests may name, in the order they were given."""
        ...

    def statuses(self) -> Sequence[EncoderStatus]:
        """The same, and those that are loaded for the first time."""
        ...

    def find(self, name: str) -> EncoderStatus | None:
        """The encoder, or the adapter of one, of this name."""
        ...

    async def wait(self, name: str) -> None:
        """Return once what is named in a ``ModelLoadingError`` is loaded.

        Raises:
            ModelNotFoundError: it was unloaded meanwhile.
            ModelLoadError: it cannot be loaded.
        """
        ...

    async def load(self, asked: EncoderLoad) -> EncoderStatus:
        """Serve one more encoder; returns once it is loaded.

        Raises:
            InvalidRequestError: it may not be loaded, cannot be, or its name is taken.
            NotFoundError: there is no such folder.
        """
        ...

    async def unload(self, name: str) -> EncoderStatus:
        """Admit no more requests of an encoder, and give back its memory once those have ended.

        Its adapters go with it.

        Raises:
            ModelNotFoundError: none has the name.
            InvalidRequestError: it is a model that generates.
        """
        ...

    def get(self, name: str | None, *tasks: Task) -> EncoderModel:
        """The encoder or adapter of this name, or the first encoder that can do one of the tasks.

        Raises:
            ModelNotFoundError: none has the name.
            ModelLoadingError: it is loaded for the first time; see ``wait``.
            InvalidRequestError: it is a model that generates; it can do none of the tasks.
        """
        ...

    async def encode(self, request: EncodeRequest) -> EncodeResults:
        """What each input's task asks for, float32; see ``encode.Task`` for the shapes.

        Raises:
            OverloadedError: too many inputs wait.
            StepError: the model failed.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        ...
