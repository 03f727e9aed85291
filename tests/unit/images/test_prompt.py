"""Conversations with images become tokens and inputs, and marks that users type stay text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.images.families import OneRun, WrittenImage
from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.images.prompt import Hide, ImagePrompt, Messages, image_prompt, text_prompt
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.model_input import FEATURE, TOKEN_IDS

MARK, FEATURE_ID = "<image>", 7
FORM = ImageForm(
    family=OneRun(3),
    folder=Path(),
    feature_id=FEATURE_ID,
    template_reads_parts=True,
    row_bytes=10,
    fingerprint="",
)


def image(*runs: int, text: str | None = None, content: str = "a") -> PreparedImage:
    written = WrittenImage(text or MARK * len(runs), runs)
    return PreparedImage(written, {}, content)


def render(messages: Messages, _: Hide | None = None, *, between: str = "|") -> str:
    texts: list[str] = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts += [MARK if part["type"] == "image" else part["text"] for part in parts]
    return between.join(texts)


def encode(text: str) -> list[int]:
    """Return 7 for a mark, and each other character as its code."""
    ids: list[int] = []
    while text:
        is_mark = text.startswith(MARK)
        ids.append(FEATURE_ID if is_mark else ord(text[0]))
        text = text[len(MARK) :] if is_mark else text[1:]
    return ids


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


def prompt(
    content: Any, *images: PreparedImage, form: ImageForm = FORM, between: str = "|"
) -> ImagePrompt:
    messages = [{"role": "user", "content": content}]
    shown = partial(render, between=between)
    return image_prompt(messages, images, form, render=shown, encode=encode)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image", "source": object()}


def test_runs_are_written_out_and_have_spans() -> None:
    made = prompt([text_part("x"), IMAGE, text_part("y"), IMAGE], image(3), image(2))
    assert list(made.token_ids) == [*codes("x|"), 7, 7, 7, *codes("|y|"), 7, 7]
    assert [(each.span.start, each.span.stop) for each in made.inputs if each.span] == [
        (2, 5),
        (8, 10),
    ]
    assert [each.nbytes for each in made.inputs] == [30, 20]
    assert made.text == "x|<image>|y|<image>"


def test_marks_between_runs_are_rows_of_the_span() -> None:
    made = prompt([text_part("x"), IMAGE], image(2, 1, text="[<image>;<image>]"))
    assert list(made.token_ids) == [*codes("x|["), 7, 7, ord(";"), 7, ord("]")]
    (source,) = made.inputs
    assert source.span is not None
    assert (source.span.start, source.span.stop) == (3, 7)
    ids = np.frombuffer(source.arrays[TOKEN_IDS].data, np.int32)
    assert ids.tolist() == [FEATURE, FEATURE, ord(";"), FEATURE]


def test_marks_that_were_typed_stay_text() -> None:
    made = prompt([text_part("a<image>b"), IMAGE, text_part("<image>")], image(2))
    expected = [*codes("a<image>b|"), 7, 7, *codes("|<image>")]
    assert list(made.token_ids) == expected
    assert made.text == "a<image>b|<image>|<image>"


PARTS = ["image", MARK, "<ima", "g", "e>", "ge>", "", "w", MARK * 2]


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.sampled_from(["|", ""]))
def test_each_image_has_its_run_whatever_is_typed(contents: list[str], between: str) -> None:
    parts = [IMAGE if each == "image" else text_part(each) for each in contents]
    images = [image(2 + place) for place in range(contents.count("image"))]
    made = prompt([text_part("s"), *parts], *images, between=between)
    texts = [MARK if each == "image" else each for each in contents]
    assert made.text == between.join(["s", *texts])
    assert [len(each.span or ()) for each in made.inputs] == [
        2 + place for place in range(len(images))
    ]
    assert sum(each == FEATURE_ID for each in made.token_ids) == sum(
        each.written.runs[0] for each in images
    )


def test_a_mark_in_two_texts_that_the_template_trims_and_joins_stays_text() -> None:
    parts = [text_part("<ima "), text_part("\nge>"), IMAGE]

    def trimmed(messages: Messages, _: Hide) -> str:
        texts = [part.get("text", MARK).strip() for part in messages[0]["content"]]
        return "".join(texts)

    messages = [{"role": "user", "content": parts}]
    made = image_prompt(messages, [image(2)], FORM, render=trimmed, encode=encode)
    assert list(made.token_ids) == [*codes("<image>"), 7, 7]


@pytest.mark.parametrize("has_image", [True, False])
def test_marks_in_descriptions_of_tools_stay_text(has_image: bool) -> None:
    # Python programs may give a tuple.
    tools = ({"function": {"description": f"draws an {MARK}"}},)

    def described(messages: Messages, hide: Hide) -> str:
        return hide(tools)[0]["function"]["description"] + render(messages)

    messages = [{"role": "user", "content": [IMAGE] if has_image else "x"}]
    if has_image:
        made = image_prompt(messages, [image(2)], FORM, render=described, encode=encode)
    else:
        made = text_prompt(messages, FORM, render=described, encode=encode)
    assert list(made.token_ids) == codes(f"draws an {MARK}") + ([7, 7] if has_image else [120])


class Bars:
    """The bar between messages is a special token."""

    special_tokens = frozenset({"|"})

    def token_id(self, token: str) -> int | None:
        return ord(token)


@pytest.mark.parametrize(
    ("before", "start"),
    [([], 0), (["ab"], 3), (["a", image(4, 2)], 9), ([image(4), "a", image(2)], 10)],
)
@pytest.mark.parametrize("has_image", [True, False])
def test_the_latest_turn_is_found_behind_the_rows_of_images(
    before: list[str | PreparedImage], start: int, *, has_image: bool
) -> None:
    latest = [image(3), "b"] if has_image else ["b"]
    messages = [
        {
            "role": "user",
            "content": [
                text_part(each) if isinstance(each, str) else {"type": "image"} for each in content
            ],
        }
        for content in filter(None, (before, latest))
    ]
    images = [each for each in (*before, *latest) if isinstance(each, PreparedImage)]
    made = image_prompt(messages, images, FORM, render=render, encode=encode, marks=Bars())
    assert made.turn_start == start
    assert [ord("|")] == list(made.token_ids[start - 1 : start]) or not start
    assert image_prompt(messages, images, FORM, render=render, encode=encode)[:3] == made[:3]


def test_templates_of_texts_get_the_marks() -> None:
    form = replace(FORM, template_reads_parts=False)
    made = prompt([IMAGE, text_part("x")], image(1), form=form)
    assert list(made.token_ids) == [7, *codes("\nx")]


def test_marks_stay_text_where_there_is_no_image() -> None:
    messages = [{"role": "user", "content": f"x{MARK}y"}]
    made = text_prompt(messages, FORM, render=render, encode=encode)
    assert FEATURE_ID not in made.token_ids
    assert made.text == f"x{MARK}y"
    assert FEATURE_ID in text_prompt(messages, None, render=render, encode=encode).token_ids


def test_a_template_that_drops_a_image_is_refused() -> None:
    messages = [{"role": "user", "content": [IMAGE, IMAGE]}]
    with pytest.raises(InvalidRequestError, match="1 images of 2") as caught:
        image_prompt(
            messages,
            [image(1), image(1)],
            FORM,
            render=lambda *_: MARK,
            encode=encode,
        )
    assert caught.value.param == "messages"
