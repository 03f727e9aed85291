"""Conversations with images as tokens and inputs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.latest_turn import (
    SpecialTokens,
    answer_place,
    tokens_before,
    turn_place,
)
from mlx_parallm.images.processor import PreparedImage, host_array
from mlx_parallm.template_time import at_one_time
from mlx_parallm.types.content import digest_of
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_mapping, is_sequence
from mlx_parallm.types.model_input import (
    FEATURE,
    POSITIONS,
    TOKEN_IDS,
    HostArray,
    InputKind,
    ModelInput,
    Span,
)

Messages = Sequence[Mapping[str, Any]]
#: ``Hide``: returns a copy of a JSON value in which marks that were typed are replaced.
Hide = Callable[[Any], Any]
#: ``Render``: applies the chat template to messages; it hides marks in what else users wrote, such
#: as descriptions of tools.
Render = Callable[[Messages, Hide], str]


def as_it_is(value: Any) -> Any:
    """Return a value with all marks; see ``Hide``."""
    return value


class ImagePrompt(NamedTuple):
    """A conversation as a model takes it.

    Attributes:
        text: the conversation, with one feature token per run.
        token_ids: its tokens, with all feature tokens.
        inputs: the images, in order.
        turn_start: how many tokens are before the latest turn of the user; None if unknown.
        answer_start: how many tokens the next turn's prompt begins with too; None if unknown.
    """

    text: str
    token_ids: tuple[int, ...]
    inputs: tuple[ModelInput, ...] = ()
    turn_start: int | None = None
    answer_start: int | None = None


@at_one_time()
def image_prompt(
    messages: Messages,
    images: Sequence[PreparedImage],
    form: ImageForm,
    *,
    render: Render,
    encode: Callable[[str], Sequence[int]],
    marks: SpecialTokens | None = None,
) -> ImagePrompt:
    """Return a conversation with images as tokens and inputs.

    Args:
        messages: contents are texts, or lists of parts of the types "text" and "image".
        images: those of the parts, in order.
        form: how the model takes images.
        render: see ``Render``.
        encode: tokenises a text without adding special tokens.
        marks: the tokenizer's special tokens, to find ``turn_start`` and ``answer_start``; None:
            they are not wanted.

    Raises:
        InvalidRequestError: the template does not write each image once (param "messages").
    """
    typed = TypedMarks(form)
    shown = typed.messages(messages)
    rendered = render(shown, typed.hide)
    num_written = rendered.count(form.family.placeholder)
    if num_written != len(images):
        raise InvalidRequestError(
            f"The chat template writes {num_written} images of {len(images)}.", param="messages"
        )
    text = _with_images(rendered, images, form)
    prompt = with_runs(typed.shown(text), typed.encode(text, encode), images, form)
    if marks is None:
        return prompt
    places = [
        None if place is None else len(_with_images(rendered[:place], images, form))
        for place in _places(rendered, shown, lambda other: render(other, typed.hide))
    ]
    return _with_starts(prompt, text, places, marks, lambda piece: typed.encode(piece, encode))


def _places(
    rendered: str, messages: Messages, render: Callable[[Messages], str]
) -> tuple[int | None, int | None]:
    """Return where the latest turn and the answer begin in a text."""
    return turn_place(rendered, messages, render), answer_place(rendered, messages, render)


def _with_starts(
    prompt: ImagePrompt,
    text: str,
    places: Sequence[int | None],
    marks: SpecialTokens,
    encode: Callable[[str], Sequence[int]],
) -> ImagePrompt:
    """Return a prompt with its tokens before the places of its text; see ``_places``."""
    turn, answer = (
        None if place is None else tokens_before(text, place, prompt.token_ids, marks, encode)
        for place in places
    )
    return prompt._replace(turn_start=turn, answer_start=answer)


def _with_images(rendered: str, images: Sequence[PreparedImage], form: ImageForm) -> str:
    """Return what a template wrote, or a beginning of it, with images in place of placeholders."""
    pieces = rendered.split(form.family.placeholder)
    shown = zip(images, pieces[1:], strict=False)
    return pieces[0] + "".join(image.written.text + after for image, after in shown)


@at_one_time()
def text_prompt(
    messages: Messages,
    form: ImageForm | None,
    *,
    render: Render,
    encode: Callable[[str], Sequence[int]],
    marks: SpecialTokens | None = None,
) -> ImagePrompt:
    """Return a conversation without images as tokens; see ``image_prompt``.

    Args:
        messages: contents are texts.
        form: how the model takes images; None if it takes none.
        render: see ``Render``.
        encode: tokenises a text without adding special tokens.
        marks: the tokenizer's special tokens, to find ``turn_start`` and ``answer_start``; None:
            they are not wanted.
    """
    typed = None if form is None else TypedMarks(form)
    hide = as_it_is if typed is None else typed.hide
    shown: Messages = hide(list(messages))
    text = render(shown, hide)
    encode_shown = encode if typed is None else partial(typed.encode, encode=encode)
    ids = tuple(encode_shown(text))
    prompt = ImagePrompt(text if typed is None else typed.shown(text), ids)
    if marks is None:
        return prompt
    places = _places(text, shown, lambda other: render(other, hide))
    return _with_starts(prompt, text, places, marks, encode_shown)


class TypedMarks:
    """Marks of images that a user typed, which stay text.

    They are replaced by random texts while the template and the tokenizer look for marks.
    """

    def __init__(self, form: ImageForm) -> None:
        family = form.family
        self._form = form
        # Covers of marks, and the texts in which what each covers is encoded.
        self._covers: dict[str, str] = {}
        self._pieces: dict[str, tuple[str, ...]] = {}
        for mark in dict.fromkeys((family.placeholder, family.feature_token)):
            half = len(mark) // 2
            self._covers[mark] = self._cover(mark[:half], mark[half:])

    def messages(self, messages: Messages) -> list[dict[str, Any]]:
        """Return messages in the form that the chat template reads, with marks replaced."""
        return [_message(self._hide_parted(each), self._form) for each in self.hide(list(messages))]

    def _cover(self, *pieces: str) -> str:
        cover = f"mark{secrets.token_hex(16)}"
        self._pieces[cover] = pieces
        return cover

    def _begun_cover(self, begun: str) -> str:
        """Return the cover of what begins a mark, one for all places: there may be thousands."""
        covers = (cover for cover, pieces in self._pieces.items() if pieces == (begun,))
        return next(covers, None) or self._cover(begun)

    def _hide_parted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message without marks that begin in one text and go on in the next.

        A template may join texts, and trim them before. What begins such a mark is covered.
        """
        content = message.get("content")
        if not is_list(content):
            return message
        parts, behind = list(content), ""
        for place in reversed(range(len(parts))):
            if parts[place]["type"] != "text":
                behind = ""
                continue
            text = parts[place]["text"]
            end = len(text.rstrip())
            begin = end - self._num_begun(text[:end], behind)
            if begin < end:
                cover = self._begun_cover(text[begin:end])
                parts[place] = {**parts[place], "text": text[:begin] + cover + text[end:]}
            behind = (text.strip() + behind)[: max(map(len, self._covers))]
        return {**message, "content": parts}

    def _num_begun(self, text: str, behind: str) -> int:
        """Return how many characters at the end of ``text`` begin a mark that ``behind`` ends."""
        lengths = (
            length
            for mark in self._covers
            for length in range(1, len(mark))
            if text.endswith(mark[:length]) and behind.startswith(mark[length:])
        )
        return max(lengths, default=0)

    def hide(self, value: Any) -> Any:
        """Return a copy of a JSON value with the marks in its texts replaced."""
        if isinstance(value, str):
            for mark, cover in self._covers.items():
                value = value.replace(mark, cover)
            return value
        if is_mapping(value):
            return {key: self.hide(each) for key, each in value.items()}
        if is_sequence(value):
            return [self.hide(each) for each in value]
        return value

    def shown(self, text: str) -> str:
        """Return a text with the marks in their places again."""
        for cover, pieces in self._pieces.items():
            text = text.replace(cover, "".join(pieces))
        return text

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> list[int]:
        """Return the tokens of a text; a mark that was typed is encoded in two halves.

        So it does not become the token that stands for an image.
        """
        pieces = [text]
        for cover, covered in self._pieces.items():
            pieces = [part for piece in pieces for part in _joined(piece.split(cover), covered)]
        return [token_id for piece in pieces if piece for token_id in encode(piece)]


