"""Prompts that their caller wrote, as a text or as tokens, with places for images.

A text has the placeholder of the model once for each image. So have tokens, or they have all
tokens of an image, as in the prompt that an earlier answer gave back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_parallm.images.form import ImageForm
from mlx_parallm.images.processor import PreparedImage
from mlx_parallm.images.prompt import ImagePrompt, with_runs
from mlx_parallm.types.errors import InvalidRequestError

Encode = Callable[[str], Sequence[int]]


def written_prompt(
    prompt: str | Sequence[int],
    images: Sequence[PreparedImage],
    form: ImageForm,
    *,
    placeholder_id: int | None,
    encode: Encode,
) -> ImagePrompt:
    """Return a prompt that its caller has written.

    Args:
        prompt: a text with one placeholder for each image; or tokens with one placeholder, or
            with all tokens, for each.
        images: those of the placeholders, in order.
        form: how the model takes images.
        placeholder_id: the token of the placeholder; None if it is not one token.
        encode: tokenises a text; only that of a prompt's beginning gets special tokens.

    Raises:
        InvalidRequestError: the placeholders do not fit the images (param "messages").
    """
    if isinstance(prompt, str):
        return _of_text(prompt, images, form, encode)
    collapsed = _CollapsedPrompt(prompt, images, form, placeholder_id, encode)
    return with_runs("", collapsed.token_ids(), images, form)


def _of_text(
    prompt: str, images: Sequence[PreparedImage], form: ImageForm, encode: Encode
) -> ImagePrompt:
    pieces = prompt.split(form.family.placeholder)
    if len(pieces) - 1 != len(images):
        raise _misfit(len(pieces) - 1, len(images), form)
    written = zip(images, pieces[1:], strict=True)
    text = pieces[0] + "".join(image.written.text + after for image, after in written)
    return with_runs(text, encode(text), images, form)


class _CollapsedPrompt:
    """The tokens of a prompt, with one feature token for each run of them."""

    def __init__(
        self,
        prompt: Sequence[int],
        images: Sequence[PreparedImage],
        form: ImageForm,
        placeholder_id: int | None,
        encode: Encode,
    ) -> None:
        self._prompt = list(prompt)
        self._form = form
        self._placeholder_id = placeholder_id
        # WRITTEN: the tokens of each image, and its runs.
        self._written = [(list(encode(image.written.text)), image.written.runs) for image in images]
        known_id = -1 if placeholder_id is None else placeholder_id
        self._num_placeholders = self._prompt.count(known_id)
        # Where a placeholder is a feature token, as many as images are one for each.
        is_one_each = self._num_placeholders == len(images)
        self._may_be_whole = form.feature_id != placeholder_id or not is_one_each

    def token_ids(self) -> list[int]:
        """Return the tokens.

        Raises:
            InvalidRequestError: the placeholders do not fit the images.
        """
        ids: list[int] = []
        place, rest = 0, iter(self._written)
        written = next(rest, None)
        while place < len(self._prompt):
            token_id = self._prompt[place]
            is_mark = self._is_placeholder(place)
            if token_id != self._form.feature_id and not is_mark:
                ids.append(token_id)
                place += 1
                continue
            if written is None:
                raise self._misfit()
            num_rows, core = self._whole(place, *written)
            if not num_rows and not is_mark:
                raise self._misfit()
            ids += core if num_rows else written[0]
            place += num_rows or 1
            written = next(rest, None)
        if written is not None:
            raise self._misfit()
        return ids

    def _is_placeholder(self, place: int) -> bool:
        """True if an image has to be written here."""
        if self._prompt[place] != self._placeholder_id:
            return False
        # Some models keep the placeholder before the feature tokens.
        before_rows = self._prompt[place + 1 : place + 2] == [self._form.feature_id]
        return self._placeholder_id == self._form.feature_id or not before_rows

    def _whole(
        self, place: int, token_ids: Sequence[int], runs: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Return how many tokens of an image are here, and these with one for each run.

        The number is 0 if they are not all here.
        """
        feature_id = self._form.feature_id
        places = [at for at, token_id in enumerate(token_ids) if token_id == feature_id]
        if not self._may_be_whole or len(places) != len(runs) or not places:
            return 0, []
        core = list(token_ids[places[0] : places[-1] + 1])
        lengths = iter(runs)
        rows = [
            each
            for token_id in core
            for each in [token_id] * (next(lengths) if token_id == feature_id else 1)
        ]
        is_here = self._prompt[place : place + len(rows)] == rows
        return (len(rows), core) if is_here else (0, [])

    def _misfit(self) -> InvalidRequestError:
        return _misfit(self._num_placeholders, len(self._written), self._form)


def _misfit(num_placeholders: int, num_images: int, form: ImageForm) -> InvalidRequestError:
    return InvalidRequestError(
        f"The prompt has {num_placeholders} placeholders {form.family.placeholder} for "
        f"{num_images} images. An image has one of them, or in token ids all of its tokens.",
        param="messages",
    )
