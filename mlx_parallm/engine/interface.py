"""What the HTTP layer and the offline front end see of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.control import EngineControl
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest, TokenLimit
from mlx_parallm.types.step import RunnerInfo

if TYPE_CHECKING:
    pass
from mlx_parallm.engine.encoder_interface import EncoderClient, ModelMemory


class IncrementalDetokenizer(Protocol):
    """Turns one sequence's tokens into text, never emitting half a character."""

    def add(self, token_id: int) -> str:
        """Take one token and return the text that became printable, perhaps empty."""
        ...

    def flush(self) -> str:
        """Return what was still held back."""
        ...


class Tokenizer(Protocol):
    """A model's tokenizer. Its methods may be called from any thread."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether ``encode_chat`` works without an explicit template."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's text; None if there is none that is a single text."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes tools into the prompt."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that ``skip_special_tokens`` leaves out, as text."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if it is not one token."""
        ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        """Tokenise a text.

        Raises:
            ContextLengthError: it has more tokens than ``limit`` allows; without one, than the
                model's context. Nothing was encoded where the text's length shows that.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence of tokens."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Apply the chat template; raise InvalidRequestError (param "messages") if it refuses."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: TokenLimit | None = None,
        **options: Any,
    ) -> list[int]:
        """``render_chat``, then ``encode`` without adding special tokens a second time."""
        ...

    def token_string(self, token_id: int) -> str:
        """One token as text; bytes that are no UTF-8 alone become U+FFFD."""
        ...

    def vocabulary_string(self, token_id: int) -> str:
        """Return a token as it is written in the vocabulary, such as "Ġword"; "" if unknown."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """One token as the bytes it contributes."""
        ...

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one sequence."""
        ...


class Grammars(Protocol):
    """Compiles grammars for one model's tokens. Safe from any thread."""

    vocabulary: GrammarVocabulary

    def known(self, spec: GrammarSpec) -> str | None:
        """The grammar's text if it was compiled lately."""
        ...

    def submit(self, spec: GrammarSpec) -> Future[str]:
        """``compile`` elsewhere."""
        ...

    def compile(self, spec: GrammarSpec) -> str:
        """A specification in llguidance's JSON form, checked.

        Raises:
            InvalidRequestError: it is wrong, unsupported, or too much work; without ``param``.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded model as its clients see it.

    ``names[0]`` is the one reported; ``root`` the hub id or folder it came from; ``created`` Unix
    seconds; ``chat_template_kwargs`` variables of the template that every request begins with.
    ``tool_format`` and ``reasoning_format`` are how the model writes tool calls and reasoning, None
    where its text is not parsed for them; ``parses_tools`` is false where that was asked for,
    ``allows_auto_tools`` where the model may not decide itself whether it calls tools.
    ``grammars`` compiles what its samples may be asked to match. ``revision`` tells its files from
    those of others, as they were loaded. ``adapter`` is set where this is
    an adapter, whose model's first name is ``parent``.
    """

    names: tuple[str, ...]
    root: str
    created: int
    tokenizer: Tokenizer
    info: RunnerInfo
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    parses_tools: bool = True
    allows_auto_tools: bool = True
    grammars: Grammars | None = None
    revision: str = ""
    parent: str | None = None
    adapter: str | None = None

    @property
    def call_id_length(self) -> int | None:
        """Letters and digits of a tool call's id in its conversations; None for any id."""
        return None if self.tool_format is None else self.tool_format.id_length


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHandle:
    """An admitted request: iterate its events; leaving the iterator early does not abort it.

    ``gather``, called with a number, lets so many tokens of a sample come as one event.
    """

    request_id: str
    events: AsyncIterator[GenerateEvent]
    gather: Callable[[int], None] = lambda count: None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy the engine is, over all models.

    Attributes:
        num_requests: admitted requests that have not ended.
        num_running: sequences in the batch; of the latest step.
        num_waiting: sequences that wait for a place in it; of the latest step.
    """

    num_requests: int
    num_running: int
    num_waiting: int


class EngineClient(Protocol):
    """The engine, seen from the event loop."""

    @property
    def control(self) -> EngineControl:
        """What an operator may ask of it."""
        ...

    @property
    def config(self) -> EngineConfig:
        """The settings it was built from."""
        ...

    def models(self) -> Sequence[ServedModel]:
        """The loaded models that generate, in the order they were given."""
        ...

    def first_model(self) -> ServedModel:
        """The first of them; raise InvalidRequestError if there is none."""
        ...

    def get_model(self, name: str) -> ServedModel:
        """The model or adapter of this name.

        Raises:
            ModelNotFoundError: none has it.
            InvalidRequestError: it is an encoder.
        """
        ...

    @property
    def encoders(self) -> EncoderClient:
        """The models that read texts instead of continuing them."""
        ...

    async def check_room(self, model: str, client: str, n: int) -> None:
        """Refuse ``n`` samples of a client early, before their prompt is encoded.

        It costs nearly nothing; ``submit`` decides.

        Raises:
            OverloadedError: the queue had no room for them a moment ago.
        """
        ...

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        """Admit a request.

        Raises:
            InvalidRequestError, ContextLengthError: it can never be served.
            OverloadedError: the queue is full.
            ShuttingDownError, EngineDeadError: nothing is admitted any more.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request between two steps and free its blocks; unknown ids are ignored."""
        ...

    def open_requests(self) -> Sequence[GenerateRequest]:
        """The requests that were submitted and have not ended."""
        ...

    async def cancel(self, request_id: str) -> None:
        """End a request as ``abort`` does, and tell its reader.

        Every sample gets a last event with the ``finish_reason`` "abort" and the text that was
        held back.
        """
        ...

    async def load(self) -> EngineLoad:
        """How busy the engine is."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine thread is dead."""
        ...

    def check_open(self) -> None:
        """Raise ShuttingDownError or EngineDeadError if nothing is admitted any more."""
        ...

    async def memory(self) -> Mapping[str, ModelMemory]:
        """What each model takes, by its first name."""
        ...

    async def render_metrics(self) -> tuple[bytes, str]:
        """The Prometheus exposition and its content type."""
        ...
