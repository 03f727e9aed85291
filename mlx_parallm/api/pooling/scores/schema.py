"""The bodies of ``POST /v1/rerank``, ``/v1/score`` and ``/v1/rewards/score``.

Rerank in the shapes of Jina, Cohere, vLLM and TEI: https://api.jina.ai/docs,
https://docs.cohere.com/reference/rerank, https://huggingface.github.io/text-embeddings-inference.
Scores are vLLM's pairs of texts (https://docs.vllm.ai, "Score API"), and SGLang's labels after a
query and an item (https://docs.sglang.io, "Scoring"), which vLLM has as ``/generative_scoring``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.http.forms import INT64, NullIsAbsent, OpenForm
from mlx_parallm.api.pooling.inputs.schema import (
    MAX_INPUTS,
    Inputs,
    PoolingFields,
    Texts,
    is_list_of,
)
from mlx_parallm.api.turns.fields import MAX_NAMED_TOKENS, TemplateKwargs
from mlx_parallm.types.errors import InvalidRequestError

Completion = StrictStr | list[ChatMessage]
# KINDS: a body has exactly one of these fields.
KINDS = ("texts", "chats", "completions", "prompts")


class RerankDocument(NullIsAbsent):
    """A document as an object; its further fields are ignored."""

    text: StrictStr = Field(description="What is compared with the query.")


class RerankRequest(OpenForm):
    """``documents`` are Jina's, Cohere's and vLLM's; ``texts`` ask for TEI's answer."""

    query: StrictStr = Field(description="What documents are compared with.")
    documents: list[StrictStr | RerankDocument] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description='Texts, or objects with a "text".'
    )
    model: StrictStr | None = Field(
        None, description="Default: the first cross-encoder, else the first embedder."
    )
    top_n: StrictInt | None = Field(None, ge=0, description="So many results; 0 is all.")
    return_documents: StrictBool = Field(True, description="Give back the texts.")
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut inputs to so many tokens; -1 to what the model takes."
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="Only right: of a query and a document the document's end is cut."
    )
    max_tokens_per_doc: StrictInt = Field(
        0, ge=0, description="Cut documents to so many tokens before they are read; 0 leaves them."
    )
    use_activation: StrictBool = Field(True, description="False: a cross-encoder's logits.")
    request_id: StrictStr | None = Field(None, description="Part of the answer's id.")
    texts: list[StrictStr] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="TEI's name for documents."
    )
    raw_scores: StrictBool = Field(False, description="TEI's: logits.")
    return_text: StrictBool = Field(False, description="TEI's: give back the texts.")
    truncate: StrictBool = Field(False, description="TEI's: cut what is too long.")
    truncation_direction: Literal["Right", "right"] = Field(
        "Right", description="TEI's: what is too long is cut at its end."
    )

    @property
    def is_tei(self) -> bool:
        """True if the body is TEI's."""
        return self.texts is not None

    def passages(self) -> list[str]:
        """Return the texts to be ranked.

        Raises:
            InvalidRequestError: there are none, or two kinds of them.
        """
        if (self.documents is None) == (self.texts is None):
            raise InvalidRequestError("Give documents (or, for TEI, texts).", param="documents")
        texts = self.documents if self.texts is None else self.texts
        return [each.text if isinstance(each, RerankDocument) else each for each in texts or ()]


def _text_or_ids(value: Any) -> str | list[int]:
    if isinstance(value, str) or is_list_of(value, int):
        return value
    raise ValueError("must be a text or token ids")


_QUERY_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}
Query = Annotated[Any, BeforeValidator(_text_or_ids), WithJsonSchema(_QUERY_SCHEMA)]


