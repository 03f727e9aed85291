"""A model's tokenizer: text to tokens, chat to prompt, tokens to text."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.template_time import at_one_time
from mlx_parallm.tokenizer.jinja_chat import rendered, template_refusals
from mlx_parallm.tokenizer.lanes import Lanes
from mlx_parallm.tokenizer.loaded import (
    LoadedTokenizer,
    TextRenderer,
)
from mlx_parallm.tokenizer.released import ReleasedTokenizer
from mlx_parallm.tokenizer.rewrites import WriteCalls
from mlx_parallm.tokenizer.template_form import TemplateForm, probed_form, probed_tools
from mlx_parallm.tokenizer.thinking import ThinkingVariables, probed_thinking
from mlx_parallm.tokenizer.vocabulary import ByteLevelDetokenizer, Vocabulary, WindowDetokenizer
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.token_limit import ANY_LENGTH, TokenLimit

# _PROBE_TOOL is rendered to find out whether a template writes tools.
_PROBE_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# _PROBE_TEXT is rendered to find out how a template takes contents.
_PROBE_TEXT = "probe"
# _ANCHOR_TOKENS: slack for the text before a prompt with which some callers encode it; its tokens
# are not counted.
_ANCHOR_TOKENS = 32


class ParallmTokenizer:
    """Implements ``generation.model.Tokenizer`` over a tokenizer loaded by mlx_lm.

    Texts are encoded by the tokenizers library directly, without a lock. If a tokenizer's class
    does more than that, its Python code is called under a lock, because it is not thread-safe.

    Attributes:
        class_name: the name of transformers' class.
        description: this name and the library that encodes.
    """

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self.class_name = loaded.class_name
        self.description = f"{loaded.class_name} ({loaded.library})"
        self._hub = loaded.hub
        self._eos_ids = loaded.eos_ids
        self._vocabulary = Vocabulary(loaded.hub, loaded.decoder)
        self._released = None if loaded.encoder is None else ReleasedTokenizer(loaded.encoder)
        self._chat = loaded.chat
        needs_lanes = loaded.chat is None or self._released is None
        self._lanes = Lanes(loaded.renderer) if needs_lanes else None
        self._source = None if loaded.source is None else ParallmTokenizer(loaded.source)
        self._limit = ANY_LENGTH
        self._write_calls: WriteCalls | None = None
        # mlx_lm's own flag does not include a template set after loading.
        has_template = loaded.hub.chat_template is not None
        self._has_chat_template = loaded.has_chat_template or has_template

    @property
    def source_side(self) -> ParallmTokenizer:
        """The tokenizer of an encoder-decoder's sources; itself if both sides have one."""
        return self._source or self

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included: the largest plus one."""
        return self._vocabulary.size

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        return self._eos_ids

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text; None if there is none."""
        token = self._hub.bos_token
        return None if token is None else self.token_id(token)

    @property
    def has_chat_template(self) -> bool:
        """True if ``encode_chat`` works without an explicit template."""
        return self._has_chat_template

    @property
    def chat_template(self) -> str | None:
        """The template's text; None if there is none, or several, or one that is Python code."""
        template = self._hub.chat_template
        return template if isinstance(template, str) else None

    @property
    def takes_tools(self) -> bool:
        """True if the template writes tools into the prompt."""
        return self._takes_tools

    @functools.cached_property
    @at_one_time()
    def _takes_tools(self) -> bool:
        messages = [{"role": "user", "content": "Hello"}]
        try:
            return self.render_chat(messages, tools=[_PROBE_TOOL]) != self.render_chat(messages)
        except InvalidRequestError:
            # The template refuses this short conversation, so search its text instead.
            return "tools" in (self.chat_template or "")

    def writing_calls(self, write: WriteCalls) -> ParallmTokenizer:
        """Return a copy that writes tool calls into contents if the template writes none."""
        copied = copy.copy(self)
        copied._write_calls = write
        copied.__dict__.pop("_forms", None)
        return copied

    def probe_template(self) -> Sequence[str]:
        """Find out what the template takes; return what it leaves out, with tools or without."""
        self.template_variables({})
        without, with_tools = (self.template_form(has_tools=flag).losses for flag in (False, True))
        if not self.takes_tools:
            # Requests with tools are refused.
            return without
        return [
            *(loss for loss in without if loss in with_tools),
            *(f"without tools, {loss}" for loss in without if loss not in with_tools),
            *(f"with tools, {loss}" for loss in with_tools if loss not in without),
        ]

    def template_form(self, *, has_tools: bool) -> TemplateForm:
        """Return how conversations are rewritten for the template, with tools or without."""
        return self._forms[has_tools]

    def template_variables(
        self, variables: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return variables with the template's own names of thinking; see ``ThinkingVariables``."""
        return self._thinking.merged(defaults or {}, variables)

    @functools.cached_property
    @at_one_time()
    def _thinking(self) -> ThinkingVariables:
        if not self._has_chat_template:
            return ThinkingVariables()
        question = {"role": "user", "content": _PROBE_TEXT}
        options = _options(None, add_generation_prompt=True)
        return probed_thinking(
            lambda variables: self._written([dict(question)], {**variables, **options}),
            self.chat_template,
        )

    @functools.cached_property
    def _forms(self) -> Mapping[bool, TemplateForm]:
        """The form without tools and with tools, for which a model may have another template."""
        if not self._has_chat_template:
            return {False: TemplateForm(), True: TemplateForm()}
        question = {"role": "user", "content": _PROBE_TEXT}
        tools = probed_tools(
            lambda tools: self._written(
                [dict(question)], _options(tools, add_generation_prompt=True)
            )
        )
        with_tools = replace(self._probed([_PROBE_TOOL]), tools=tools)
        return {False: self._probed(None), True: with_tools}

    def _probed(self, tools: Sequence[Mapping[str, Any]] | None) -> TemplateForm:
        options = _options(tools, add_generation_prompt=True)
        return probed_form(lambda messages: self._written(messages, options), self._write_calls)

    def _written(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Return what the template writes for messages that it takes."""
        if self._needs_parts:
            messages = [_in_parts(message) for message in messages]
        return self._render(messages, options)

    @functools.cached_property
    def _needs_parts(self) -> bool:
        """True if the template does not write a content that is a text, as those of LLaVA."""
        probe = {"role": "user", "content": _PROBE_TEXT}
        return not self._writes(probe) and self._writes(_in_parts(probe))

    def _writes(self, message: dict[str, Any]) -> bool:
        """True if the template writes the content of a message."""
        try:
            return _PROBE_TEXT in self._render(
                [message], _options(None, add_generation_prompt=True)
            )
        except InvalidRequestError:
            return False

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that ``skip_special_tokens`` leaves out, as text."""
        return self._vocabulary.special_tokens

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its text in the vocabulary; None if it is not one token."""
        return self._vocabulary.token_id(token)

    def vocabulary(self) -> Mapping[str, int]:
        """Return the id of every token, in a new mapping."""
        return self._hub.get_vocab()

    @property
    def backend_json(self) -> str | None:
        """The text of its ``tokenizer.json``; None if it is not one of the tokenizers library."""
        return self._vocabulary.backend_json

    def has_vocabulary_of(self, other: ParallmTokenizer) -> bool:
        """True if both give every token the same id."""
        return self._hub.get_vocab() == other._hub.get_vocab()

    def limited(self, max_model_len: int) -> ParallmTokenizer:
        """Return a copy that refuses texts longer than a model's context, in tokens."""
        copied = copy.copy(self)
        copied._limit = TokenLimit(most=max_model_len, slack=_ANCHOR_TOKENS)
        return copied

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: TokenLimit | None = None
    ) -> list[int]:
        """Tokenise a text; see ``generation.model.Tokenizer``."""
        limit = limit or self._limit
        if self._released is not None:
            (ids,) = self._released.ids([text], limit, add_special_tokens=add_special_tokens)
            return list(ids)
        with self._shared().use() as renderer:
            ids = renderer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        limit.check(len(ids))
        return list(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence of tokens."""
        if self._released is not None:
            return self._released.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._vocabulary.decode(token_ids, skip_special_tokens=skip_special_tokens)

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
        """Apply the chat template.

        Conversations that the model's own template does not take are rewritten; see
        ``template_form``. ``template_kwargs`` are further variables for the template; they cannot
        replace the arguments above.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages.
        """
        if chat_template is None and not self._has_chat_template:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or give a chat_template.",
                param="messages",
            )
        own = chat_template is None
        form = self.template_form(has_tools=bool(tools)) if own else TemplateForm()
        options = dict(template_kwargs or {}) | _options(
            form.fit_tools(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        if own:
            return self._written(form.fit(messages), options)
        return self._render(form.fit(messages), options | {"chat_template": chat_template})

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        limit: TokenLimit | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the tokens of ``render_chat``'s text, without adding special tokens twice."""
        text = self.render_chat(messages, **options)
        return self.encode(text, add_special_tokens=False, limit=limit)

    def token_string(self, token_id: int) -> str:
        """Return a token as text; incomplete UTF-8 becomes U+FFFD."""
        return self._vocabulary.token_bytes(token_id).decode(errors="replace")

    def vocabulary_string(self, token_id: int) -> str:
        """Return a token as it is written in the vocabulary, such as "Ġword"."""
        return self._vocabulary.token_string(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token contributes."""
        return self._vocabulary.token_bytes(token_id)

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        hidden: Collection[int] = (),
    ) -> ByteLevelDetokenizer | WindowDetokenizer:
        """Return a fresh incremental detokenizer for one sequence."""
        return self._vocabulary.detokenizer(
            skip_special_tokens=skip_special_tokens, shown=shown, hidden=hidden
        )

    def _render(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        with template_refusals():
            return rendered(self._chat, self._lanes, messages, options)

    def _shared(self) -> Lanes[TextRenderer]:
        assert self._lanes is not None, "this tokenizer is called without locks"
        return self._lanes


def _options(
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> dict[str, Any]:
    """Return the arguments of a template that no variable can replace."""
    return {
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a text, is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}
