"""Chat templates of pooling models, and what templates refuse."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from mlx_parallm.tokenizer.lanes import Lanes
from mlx_parallm.tokenizer.loaded import ChatRenderer
from mlx_parallm.tokenizer.template_form import TemplateForm, probed_form
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object

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

    def __init__(self, tokenizer: ChatRenderer, *, is_shared: bool) -> None:
        """``tokenizer`` has a chat template; several threads may call it if it ``is_shared``."""
        self._tokenizer = tokenizer
        self._lanes = None if is_shared else Lanes(tokenizer)

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
            if self._lanes is None:
                return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
            with self._lanes.use() as tokenizer:
                return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


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
