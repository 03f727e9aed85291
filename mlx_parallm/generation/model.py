"""A model that generates, as its clients see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from typing_extensions import override

from mlx_parallm.engine.models import Ask, KindTraits, ModelMemory, PackedModel, ServedModel
from mlx_parallm.engine.policies import NamedAdapter
from mlx_parallm.generation.admission import check_request
from mlx_parallm.generation.event_stream import EventStream
from mlx_parallm.generation.kv_cache.budget import least_bytes
from mlx_parallm.generation.remote_grammars import RemoteGrammars
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.grammar.vocabulary import GrammarVocabulary
from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.latest_turn import SpecialTokens
from mlx_parallm.images.prompt import text_prompt
from mlx_parallm.parsing.formats import ReasoningFormat, ToolFormat
from mlx_parallm.parsing.registry import reasoning_format, tool_format
from mlx_parallm.tokenizer.seq2seq.tokenizer import Seq2SeqTokenizer
from mlx_parallm.tokenizer.speech.rules import SpeechRules
from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.model_input import InputKind
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import RunnerInfo
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit
from mlx_parallm.types.work import StateCache

GENERATION_TRAITS = KindTraits(
    name="generation",
    is_default=True,
    can_change=True,
    takes_adapters=True,
    refuses_other="is a model that generates, not a model of this route.",
)


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
    def bos_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Return True if ``encode_chat`` works without an explicit template."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's text; None if there is none that is a single text."""
        ...

    @property
    def takes_tools(self) -> bool:
        """Return True if the template writes tools into the prompt."""
        ...

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that ``skip_special_tokens`` leaves out, as text."""
        ...

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if it is not one token."""
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
        """Return the text of a whole sequence of tokens."""
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

    def template_variables(
        self, variables: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return variables, over default ones, with the names and values that the template reads.

        These are those of thinking and its effort.
        """
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

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        hidden: Collection[int] = (),
    ) -> IncrementalDetokenizer:
        """Return a fresh incremental detokenizer for one sequence.

        Args:
            skip_special_tokens: leave special tokens out of the text.
            shown: special tokens that stay in the text all the same.
            hidden: further tokens that are left out.
        """
        ...


class Grammars(Protocol):
    """Compiles grammars for one model's tokens. Safe from any thread."""

    vocabulary: GrammarVocabulary

    def known(self, spec: GrammarSpec) -> str | None:
        """Return the grammar's text if it was compiled lately."""
        ...

    def submit(self, spec: GrammarSpec) -> Future[str]:
        """``compile`` elsewhere."""
        ...

    def compile(self, spec: GrammarSpec) -> str:
        """Return a specification in llguidance's JSON form, checked.

        Raises:
            InvalidRequestError: it is wrong, unsupported, or too much work; without ``param``.
        """
        ...

    def submit_starts(self, text: str, beginnings: tuple[str, ...]) -> Future[tuple[str, ...]]:
        """Return those beginnings that texts of a compiled grammar may have."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationModel(ServedModel):
    """A loaded model, or an adapter of one, as its clients see it.

    Attributes:
        names: the names that requests may use; the first is the one reported.
        root: the hub id or folder that it comes from.
        created: when it was loaded, in Unix seconds.
        tokenizer: the model's tokenizer.
        info: facts about the model.
        chat_template_kwargs: default variables of the chat template.
        tool_format: how the model writes tool calls; None if its text is not parsed for them.
        reasoning_format: how it writes reasoning; None if its text is not parsed for it.
        parses_tools: False if the settings turn the parsing of tool calls off.
        allows_auto_tools: False if the model may not decide itself whether it calls tools.
        grammars: compiles the grammars of requests.
        revision: identifies the loaded files.
        parent: for an adapter, the first name of its model.
        adapter: for an adapter, its name.
        images: how the model takes images; None if it takes none.
        seq2seq: the sources and decoder prompts of an encoder-decoder; None for a decoder.
        speech: the tokens that control a model that hears; None for others.
        state_cache: the states after prefixes that each engine keeps; None if it has no state.
        refuses_unload: why it stays in memory; None if it can be unloaded.
    """

    names: tuple[str, ...]
    root: str
    created: int
    tokenizer: Tokenizer
    info: RunnerInfo
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    parses_tools: bool = True
    allows_auto_tools: bool = True
    grammars: Grammars | None = None
    revision: str = ""
    parent: str | None = None
    adapter: str | None = None
    images: ImageForm | None = None
    seq2seq: Seq2SeqTokenizer | None = None
    speech: SpeechRules | None = None
    state_cache: StateCache | None = None
    refuses_unload: str | None = None

    traits = GENERATION_TRAITS
    #: Its chat template may write tools.
    reads_tools = True

    @property
    @override
    def input_modalities(self) -> Sequence[str]:
        if self.speech is not None:
            return ("audio",)
        return ("text",) if self.images is None else ("text", "image")

    @property
    def takes_sources(self) -> bool:
        """True if it is an encoder-decoder, whose requests have a source each."""
        return self.seq2seq is not None or InputKind.SOURCE in self.info.input_kinds

    @property
    def max_model_len(self) -> int:
        """Return the most tokens of a prompt and its completion."""
        return self.info.max_model_len

    def text_ids(self, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """Return the ids of a text of any length."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, limit=ANY_LENGTH)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any],
        **ends: Any,
    ) -> Sequence[int]:
        """Return the ids of a conversation of any length.

        Args:
            messages: as templates take them.
            tools: likewise.
            template_kwargs: variables of the template.
            ends: how the conversation ends; see ``Tokenizer.render_chat``.

        Raises:
            InvalidRequestError: there is no chat template, or it refuses (param "messages").
        """
        variables = self.template_variables(template_kwargs)
        reads = self.tokenizer if self.seq2seq is None else self.seq2seq.source
        return text_prompt(
            messages,
            self.images,
            render=lambda shown, hide: self.tokenizer.render_chat(
                shown, tools=hide(tools), template_kwargs=hide(variables), **ends
            ),
            encode=lambda text: reads.encode(text, add_special_tokens=False, limit=ANY_LENGTH),
        ).token_ids

    def template_variables(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template's variables: the model's default ones, and a request's over them."""
        return self.tokenizer.template_variables(variables, self.chat_template_kwargs)

    @property
    def turn_marks(self) -> SpecialTokens | None:
        """Tokens that find where a prompt's latest turn begins; None if no engine asks for it.

        A state must be kept where later prompts will agree; blocks of KV are found at any length.
        """
        keeps_states = self.state_cache is not None and self.state_cache.num_states > 0
        return self.tokenizer if keeps_states else None

    def vocabulary_string(self, token_id: int) -> str:
        """Return a token as it is written in the vocabulary."""
        return self.tokenizer.vocabulary_string(token_id)

    @property
    def call_id_length(self) -> int | None:
        """Letters and digits of a tool call's id in its conversations; None for any id."""
        return None if self.tool_format is None else self.tool_format.id_length

    @property
    @override
    def tasks(self) -> Sequence[str]:
        if self.speech is not None:
            return ("transcription",)
        return ("generate", "text2text-generation") if self.takes_sources else ("generate",)

    @property
    @override
    def cache_tokens(self) -> int:
        return self.info.num_blocks * self.info.block_size

    @property
    @override
    def memory(self) -> ModelMemory:
        return ModelMemory(weights=self.info.weight_bytes, kv=self.info.kv_bytes)

    @property
    @override
    def kv_memory(self) -> tuple[int, int]:
        info = self.info
        num_states = 0 if self.state_cache is None else self.state_cache.num_states
        num_bytes = info.kv_bytes + num_states * info.state_bytes
        block_bytes = info.kv_bytes // info.num_blocks
        lengths = (info.max_model_len, info.max_source_len)
        context = sum(-(-tokens // info.block_size) for tokens in lengths) * block_bytes
        return num_bytes, min(num_bytes, least_bytes(context, block_bytes, info.state_bytes))

    @override
    def check(self, request: GenerateRequest | Any) -> None:
        """The engine checks work beside the model."""
        if isinstance(request, GenerateRequest):
            check_request(request, self.info)

    @override
    def reader(self, request: GenerateRequest) -> EventStream:
        return EventStream(request)

    @override
    def with_adapter(self, adapter: NamedAdapter) -> Self:
        """A request that names the adapter loads it."""
        root = adapter.source or adapter.name
        return replace(
            self, names=(adapter.name,), root=root, parent=adapter.base, adapter=adapter.name
        )

    @override
    def packed(self) -> PackedGenerationModel:
        tools, reasoning, grammars = self.tool_format, self.reasoning_format, self.grammars
        return PackedGenerationModel(
            model=replace(self, tool_format=None, reasoning_format=None, grammars=None),
            tool_format=None if tools is None else tools.name,
            reasoning_format=None if reasoning is None else reasoning.name,
            vocabulary=None if grammars is None else grammars.vocabulary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedGenerationModel(PackedModel):
    """A model whose parts can be pickled.

    Attributes:
        model: without its formats and grammars.
        tool_format: the name of its format; None if it has none.
        reasoning_format: likewise for reasoning.
        vocabulary: what its grammars are compiled for; None if there are none.
    """

    model: GenerationModel
    tool_format: str | None
    reasoning_format: str | None
    vocabulary: GrammarVocabulary | None

    @override
    def unpack(self, ask: Ask) -> GenerationModel:
        tools, reasoning, vocabulary = self.tool_format, self.reasoning_format, self.vocabulary
        name = self.model.names[0]
        return replace(
            self.model,
            tool_format=None if tools is None else tool_format(tools),
            reasoning_format=None if reasoning is None else reasoning_format(reasoning),
            grammars=None if vocabulary is None else RemoteGrammars(name, vocabulary, ask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHandle:
    """An admitted request: iterate its events; leaving the iterator early does not abort it.

    ``gather``, called with a number, lets so many tokens of a sample come as one event.
    """

    request_id: str
    events: AsyncIterator[GenerateEvent]
    gather: Callable[[int], None] = lambda count: None