class ScoreRequest(PoolingFields):
    """Pairs of texts, or a ``query`` with ``items``."""

    text_1: Texts | None = Field(None, description="One text, or as many as text_2 has.")
    text_2: Texts | None = Field(None, description="What text_1 is compared with.")
    queries: Texts | None = Field(None, description="The same as text_1.")
    documents: Texts | None = Field(None, description="The same as text_2.")
    data_1: Texts | None = Field(None, description="The same as text_1.")
    data_2: Texts | None = Field(None, description="The same as text_2.")
    use_activation: StrictBool = Field(True, description="False: a cross-encoder's logits.")
    query: Query | None = Field(None, description="Read with every item.")
    items: Inputs | None = Field(
        None, description="Texts or token ids, read with the query; or, with queries, texts."
    )
    label_token_ids: list[Annotated[StrictInt, Field(ge=0)]] = Field(
        default_factory=list[int],
        max_length=MAX_NAMED_TOKENS,
        description="Tokens whose probabilities after query and item are reported.",
    )
    apply_softmax: StrictBool | None = Field(
        None, description="True: probabilities among the labels alone."
    )
    item_first: StrictBool = Field(False, description="Put items before the query.")
    add_special_tokens: StrictBool = Field(
        True, description="Tokenise texts with the model's special tokens, such as BOS."
    )
    priority: StrictInt | None = Field(None, ge=-INT64, lt=INT64, description="Lower runs first.")
    cache_salt: StrictStr | None = Field(
        None, max_length=1024, description="Share cached prefixes only with the same salt."
    )


class RewardPrompt(NullIsAbsent):
    """A prompt with its completions."""

    model_config = ConfigDict(extra="forbid")

    prompt: StrictStr | list[ChatMessage] = Field(description="A text, or a conversation.")
    completions: list[Completion] = Field(
        min_length=1, max_length=MAX_INPUTS, description="Each a text, or messages."
    )


class RewardsRequest(PoolingFields):
    """Texts, conversations, or completions of prompts; exactly one of the three."""

    texts: list[StrictStr] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="Read as they are."
    )
    chats: list[list[ChatMessage]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_INPUTS,
        description="Conversations, by the reward model's chat template.",
    )
    prompt: StrictStr | list[ChatMessage] | None = Field(
        None, description="What comes before each of the completions."
    )
    completions: list[Completion] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="Each a text, or messages."
    )
    prompts: list[RewardPrompt] | None = Field(
        None, min_length=1, max_length=MAX_INPUTS, description="Several with their completions."
    )
    sigmoid: StrictBool = Field(False, description="Rewards from 0 to 1.")
    step_token: StrictStr | StrictInt | None = Field(
        None, description="A token, or its id, that ends a step: each gets a reward."
    )
    chat_template_kwargs: TemplateKwargs

    @property
    def param(self) -> str:
        """Return the field with the texts to be scored.

        Raises:
            InvalidRequestError: the body has not exactly one kind.
        """
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1 or (self.prompt is None) != (self.completions is None):
            raise InvalidRequestError(
                "Give texts, chats, prompts, or a prompt with completions.",
                param=kinds[-1] if kinds else "texts",
            )
        return kinds[0]

    def scored(self) -> list[Scored]:
        """Return all texts and conversations to be scored, in order.

        Raises:
            InvalidRequestError: see ``param``; or they are too many.
        """
        param = self.param
        if self.prompts is not None:
            scored = [
                Scored(_joined(prompt.prompt, completion, param), number)
                for number, prompt in enumerate(self.prompts)
                for completion in prompt.completions
            ]
        elif self.prompt is not None:
            scored = [Scored(_joined(self.prompt, each, param)) for each in self.completions or ()]
        else:
            scored = [Scored(content) for content in self.texts or self.chats or ()]
        if len(scored) > MAX_INPUTS:
            raise InvalidRequestError(
                f"A request can have at most {MAX_INPUTS} texts.", param=param
            )
        return scored


@dataclass(frozen=True, slots=True)
class Scored:
    """A text or conversation that gets a reward.

    Attributes:
        content: a text, read as it is, or a conversation, read by the chat template.
        prompt_index: index of the prompt that it follows; None if there are not several.
    """

    content: Completion
    prompt_index: int | None = None


def _joined(prompt: Completion, completion: Completion, param: str) -> Completion:
    """Return a prompt with its completion: two texts, or messages and a turn or messages."""
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise InvalidRequestError("The completion of a text must be a text.", param=param)
        return prompt + completion
    if isinstance(completion, str):
        completion = [ChatMessage(role="assistant", content=completion)]
    return [*prompt, *completion]
