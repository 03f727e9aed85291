"""Where a prompt's latest turn begins is found among its tokens, whatever its template does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.images.latest_turn import Messages, common_length, tokens_before
from mlx_parallm.images.latest_turn import turn_place as place_of
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.tokenizer.tokenizer import ParallmTokenizer
from mlx_parallm.types.errors import InvalidRequestError

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>"]
TEXTS = st.lists(
    st.one_of(st.sampled_from(SPECIAL), st.text("ab \n", max_size=400), st.text(max_size=4)),
    max_size=6,
).map("".join)


class NoSpecialTokens:
    special_tokens = frozenset[str]()

    def token_id(self, token: str) -> int | None:
        raise AssertionError(token)


@functools.cache
def demo() -> ParallmTokenizer:
    return load_tokenizer(DEMO_FOLDER)


def encode(text: str) -> Sequence[int]:
    return demo().encode(text, add_special_tokens=False)


def said(*contents: str) -> Messages:
    """Return a conversation; the first letter of a content is that of its role."""
    roles = {"u": "user", "a": "assistant", "t": "tool", "s": "system"}
    return [{"role": roles[content[0]], "content": content} for content in contents]


def chat(messages: Messages) -> str:
    return "".join(f"<{each['role']}>{each['content']}</>" for each in messages)


def thoughtful(messages: Messages) -> str:
    """Render the thoughts of the turns behind the last user's, as Qwen3 does."""
    last = max(n for n, each in enumerate(messages) if each["role"] == "user")
    return "".join(
        f"<{each['role']}>{'hm, ' if n > last and each['role'] == 'assistant' else ''}"
        f"{each['content']}</>"
        for n, each in enumerate(messages)
    )


def moving(messages: Messages) -> str:
    """Put the system prompt into the last turn of the user, as Mistral's templates do."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    turns = [each for each in messages if each["role"] != "system"]
    last = [each for each in turns if each["role"] == "user"][-1]
    return "".join(
        f"<{each['role']}>{system if each == last else ''}{each['content']}" for each in turns
    )


def strict(messages: Messages) -> str:
    if len(messages) > 2:
        raise InvalidRequestError("no long conversations")
    return chat(messages)


@pytest.mark.parametrize(
    ("render", "messages", "before"),
    [
        (chat, said("u1"), "<user>"),
        (chat, said("s", "u1"), "<system>s</><user>"),
        (chat, said("s", "u1", "a1", "u2"), "<system>s</><user>u1</><assistant>a1</><user>"),
        (chat, said("u1", "a1", "t1", "a2", "t2"), "<user>"),
        (chat, said("u1", "u1"), "<user>u1</><user>"),
        (chat, said("s", "u1", "s2"), "<system>s</><user>"),
        (chat, said("u1", "a1"), "<user>"),
        (chat, said("s", "a1"), None),
        (chat, [], None),
        (thoughtful, said("u1", "a1", "u2", "a2", "t"), "<user>u1</><assistant>a1</><user>"),
        (moving, said("s", "u1", "a1", "u2"), "<user>u1<assistant>a1<user>"),
        (moving, said("s", "u1"), "<user>"),
        (strict, said("u1"), None),
    ],
)
def test_a_prompt_parts_where_the_latest_turn_of_the_user_begins(
    render: Callable[[Messages], str], messages: Messages, before: str | None
) -> None:
    rendered = render(messages) if messages else ""
    place = place_of(rendered, messages, render)
    assert (None if place is None else rendered[:place]) == before


def test_the_other_turn_keeps_the_fields_of_the_message() -> None:
    def named(messages: Messages) -> str:
        return "".join(f"{each.get('name', '?')}: {each['content']}\n" for each in messages)

    messages = [{"role": "user", "name": "eve", "content": "hello"}]
    assert place_of(named(messages), messages, named) == len("eve: ")


@given(text=TEXTS, other=TEXTS)
def test_common_length(text: str, other: str) -> None:
    length = common_length(text, other)
    assert text[:length] == other[:length]
    assert length == min(len(text), len(other)) or text[length] != other[length]


@pytest.mark.parametrize("tokens", [demo(), NoSpecialTokens()], ids=["special", "none"])
@given(text=TEXTS, data=st.data())
def test_tokens_before_a_place_end_there_or_before(
    tokens: ParallmTokenizer | NoSpecialTokens, text: str, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(text)))
    ids = tuple(encode(text))
    count = tokens_before(text, place, ids, tokens, encode)
    before = demo().decode(ids[:count], skip_special_tokens=False).encode(errors="replace")
    assert text[:place].encode(errors="replace").startswith(before.removesuffix(b"\xef\xbf\xbd"))


def test_the_place_is_found_without_encoding_behind_a_special_token() -> None:
    text = "<|im_start|>system\nrule<|im_end|>\n<|im_start|>user\nword"

    def refuse(_: str) -> Sequence[int]:
        raise AssertionError("nothing is to be encoded")

    ids = tuple(encode(text))
    count = tokens_before(text, len(text) - 4, ids, demo(), refuse)
    assert demo().decode(ids[:count], skip_special_tokens=False) == text[: -len("user\nword")]
