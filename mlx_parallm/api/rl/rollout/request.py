"""From the prompts of a rollout to token ids, off the event loop where that takes long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.chat.tools import chat_tools
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.rl.rollout.schema import RolloutItem, RolloutRequest
from mlx_parallm.api.turns.appended import appended_ids
from mlx_parallm.api.turns.continuation import continuation_ids
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError

# The last tokens tell how a text that follows them is spelled.
ANCHOR_TOKENS = 8


async def encode_items(
    items: Sequence[RolloutItem], body: RolloutRequest, model: GenerationModel
) -> list[tuple[int, ...]]:
    """Return the tokens of every prompt.

    Raises:
        InvalidRequestError: a prompt is malformed or the template refuses it; names its place.
    """
    encoder = PromptEncoder(
        model=model,
        tools=[tool.for_template() for tool in chat_tools(body.tools or ())] or None,
        template_kwargs={**model.chat_template_kwargs, **body.chat_template_kwargs},
        open_turn=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
    )

    def work() -> list[tuple[int, ...]]:
        return [encoder.encode(item, number) for number, item in enumerate(items)]

    return await maybe_in_thread(work, sum(map(_length, items)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Encodes prompts of one model.

    Attributes:
        model: whose tokenizer and template.
        tools: what the template tells of.
        template_kwargs: further variables of the template.
        open_turn: whether the assistant's turn is opened behind messages.
        add_special_tokens: whether texts begin with what a text of the model begins with.
    """

    model: GenerationModel
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    open_turn: bool
    add_special_tokens: bool

    def encode(self, item: RolloutItem, number: int) -> tuple[int, ...]:
        """Return the tokens of prompt ``number``.

        Raises:
            InvalidRequestError: it is malformed; ``param`` is "prompts".
        """
        try:
            return self._encode(item)
        except ContextLengthError as refusal:
            refusal.param = "prompts"
            raise
        except InvalidRequestError as refusal:
            raise InvalidRequestError(f"prompts[{number}]: {refusal}", param="prompts") from refusal

    def _encode(self, item: RolloutItem) -> tuple[int, ...]:
        tokenizer = self.model.tokenizer
        if item.text is not None:
            special = self.add_special_tokens
            return tuple(tokenizer.encode(item.text, add_special_tokens=special))
        if item.messages is not None:
            text = self._render(self._messages(item.messages), self.open_turn)
            return tuple(tokenizer.encode(text, add_special_tokens=False))
        ids = tuple(item.token_ids or ())
        if item.append_messages is None and item.append_text is None:
            return ids
        # They are read here already, before the engine checks them.
        if any(not 0 <= token_id < self.model.info.vocab_size for token_id in ids):
            raise InvalidRequestError("token_ids has an id outside the vocabulary")
        if item.append_text is not None:
            last = [
                token_id for token_id in ids[-ANCHOR_TOKENS:] if token_id < tokenizer.vocab_size
            ]
            anchor = tokenizer.decode(last, skip_special_tokens=False)
            return ids + continuation_ids(tokenizer, anchor, item.append_text)
        messages = self._messages(item.append_messages or ())
        return ids + appended_ids(tokenizer, ids, messages, self._render, open_turn=self.open_turn)

    def _messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        return template_messages(turns_of(messages), id_length=self.model.call_id_length)

    def _render(self, messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        return self.model.tokenizer.render_chat(
            messages,
            tools=self.tools,
            add_generation_prompt=open_turn,
            template_kwargs=self.template_kwargs,
        )


def _length(item: RolloutItem) -> int:
    """About how many characters there are to tokenise."""
    messages = (*(item.messages or ()), *(item.append_messages or ()))
    texts = sum(len(str(message.content)) + 64 for message in messages)
    return len(item.text or "") + len(item.append_text or "") + texts
