"""A pooling model, which reads texts, as its clients see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from mlx_parallm.engine.adapter_names import NamedAdapter
from mlx_parallm.engine.defaults import ModelDefaults
from mlx_parallm.engine.interface import KindTraits, ModelMemory
from mlx_parallm.types.pooling import (
    LABEL_TASKS,
    EncodeInput,
    EncodeRequest,
    EncoderInfo,
    OwnHead,
    TokenSpan,
)
from mlx_parallm.types.request import ANY_LENGTH, TokenLimit

POOLING_TRAITS = KindTraits(
    name="pooling",
    loads_later=True,
    refuses_change="is an encoder: its weights stay as they were loaded.",
)


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
class PoolingModel(ModelDefaults):
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

    @property
    def traits(self) -> KindTraits:
        """See ``ServedModel``."""
        return POOLING_TRAITS

    @property
    def memory(self) -> ModelMemory:
        """See ``ServedModel``."""
        return ModelMemory(weights=self.info.weight_bytes)

    def with_adapter(self, adapter: NamedAdapter) -> Self | None:
        """See ``ServedModel``: what an adapter answers with is known once it is loaded."""
        info = adapter.info
        if info is None:
            return None
        return replace(
            self,
            names=(adapter.name,),
            root=adapter.source or adapter.name,
            created=info.created,
            info=self.info if info.head is None else with_head(self.info, info.head),
            parent=adapter.base,
            head=info.head,
        )

    def request(self, request_id: str, inputs: Iterable[EncodeInput]) -> EncodeRequest:
        """A request of inputs that were made for this model."""
        return EncodeRequest(
            request_id=request_id, model=self.names[0], inputs=tuple(inputs), head=self.head
        )


def with_head(info: EncoderInfo, head: OwnHead) -> EncoderInfo:
    """What is known of a model with another head than its own.

    Its labels have the names of the model's where there are as many, else their numbers.
    """
    if not head.num_labels:
        return info
    others = (one for one in info.tasks if one not in LABEL_TASKS)
    is_alike = set(head.tasks) == LABEL_TASKS.intersection(info.tasks)
    tasks = info.tasks if is_alike else (*head.tasks, *others)
    if len(info.labels) == head.num_labels:
        return replace(info, tasks=tasks)
    labels = tuple(f"LABEL_{number}" for number in range(head.num_labels))
    return replace(info, tasks=tasks, labels=labels, problem_type=None, scores_are_logits=False)
