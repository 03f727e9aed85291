"""Chats rendered without transformers have the texts that transformers writes."""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Iterator
from datetime import datetime, tzinfo
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from mlx_lm import tokenizer_utils
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from typing_extensions import override

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.template_time import at_one_time, template_now
from mlx_parallm.tokenizer.jinja_chat import JinjaChat, PlainTokenizer, template_refusals
from mlx_parallm.tokenizer.libraries import chat_of, plain_of
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.errors import InvalidRequestError

USER = {"role": "user", "content": " hi <b>&amp; \u4f60 "}
DONE = {"role": "assistant", "content": "Well, "}
THOUGHT = {**DONE, "reasoning": "Hm. ", "name": None}
BLOCKS = {"role": "assistant", "content": [{"type": "text", "text": "One "}, {"type": "image"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [True, None]}}}

TEMPLATES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ bos_token }}",
    "{% for m in messages %}{{ m.content | trim }}|{% endfor %}",
    "{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ documents }}",
    "{{ tools | tojson(sort_keys=true, separators=(',', ':')) }}{{ messages[0] | tojson(true) }}",
    "{%- for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}"
    "\n{{ m }}\n{% endfor %}\n",
    "{% set ns = namespace(a=1, self=2) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}"
    "{% endfor %}{{ ns.a }}{{ ns.self }}",
    "{% set ns = namespace(_a=1) %}{{ ns._a }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys('xy', 0) }}{{ dict([('k', 1)]) }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}"
    "{{ x }}{% endfor %}",
    "{{ messages[0].__class__ }}{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{{ messages[-1].reasoning_content }}/{{ messages[-1].thinking }}/{{ messages[-1].reasoning }}",
    "{{ messages[-1].name is defined }}{{ mood }}{{ kind }}{{ thing }}{{ enable_thinking }}",
    "{% if add_generation_prompt %}prompt{% endif %}{{ strftime_now('%Y-%m-%d') }}",
    "{{ messages[-1].content[0].text }}{{ messages[-1].content }}",
    "{% broken",
    "nothing of the messages",
)
CHATS: tuple[list[dict[str, Any]], ...] = (
    [USER],
    [USER, DONE],
    [USER, THOUGHT],
    [USER, BLOCKS],
    [],
)


class Mood(enum.StrEnum):
    GOOD = "good"


class Thing:
    """An object that a template must not reach."""

    def __repr__(self) -> str:
        return "a thing"


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"add_generation_prompt": True, "tools": [TOOL]},
    {"continue_final_message": True},
    {"continue_final_message": "reasoning"},
    {"continue_final_message": "reasoning_content"},
    {"continue_final_message": True, "add_generation_prompt": True},
    {"mood": Mood.GOOD, "kind": (1, 2.5, [None]), "thing": Thing(), "enable_thinking": False},
    {"documents": [3]},
    {"documents": [{"title": "t", "text": "x"}], "eos_token": "<other>"},
    {"padding": True, "return_tensors": "np", "max_length": 3, "truncation": True},
    {"sanitize_control_tokens": True},
    {"return_assistant_tokens_mask": True},
    {"messages": [DONE]},
)


class Clock(datetime):
    @override
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return template_now()


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give both the same time: else a day may end between their texts."""
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    with at_one_time():
        yield


def hub_of(template: Any) -> Any:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    backend.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", bos_token="a", chat_template=template
    )


def plain(hub: Any) -> PlainTokenizer:
    tokenizer = plain_of(hub, JinjaChat(hub.chat_template, hub.special_tokens_map))
    assert tokenizer is not None
    return pickle.loads(pickle.dumps(tokenizer))


def outcome(tokenizer: Any, chat: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Return a text, or that the caller gets an error of a template."""
    try:
        with template_refusals():
            return tokenizer.apply_chat_template(chat, tokenize=False, **options)
    except InvalidRequestError:
        return "refused"


class Characters(PreTrainedTokenizer):
    """A tokenizer whose code is Python."""

    vocab_size = 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(256)} | self.added_tokens_encoder

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)


def characters(template: Any) -> Any:
    special = {"eos_token": "</s>", "bos_token": AddedToken("a"), "extra_special_tokens": ["<e>"]}
    hub = Characters(**special)
    hub.chat_template = template
    return hub


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("of", [hub_of, characters])
def test_the_texts_are_those_of_transformers(of: Callable[[Any], Any], template: str) -> None:
    hub = of(template)
    ours = chat_of(hub, {}) if of is characters else plain(hub)
    for chat in CHATS:
        for options in OPTIONS:
            wanted = outcome(hub, chat, options)
            assert outcome(ours, chat, options) == wanted, (chat, options)


def test_some_of_these_texts_are_refused_and_some_are_not() -> None:
    texts = [
        outcome(plain(hub_of(template)), chat, options)
        for template in TEMPLATES
        for chat in CHATS
        for options in OPTIONS
    ]
    assert 0.1 < texts.count("refused") / len(texts) < 0.9


@pytest.mark.parametrize("name", [None, "default", "other", "tool_use", "{{ mood }}"])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("names", [("default", "other"), ("default", "tool_use"), ("other",)])
def test_one_of_several_templates_is_chosen_as_transformers_does(
    names: tuple[str, ...], tools: Any, name: str | None
) -> None:
    hub = hub_of({each: f"{each} {{{{ messages[0].content }}}}" for each in names})
    options = {"tools": tools, "chat_template": name}
    assert outcome(plain(hub), [USER], options) == outcome(hub, [USER], options)


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_the_demo_model_gets_the_prompts_that_mlx_lm_writes(options: dict[str, Any]) -> None:
    wrapper: Any = tokenizer_utils.load(DEMO_FOLDER)
    ours = load_tokenizer(DEMO_FOLDER)
    assert isinstance(ours._hub, PlainTokenizer)
    for chat in CHATS[:3]:
        for tools in (None, [TOOL]):
            wanted = wrapper.apply_chat_template(
                chat, tokenize=False, tools=tools, add_generation_prompt=True, **options
            )
            assert ours.render_chat(chat, tools=tools, template_kwargs=options) == wanted


def test_a_class_that_renders_itself_is_not_replaced() -> None:
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
            return "own"

    class OwnTemplate(PreTrainedTokenizerFast):
        def get_chat_template(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
            return "own"

    class OwnTokens(PreTrainedTokenizerFast):
        special_tokens_map = {}  # type: ignore[assignment]  # noqa: RUF012

    hub = hub_of(None)
    assert chat_of(hub, {}) is not None
    for own in (Own, OwnTemplate, OwnTokens):
        assert chat_of(own(tokenizer_object=hub.backend_tokenizer), {}) is None
    hub.apply_chat_template = lambda *_, **__: "own"
    assert chat_of(hub, {}) is None


def test_the_templates_words_are_kept() -> None:
    with pytest.raises(TemplateError, match="no"):
        plain(hub_of("{{ raise_exception('no') }}")).apply_chat_template([USER], tokenize=False)
