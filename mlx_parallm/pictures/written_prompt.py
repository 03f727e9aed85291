"""Prompts that their caller wrote, as a text or as tokens, with places for pictures.

A text has the placeholder of the model once for each picture. So have tokens, or they have all
tokens of a picture, as in the prompt that an earlier answer gave back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_parallm.pictures.form import PictureForm
from mlx_parallm.pictures.processor import PreparedPicture
from mlx_parallm.pictures.prompt import PicturePrompt, with_runs
from mlx_parallm.types.errors import InvalidRequestError

Encode = Callable[[str], Sequence[int]]


def written_prompt(
    prompt: str | Sequence[int],
    pictures: Sequence[PreparedPicture],
    form: PictureForm,
    *,
    placeholder_id: int | None,
    encode: Encode,
) -> PicturePrompt:
    """Return a prompt that its caller has written.

    Args:
        prompt: a text with one placeholder for each picture; or tokens with one placeholder, or
            with all tokens, for each.
        pictures: those of the placeholders, in order.
        form: how the model takes pictures.
        placeholder_id: the token of the placeholder; None if it is not one token.
        encode: tokenises a text; only that of a prompt's beginning gets special tokens.

    Raises:
        InvalidRequestError: the placeholders do not fit the pictures (param "messages").
    """
    if isinstance(prompt, str):
        return _of_text(prompt, pictures, form, encode)
    collapsed = _CollapsedPrompt(prompt, pictures, form, placeholder_id, encode)
    return with_runs("", collapsed.token_ids(), pictures, form)


def _of_text(
    prompt: str, pictures: Sequence[PreparedPicture], form: PictureForm, encode: Encode
) -> PicturePrompt:
    pieces = prompt.split(form.family.placeholder)
    if len(pieces) - 1 != len(pictures):
        raise _misfit(len(pieces) - 1, len(pictures), form)
    written = zip(pictures, pieces[1:], strict=True)
    text = pieces[0] + "".join(picture.written.text + after for picture, after in written)
    return with_runs(text, encode(text), pictures, form)


class _CollapsedPrompt:
    """The tokens of a prompt, with one feature token for each run of them."""

    def __init__(
        self,
        prompt: Sequence[int],
        pictures: Sequence[PreparedPicture],
        form: PictureForm,
        placeholder_id: int | None,
        encode: Encode,
    ) -> None:
        self._prompt = list(prompt)
        self._form = form
        self._placeholder_id = placeholder_id
        # WRITTEN: the tokens of each picture, and its runs.
        self._written = [
            (list(encode(picture.written.text)), picture.written.runs) for picture in pictures
        ]
        known_id = -1 if placeholder_id is None else placeholder_id
        self._num_placeholders = self._prompt.count(known_id)
        # Where a placeholder is a feature token, as many as pictures are one for each.
        is_one_each = self._num_placeholders == len(pictures)
        self._may_be_whole = form.feature_id != placeholder_id or not is_one_each

    def token_ids(self) -> list[int]:
        """Return the tokens.

        Raises:
            InvalidRequestError: the placeholders do not fit the pictures.
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
        """True if a picture has to be written here."""
        if self._prompt[place] != self._placeholder_id:
            return False
        # Some models keep the placeholder before the feature tokens.
        before_rows = self._prompt[place + 1 : place + 2] == [self._form.feature_id]
        return self._placeholder_id == self._form.feature_id or not before_rows

    def _whole(
        self, place: int, token_ids: Sequence[int], runs: Sequence[int]
    ) -> tuple[int, list[int]]:
        """Return how many tokens of a picture are here, and these with one for each run.

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


def _misfit(num_placeholders: int, num_pictures: int, form: PictureForm) -> InvalidRequestError:
    return InvalidRequestError(
        f"The prompt has {num_placeholders} placeholders {form.family.placeholder} for "
        f"{num_pictures} pictures. A picture has one of them, or in token ids all of its tokens.",
        param="messages",
    )
