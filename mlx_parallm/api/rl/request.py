"""From the prompts of a rollout to token ids, off the event loop where that takes long."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_parallm.api.chat.request import chat_tools
from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.rl.schema import RolloutItem, RolloutRequest
from mlx_parallm.api.turns.appended import MarkedTokenizer, appended_ids
from mlx_parallm.api.turns.continuation import continuation_ids
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.api.turns.images import (
    Images,
    ImageSource,
    image_sources,
    named_sources,
    pixel_range_of,
)
from mlx_parallm.api.turns.written_prompts import read_prompt
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.images.prompt import (
    Hide,
    ImagePrompt,
    Messages,
    TypedMarks,
    as_it_is,
    image_prompt,
    text_prompt,
)
from mlx_parallm.template_time import at_one_time
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError

# The last tokens decide how a text that follows them is spelled.
ANCHOR_TOKENS = 8
#: How an error names an image, or a part of it.
_IMAGE_PARAM = re.compile(r"\.image_url\b")


async def encode_items(
    items: Sequence[RolloutItem],
    body: RolloutRequest,
    model: GenerationModel,
    images: Images,
) -> list[ImagePrompt]:
    """Return the tokens and images of every prompt.

    Raises:
        InvalidRequestError: a prompt is malformed, the template refuses it, or an image cannot be
            read; names its place.
    """
    encoder = PromptEncoder(
        model=model,
        tools=[tool.for_template() for tool in chat_tools(body.tools or ())] or None,
        template_kwargs=model.template_variables(body.chat_template_kwargs),
        open_turn=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
    )
    sources = [encoder.images(item, number) for number, item in enumerate(items)]
    prepared = await images.prepare_each(
        ((each, model) for each in sources), pixel_range_of(body.mm_processor_kwargs)
    )

    @at_one_time()
    def work() -> list[ImagePrompt]:
        pairs = zip(items, prepared, strict=True)
        return [encoder.encode(item, shown, number) for number, (item, shown) in enumerate(pairs)]

    return await maybe_in_thread(work, sum(map(_length, items)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Encodes prompts of one model.

    Attributes:
        model: whose tokenizer and template.
        tools: those that the template lists.
        template_kwargs: further variables of the template.
        open_turn: whether the assistant's turn is opened behind messages.
        add_special_tokens: whether texts begin with what a text of the model begins with.
    """

    model: GenerationModel
    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any]
    open_turn: bool
    add_special_tokens: bool

    def images(self, item: RolloutItem, number: int) -> list[ImageSource]:
        """Return where the images of prompt ``number`` come from, in order.

        Raises:
            InvalidRequestError: a message is malformed; ``param`` is "prompts", or the image.
        """
        sources = named_sources(item.images, "images")
        with _named(number):
            if item.messages is not None:
                sources = image_sources(turns_of(item.messages, takes_images=True))
            appended = image_sources(turns_of(item.append_messages or (), takes_images=True))
        sources += [replace(source, param=f"append_{source.param}") for source in appended]
        return [replace(source, param=f"prompts[{number}].{source.param}") for source in sources]

    def encode(
        self, item: RolloutItem, images: Sequence[PreparedImage], number: int
    ) -> ImagePrompt:
        """Return the tokens and inputs of prompt ``number``.

        Raises:
            InvalidRequestError: it is malformed; ``param`` is "prompts".
        """
        with _named(number):
            return self._encode(item, images)

    def _encode(self, item: RolloutItem, images: Sequence[PreparedImage]) -> ImagePrompt:
        if item.text is not None:
            special = self.add_special_tokens
            return read_prompt(item.text, images, self.model, add_special_tokens=special)
        if item.messages is not None:
            return self._conversation(self._messages(item.messages), images)
        ids = tuple(item.token_ids or ())
        if item.append_messages is None and item.append_text is None:
            return read_prompt(ids, images, self.model)
        # They are read here already, before the engine checks them.
        if any(not 0 <= token_id < self.model.info.vocab_size for token_id in ids):
            raise InvalidRequestError("token_ids has an id outside the vocabulary")
        if item.append_text is not None:
            ids += self._continuation(ids, item.append_text)
        else:
            ids += self._appended(ids, self._messages(item.append_messages or ()))
        return read_prompt(ids, images, self.model)

    def _conversation(self, messages: Messages, images: Sequence[PreparedImage]) -> ImagePrompt:
        tokenizer, form = self.model.tokenizer, self.model.images

        def render(shown: Messages, hide: Hide) -> str:
            return self._render(shown, self.open_turn, hide)

        encode, marks = partial(tokenizer.encode, add_special_tokens=False), self.model.turn_marks
        if not images or form is None:
            return text_prompt(messages, form, render=render, encode=encode, marks=marks)
        return image_prompt(messages, images, form, render=render, encode=encode, marks=marks)

    def _continuation(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Return the tokens of a text that goes on from others."""
        tokenizer = self.model.tokenizer
        last = [token_id for token_id in ids[-ANCHOR_TOKENS:] if token_id < tokenizer.vocab_size]
        anchor = tokenizer.decode(last, skip_special_tokens=False)
        return continuation_ids(tokenizer, anchor, text)

    def _appended(self, ids: Sequence[int], messages: Messages) -> tuple[int, ...]:
        """Return the tokens of messages behind others, with placeholders for images."""
        tokenizer, form = self.model.tokenizer, self.model.images
        if form is None:
            return appended_ids(tokenizer, ids, messages, self._render, open_turn=self.open_turn)
        typed = TypedMarks(form)
        marked = MarkedTokenizer(tokenizer, typed)
        shown = typed.messages(messages)
        return appended_ids(marked, ids, shown, self._render, open_turn=self.open_turn)

    def _messages(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        turns = turns_of(messages, takes_images=True)
        return template_messages(turns, id_length=self.model.call_id_length)

    def _render(self, messages: Messages, open_turn: bool, hide: Hide = as_it_is) -> str:
        return self.model.tokenizer.render_chat(
            messages,
            tools=hide(self.tools),
            add_generation_prompt=open_turn,
            template_kwargs=hide(self.template_kwargs),
        )


@contextlib.contextmanager
def _named(number: int) -> Generator[None]:
    """Let refusals name a prompt; those of its images name these already."""
    try:
        yield
    except ContextLengthError as refusal:
        refusal.param = "prompts"
        raise
    except InvalidRequestError as refusal:
        if refusal.param is not None and _IMAGE_PARAM.search(refusal.param):
            refusal.param = f"prompts[{number}].{refusal.param}"
            raise
        raise InvalidRequestError(f"prompts[{number}]: {refusal}", param="prompts") from refusal


def _length(item: RolloutItem) -> int:
    """About how many characters there are to tokenise."""
    messages = (*(item.messages or ()), *(item.append_messages or ()))
    texts = sum(len(str(message.content)) + 64 for message in messages)
    return len(item.text or "") + len(item.append_text or "") + texts
