"""The tokens of a conversation that a model learns, by the kinds of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.mezo.conversations import conversation_input
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import InvalidRequestError
from tests.corpus.template_folder import with_template

#: TEMPLATES by what they do; "$" is the end token.
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}${% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "line after the end": "{% for m in messages %}<{{ m.role }}>{{ m.content }}$\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "no end": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "prompt that is no beginning": "{% for m in messages %}<{{ m.role }}>{{ m.content }}$"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}",
    "last message otherwise": "{% for m in messages %}<{{ m.role }}>"
    "{% if loop.last and m.role == 'assistant' %}(){% endif %}{{ m.content }}${% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}${% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "text behind the end": "{% for m in messages %}<{{ m.role }}>{{ m.content }}${% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% else %}$<end>{% endif %}",
}
TURNS = (("user", "ask1"), ("assistant", "say1"), ("user", "ask2"), ("assistant", "say2é"))


class Tokens:
    """A tokenizer of bytes whose end token is "$"."""

    def __init__(self, template: str, *, spells: bool = True) -> None:
        self._inner: ParallmTokenizer = with_template(template)
        self._spells = spells
        (end,) = self._inner.encode("$", add_special_tokens=False)
        self.eos_ids = frozenset({end})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._inner.token_bytes(token_id)
        return piece if self._spells else b"_" + piece


def model_of(template: str, *, spells: bool = True) -> GenerationModel:
    tokenizer = Tokens(template, spells=spells)
    return cast("GenerationModel", SimpleNamespace(tokenizer=tokenizer, call_id_length=None))


def messages_of(
    turns: Sequence[tuple[str, str]], weights: Sequence[float | None] = ()
) -> list[ChatMessage]:
    rows = [{"role": role, "content": content} for role, content in turns]
    for row, weight in zip(rows, weights, strict=False):
        if weight is not None:
            cast("dict[str, Any]", row)["weight"] = weight
    return [ChatMessage.model_validate(row) for row in rows]


def learnt(model: GenerationModel, messages: Sequence[ChatMessage]) -> list[tuple[str, float]]:
    """Return the texts that are learnt, and the sum of each one's weights."""
    item = conversation_input(messages, None, model)
    ((choice,), (weights,)) = item.choices, item.weights
    assert len(choice) == len(weights)
    assert weights[0] != 0
    assert weights[-1] != 0
    parts: list[tuple[list[int], float]] = []
    before = 0.0
    for token, weight in zip(choice, weights, strict=True):
        if weight and not before:
            parts.append(([], 0.0))
        if weight:
            tokens, total = parts[-1]
            parts[-1] = [*tokens, token], total + weight
        before = weight
    return [
        (model.tokenizer.decode(tokens, skip_special_tokens=False), total)
        for tokens, total in parts
    ]


@pytest.mark.parametrize("spells", [True, False], ids=["spells", "pieces"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_assistant_wrote_is_learnt(name: str, spells: bool) -> None:
    model = model_of(TEMPLATES[name], spells=spells)
    texts = [text for text, _ in learnt(model, messages_of(TURNS))]
    end = "" if name == "no end" else "$"
    # The last message's own words are learnt too, where the template lets the model write them.
    last = "()" if name == "last message otherwise" else ""
    assert texts in (
        [f"say1{end}", f"{last}say2é{end}"],
        [f"say1{end}", f"{last}say2é{end}$"],
    )


@pytest.mark.parametrize("prompt", ["<assistant>", "<assistant><think>"])
def test_tool_calls_are_learnt(prompt: str) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
        "{% for call in m.tool_calls or () %}{{ call.function.name }}(){% endfor %}${% endfor %}"
        "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    rows: list[dict[str, Any]] = [
        {"role": "user", "content": "ask"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "seen"},
        {"role": "assistant", "content": "said"},
    ]
    messages = [ChatMessage.model_validate(row) for row in rows]
    (first, _), (second, _) = learnt(model_of(template), messages)
    assert "look" in first
    assert "seen" not in first
    assert first.endswith("$")
    assert second == "said$"


def test_the_prompt_is_what_comes_before() -> None:
    model = model_of(TEMPLATES["plain"])
    item = conversation_input(messages_of(TURNS[:2]), None, model)
    assert model.tokenizer.decode(item.token_ids) == "<user>ask1$<assistant>"
    assert sum(item.weights[0]) == pytest.approx(1.0)


def test_weights_choose_messages() -> None:
    model = model_of(TEMPLATES["plain"])
    assert [text for text, _ in learnt(model, messages_of(TURNS, (None, 0)))] == ["say2é$"]
    assert [text for text, _ in learnt(model, messages_of(TURNS, (None, 1, None, 0)))] == ["say1$"]
    (_, first), (_, second) = learnt(model, messages_of(TURNS, (None, 1, None, 2)))
    # Both count by their tokens; "é" has two.
    assert second / first == pytest.approx(2 * 7 / 5)


@pytest.mark.parametrize(
    ("turns", "weights", "why"),
    [
        (TURNS[:1], (), "no assistant message"),
        (TURNS, (None, 0, None, 0), "no assistant message"),
        (TURNS, (1,), "only an assistant's"),
        (TURNS, (None, -1), "must be a number"),
        (TURNS, (None, True), "must be a number"),
        (TURNS, (None, float("nan")), "must be a number"),
    ],
)
def test_conversations_that_teach_nothing_are_refused(
    turns: Sequence[tuple[str, str]], weights: Sequence[float | None], why: str
) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        conversation_input(messages_of(turns, weights), None, model_of(TEMPLATES["plain"]))


@pytest.mark.parametrize("content", ["", None, " \n", [], [{"type": "text", "text": ""}]], ids=str)
def test_a_turn_that_says_nothing_is_learnt_by_nobody(content: Any) -> None:
    model, turns = model_of(TEMPLATES["plain"]), messages_of(TURNS, (None, None, None, 1))
    silent = turns[1].model_copy(update={"content": content})
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]\.content is empty"):
        conversation_input([turns[0], silent, *turns[2:]], None, model)
    read = messages_of(TURNS[:2], (None, 0))[1].model_copy(update={"content": content})
    assert [text for text, _ in learnt(model, [turns[0], read, *turns[2:]])] == ["say2é$"]


def test_reasoning_that_the_template_does_not_write_is_not_learnt() -> None:
    reasoning = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    turns = messages_of(TURNS)
    turns[1] = ChatMessage.model_validate(reasoning)
    with pytest.raises(InvalidRequestError, match=r"writes nothing of messages\[1\]"):
        conversation_input(turns, None, model_of(TEMPLATES["plain"]))
    written = TEMPLATES["plain"].replace("{{ m.content }}", "{{ m.reasoning }}{{ m.content }}")
    assert [text for text, _ in learnt(model_of(written), turns)] == ["Hm.$", "say2é$"]


def test_a_template_that_hides_contents_is_refused() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>{% endif %}"
    )
    with pytest.raises(InvalidRequestError, match=r"messages\[1\]"):
        conversation_input(
            messages_of(TURNS),
            None,
            model_of(
                template.replace("m.content | upper", "'' if m.role == 'assistant' else m.content")
            ),
        )
