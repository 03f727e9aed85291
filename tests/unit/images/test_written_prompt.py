"""Prompts that callers wrote become tokens and inputs, with or without all tokens of an image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.images.families import (
    Gemma3Family,
    ImageFamily,
    OneRun,
    PixtralFamily,
    WrittenImage,
)
from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.images.prompt import ImagePrompt
from mlx_parallm.images.written_prompt import written_prompt
from mlx_parallm.types.errors import InvalidRequestError

# TOKENS: what the tokenizer of these tests knows; any other character is a token of its own.
TOKENS = ("<image>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<image_soft_token>")
TOKENS += ("<end_of_image>",)
FAMILIES: list[ImageFamily] = [OneRun(3), PixtralFamily(2), Gemma3Family(4)]


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        token = next((each for each in TOKENS if text.startswith(each)), text[0])
        ids.append(TOKENS.index(token) if token in TOKENS else ord(token))
        text = text[len(token) :]
    return ids


def form(family: ImageFamily) -> ImageForm:
    return ImageForm(
        family=family,
        folder=Path(),
        feature_id=TOKENS.index(family.feature_token),
        template_reads_parts=True,
        row_bytes=10,
        fingerprint="",
    )


def image(family: ImageFamily, size: int) -> PreparedImage:
    """Return an image with so many features in a row."""
    written = {
        OneRun: WrittenImage("<image>", (size,)),
        PixtralFamily: WrittenImage("[IMG][IMG_BREAK][IMG][IMG_END]", (size, size)),
        Gemma3Family: WrittenImage(
            "\n\n<start_of_image><image_soft_token><end_of_image>\n\n", (size,)
        ),
    }
    return PreparedImage(written[type(family)], {}, str(size))


def read(prompt: str | list[int], family: ImageFamily, *sizes: int) -> ImagePrompt:
    return written_prompt(
        prompt,
        [image(family, size) for size in sizes],
        form(family),
        placeholder_id=TOKENS.index(family.placeholder),
        encode=encode,
    )


def spans(prompt: ImagePrompt) -> list[tuple[int, int]]:
    return [(each.span.start, each.span.stop) for each in prompt.inputs if each.span]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["a{}b{}c", "{}{}", "{}ab{}"])
def test_texts_tokens_and_whole_images_are_equal(family: ImageFamily, text: str) -> None:
    text = text.format(family.placeholder, family.placeholder)
    by_text = read(text, family, 3, 5)
    by_marks = read(encode(text), family, 3, 5)
    whole = read(list(by_text.token_ids), family, 3, 5)
    assert by_text.token_ids == by_marks.token_ids == whole.token_ids
    assert spans(by_text) == spans(by_marks) == spans(whole)
    assert [each.arrays for each in by_text.inputs] == [each.arrays for each in whole.inputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_turn_adds_a_placeholder(family: ImageFamily) -> None:
    first = read(f"a{family.placeholder}b", family, 3)
    later = read([*first.token_ids, *encode(f"c{family.placeholder}")], family, 3, 5)
    both = read(encode(f"a{family.placeholder}bc{family.placeholder}"), family, 3, 5)
    assert later == both


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=5))
def test_any_mix_is_read_as_all_placeholders(images: list[tuple[int, bool]]) -> None:
    family = FAMILIES[1]
    sizes = [size for size, _ in images]
    expected = read(encode("a[IMG]") * len(images), family, *sizes)
    mixed: list[int] = []
    for size, is_whole in images:
        alone = read("a[IMG]", family, size)
        # The placeholder of one row is followed by a break, as a whole image is.
        mixed += alone.token_ids if is_whole else encode("a[IMG]")
    assert read(mixed, family, *sizes) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("count", "sizes"), [(1, (3, 5)), (2, (3,)), (1, ()), (0, (3,))])
def test_too_many_or_too_few_placeholders(
    family: ImageFamily, count: int, sizes: tuple[int, ...]
) -> None:
    text = f"a{family.placeholder}" * count
    message = f"{count} placeholders .* for {len(sizes)} images"
    for prompt in (text, encode(text)):
        with pytest.raises(InvalidRequestError, match=message):
            read(prompt, family, *sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_another_image_are_refused(family: ImageFamily) -> None:
    whole = list(read(f"a{family.placeholder}", family, 5).token_ids)
    for size in (4, 6):
        with pytest.raises(InvalidRequestError, match="for 1 images"):
            read(whole, family, size)


def test_a_placeholder_that_is_no_token_can_be_written_as_text() -> None:
    family = OneRun(3)
    made = written_prompt(
        "a<image>",
        [image(family, 2)],
        replace(form(family), feature_id=0),
        placeholder_id=None,
        encode=encode,
    )
    assert list(made.token_ids) == [ord("a"), 0, 0]