def _joined(pieces: Sequence[str], between: Sequence[str]) -> list[str]:
    """Return pieces with other texts between them."""
    joined = [pieces[0]]
    for piece in pieces[1:]:
        joined += [*between, piece]
    return joined


def _message(message: Mapping[str, Any], form: ImageForm) -> dict[str, Any]:
    """Return a message in the form that the chat template reads."""
    content = message.get("content")
    if is_list(content) and not form.template_reads_parts:
        texts = [
            form.family.placeholder if part["type"] == "image" else part["text"] for part in content
        ]
        return {**message, "content": "\n".join(texts)}
    return dict(message)


def with_runs(
    text: str, ids: Sequence[int], images: Sequence[PreparedImage], form: ImageForm
) -> ImagePrompt:
    """Return the prompt with each feature token repeated for its run."""
    places = [place for place, token_id in enumerate(ids) if token_id == form.feature_id]
    if len(places) != sum(len(image.written.runs) for image in images):
        raise InvalidRequestError(
            "The tokenizer does not keep the images' marks apart.", param="messages"
        )
    token_ids: list[int] = []
    inputs: list[ModelInput] = []
    taken, rest = 0, iter(places)
    for image in images:
        start = None
        for run in image.written.runs:
            place = next(rest)
            token_ids += ids[taken:place]
            start = len(token_ids) if start is None else start
            token_ids += [form.feature_id] * run
            taken = place + 1
        span = Span(start or 0, len(token_ids))
        inputs.append(image_input(image, form, span, token_ids[span.start : span.stop]))
    return ImagePrompt(text, (*token_ids, *ids[taken:]), tuple(inputs))


def image_input(
    image: PreparedImage, form: ImageForm, span: Span, token_ids: Sequence[int]
) -> ModelInput:
    """Return an image as an input whose rows are at ``span`` and have these token ids."""
    ids = np.array(token_ids, np.int32)
    ids[ids == form.feature_id] = FEATURE
    arrays = {**image.arrays, TOKEN_IDS: host_array(ids)}
    positions = image.positions
    if positions is not None:
        arrays[POSITIONS] = host_array(positions.astype(np.int32))
    return ModelInput(
        kind=InputKind.IMAGE,
        content=image.content,
        arrays=arrays,
        nbytes=len(span) * form.row_bytes,
        cost=len(span),
        span=span,
        may_cut=form.family.may_cut,
        num_positions=None if positions is None else int(positions.max()) + 1,
        shape_key=_shape_key(image.arrays),
    )


def _shape_key(arrays: Mapping[str, HostArray]) -> str:
    """Return a digest of what a tower's work on an image depends on besides its pixels.

    These are the shapes of its arrays, and integers such as the sides of its grid.
    """
    parts: list[str | bytes] = []
    for name, array in sorted(arrays.items()):
        numbers = b"" if array.dtype.startswith("float") else array.data
        parts += [f"{name} {array.dtype} {array.shape}", numbers]
    return digest_of("shapes", *parts)
