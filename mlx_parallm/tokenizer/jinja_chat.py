"""Tokenizers and chat templates without transformers: Jinja renders as transformers does.

A process without an engine renders chats too, and transformers takes more memory than all else in
it. The texts are those of ``apply_chat_template`` in transformers' ``utils/chat_template_utils.py``
(Apache-2.0), whose rules are followed here; tests compare both.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from tokenizers import Tokenizer
from typing_extensions import override

from mlx_parallm.template_time import template_now
from mlx_parallm.tokenizer.lanes import Lanes
from mlx_parallm.tokenizer.loaded import ChatRenderer, HubTokenizer, TextRenderer
from mlx_parallm.tokenizer.template_form import TemplateForm, probed_form
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping, is_object


class PlainTokenizer(HubTokenizer, TextRenderer, ChatRenderer):
    """A tokenizer whose class adds nothing to its backend.

    It can be unpickled in a process without transformers and MLX. Its methods may be called from
    any thread.
    """

    def __init__(self, backend: Tokenizer, chat: JinjaChat) -> None:
        """``backend`` neither truncates nor pads."""
        self._backend = backend
        self._chat = chat

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The template, or several by name; None if there is none."""
        return self._chat.templates

    @property
    @override
    def backend_tokenizer(self) -> Tokenizer:
        return self._backend

    @property
    @override
    def bos_token(self) -> str | None:
        return self._chat.special_tokens.get("bos_token")

    @property
    @override
    def all_special_ids(self) -> list[int]:
        added = self._backend.get_added_tokens_decoder()
        return [token_id for token_id, token in added.items() if token.special]

    @override
    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @override
    def encode(
        self, text: str, /, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> Sequence[int]:
        del verbose
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    @override
    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Spaces stay as they are."""
        assert not clean_up_tokenization_spaces, "decoding keeps spaces as they are"
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    @override
    def convert_ids_to_tokens(self, ids: int, /) -> str | None:
        return self._backend.id_to_token(ids)

    @override
    def apply_chat_template(
        self, conversation: list[dict[str, Any]], /, *, tokenize: bool, **options: Any
    ) -> str:
        return self._chat.apply_chat_template(conversation, tokenize=tokenize, **options)


# _TEMPLATE_ERRORS: exceptions of a Jinja template that was not written for such messages.
_TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
#: ``PROCESSOR_FILES``: files with the template of a processor, in their order.
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


@contextlib.contextmanager
def template_refusals() -> Generator[None]:
    """Turn errors of a template into InvalidRequestError with ``param`` "messages"."""
    try:
        yield
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(
            f"The chat template refused these messages: {error}", param="messages"
        ) from error


class ChatTemplate:
    """A pooling model's chat template. Its methods may be called from any thread."""

    def __init__(self, tokenizer: ChatRenderer, chat: ChatRenderer | None) -> None:
        """``chat`` renders from any thread; if there is none, ``tokenizer`` does for one."""
        self._chat = chat
        self._lanes = Lanes(tokenizer) if chat is None else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, special tokens included.

        Raises:
            InvalidRequestError: the template refuses it; ``param`` is "messages".
        """
        options = {
            **(template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self._written(self._form.fit(messages), options)

    def probe(self) -> Sequence[str]:
        """Find out what the template takes; return what it leaves out."""
        return self._form.losses

    @functools.cached_property
    def _form(self) -> TemplateForm:
        options = {"add_generation_prompt": False}
        return probed_form(lambda messages: self._written(messages, options))

    def _written(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        with template_refusals():
            return rendered(self._chat, self._lanes, messages, options)


def has_chat_template(folder: Path) -> bool:
    """True if a model's folder has a template, in a file of its own or in another's settings.

    Raises:
        ValueError: a file is not JSON.
    """
    if (folder / "chat_template.jinja").exists():
        return True
    settings = _settings(folder / "tokenizer_config.json")
    return bool(settings.get("chat_template")) or processor_template(folder) is not None


def processor_template(folder: Path) -> str | dict[str, str] | None:
    """Return the template of a model's processor: one, or several by name; None if it has none.

    Processors of models that take images keep it beside the tokenizer, whose own may be missing:
    older ones in ``chat_template.json``, some in ``processor_config.json``.

    Raises:
        ValueError: a file is not JSON, or its template is no text.
    """
    for file in PROCESSOR_FILES:
        template = _settings(folder / file).get("chat_template")
        if template and isinstance(template, str):
            return template
        if template:
            return _named_templates(template, file)
    return None


def _named_templates(value: Any, file: str) -> dict[str, str]:
    """Return several templates by name; a file has an object, or a list of named ones."""
    parts: list[Any] = value if is_list(value) else []
    named: Any = value
    if parts and all(is_object(part) for part in parts):
        named = {part.get("name"): part.get("template") for part in parts}
    if not is_object(named) or not all(isinstance(text, str) for text in named.values()):
        raise ValueError(f"{file}: chat_template must be a text, or texts by name")
    return {str(name): str(text) for name, text in named.items()}


def _settings(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if there is no such file, or no object in it."""
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if is_object(content) else {}


# _TAG marks the end of a message that is continued.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# _REASONING: names under which messages have their reasoning; the first is the one templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# _OF_TOKENIZING: options of transformers that decide how a text becomes tokens, and no text.
_OF_TOKENIZING = (
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
)
# _NEEDS_TOKENIZING: options that transformers refuses where only text is wanted.
_NEEDS_TOKENIZING = ("sanitize_control_tokens", "return_assistant_tokens_mask")


def rendered(
    chat: ChatRenderer | None,
    lanes: Lanes[Any] | None,
    messages: list[dict[str, Any]],
    options: Mapping[str, Any],
) -> str:
    """Return the text of a conversation, by ``chat`` or else by the tokenizers of the lanes."""
    if chat is not None:
        return str(chat.apply_chat_template(messages, tokenize=False, **options))
    assert lanes is not None, "a tokenizer of the lanes renders"
    with lanes.use() as tokenizer:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


@dataclass(frozen=True)
class JinjaChat(ChatRenderer):
    """The templates of one tokenizer. Its methods may be called from any thread.

    Attributes:
        templates: a template, or several by name; None if there is none.
        special_tokens: variables of every template, such as ``bos_token``.
        defaults: variables that a caller may replace.
    """

    templates: str | Mapping[str, str] | None
    special_tokens: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @override
    def apply_chat_template(
        self, conversation: list[dict[str, Any]], /, *, tokenize: bool, **options: Any
    ) -> str:
        assert not tokenize, "texts are encoded by the caller"
        return self.render(conversation, **options)

    def render(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Raises:
            ValueError, TypeError, TemplateError: the options or the messages do not fit.
        """
        template = self._chosen(chat_template, has_tools=tools is not None)
        _check(conversation, documents, add_generation_prompt, continue_final_message, variables)
        for name in (*_OF_TOKENIZING, *_NEEDS_TOKENIZING):
            variables.pop(name, None)
        messages = _messages(conversation)
        part = "content" if continue_final_message is True else continue_final_message
        continued = _mark_end(messages, part, template) if part else None
        text = _compiled(template).render(
            messages=messages,
            tools=_plain(tools),
            documents=_plain(documents),
            add_generation_prompt=add_generation_prompt,
            **_plain({**self.special_tokens, **self.defaults, **variables}),
        )
        return text if continued is None else _cut(text, continued)

    def _chosen(self, chat_template: str | None, *, has_tools: bool) -> str:
        if not isinstance(self.templates, Mapping):
            template = self.templates if chat_template is None else chat_template
            if template is None:
                raise ValueError("The tokenizer has no chat template, and none was given.")
            return template
        if chat_template is not None:
            return self.templates.get(chat_template, chat_template)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        raise ValueError(f"None of the chat templates is the default: {sorted(self.templates)}.")


def _check(
    conversation: Sequence[Mapping[str, Any]],
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool | str,
    variables: Mapping[str, Any],
) -> None:
    """Refuse what transformers refuses.

    Raises:
        ValueError: options exclude each other, or there is no message.
        TypeError: a document is no object.
    """
    if not conversation:
        raise ValueError("Cannot apply chat template to an empty conversation.")
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "continue_final_message and add_generation_prompt are not compatible. Use "
            "continue_final_message to continue the final message, and add_generation_prompt to "
            "begin a new one."
        )
    for name in _NEEDS_TOKENIZING:
        if variables.get(name):
            raise ValueError(f"{name} needs tokenize=True.")
    if not all(map(is_mapping, documents or ())):
        raise TypeError("documents must be a list of objects.")


def _messages(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the messages, without nulls, with reasoning under every name of it."""
    messages: list[dict[str, Any]] = []
    for message in conversation:
        plain = _plain({key: value for key, value in message.items() if value is not None})
        reasoning = next((plain[name] for name in _REASONING if plain.get(name) is not None), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        messages.append(plain)
    return messages


def _mark_end(messages: Sequence[dict[str, Any]], part: str, template: str) -> str:
    """Put the tag behind the part of the last message that is continued; return that part.

    Raises:
        ValueError: the message has no such text, or the template does not read it.
    """
    last = messages[-1]
    text = last.get(part)
    if text is None:
        raise ValueError(f'The final message has no "{part}" to continue.')
    names = [part]
    if part in _REASONING:
        names = [name for name in _REASONING if last.get(name) == text]
    if not any(name in template for name in names):
        raise ValueError(f'The chat template does not read "{part}", which is to be continued.')
    if isinstance(text, (list, tuple)):
        for block in reversed(cast("Sequence[Any]", text)):
            if "text" in block:
                text = block["text"]
                block["text"] += _TAG
                return text
        raise ValueError("The final message has no text to continue.")
    for name in names:
        last[name] += _TAG
    return text


def _cut(text: str, continued: str) -> str:
    """Return a text up to the tag.

    Raises:
        ValueError: the template dropped the message or a part of it.
    """
    tag = _TAG.strip()
    if continued.strip() not in text or tag not in text:
        raise ValueError("The final message is not in the text that the chat template wrote.")
    end = text.rindex(tag)
    # A template that trims messages has trimmed the tag too.
    is_kept = text[end : end + len(_TAG)] == _TAG
    return text[:end] if is_kept else text[:end].rstrip()


def _plain(value: Any) -> Any:
    """Return a copy of plain JSON types: templates are untrusted, and could call methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for base in (str, int, float):
        if isinstance(value, base):
            # A subclass may have other methods; this is the base's value.
            return getattr(base, f"__{base.__name__}__")(value)
    if is_mapping(value):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in cast("Sequence[Any]", value)]
        return items if is_list(value) else tuple(items)
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """The tag ``{% generation %}`` around what a model writes; here it only passes it on."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as a call of its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` for templates, without the attributes of a class."""

    def __call__(self, *pairs: Any, **items: Any) -> dict[Any, Any]:
        return dict(*pairs, **items)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        """Return a dict with these keys."""
        return dict.fromkeys(*values)


class _Namespace(Namespace):
    """``namespace`` for templates, without names that begin with an underscore."""

    def __init__(*args: Any, **items: Any) -> None:
        self, *pairs = args
        attributes = dict(*pairs, **items)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"A namespace of a chat template cannot have the attribute {name!r}.")


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return template_now().strftime(form)


@functools.lru_cache(maxsize=128)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja declares these two without types.
    names: Any = environment
    names.filters["tojson"] = _to_json
    names.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)
