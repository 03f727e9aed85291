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
from mlx_parallm.types.json_values import is_object

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
    """True if a model's folder has a template, in a file of its own or in the tokenizer's config.

    Raises:
        ValueError: the config is not JSON.
    """
    if (folder / "chat_template.jinja").exists():
        return True
    config = folder / "tokenizer_config.json"
    if not config.exists():
        return False
    settings = json.loads(config.read_text(encoding="utf-8"))
    return is_object(settings) and bool(settings.get("chat_template"))
